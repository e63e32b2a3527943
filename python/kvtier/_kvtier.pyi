"""The native half of kvtier: no interface of its own, use the package."""

from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from typing import Any, final

from typing_extensions import Buffer

__all__ = [
    "DEFAULT_TIMEOUT",
    "MISSES",
    "POLICIES",
    "TIERS",
    "BareDisk",
    "Batch",
    "BlockView",
    "CodecBench",
    "Completions",
    "Core",
    "Counter",
    "DlpackView",
    "Feed",
    "Job",
    "Lease",
    "Operation",
    "Placed",
    "Policy",
    "Progress",
    "Region",
    "Space",
    "Trace",
    "__version__",
    "bound_memcpy",
    "check_dirs",
    "codec_decode",
    "codec_encode",
    "codec_frames",
    "codec_from_fp8",
    "codec_kernel",
    "codec_list",
    "codec_to_fp8",
    "codec_unzstd",
    "copy_kernel",
    "inspect_dir",
    "probe",
]

TIERS: list[str]
DEFAULT_TIMEOUT: float
MISSES: list[str]
POLICIES: list[str]
__version__: str

@final
class Space:
    def __new__(
        cls,
        identity: bytes,
        segments: Sequence[tuple[int, int]],
        block_tokens: int,
        dtype: str,
        itemsize: int,
        shape: Sequence[int] | None = None,
        token_axis: int = 0,
    ) -> Space: ...
    @property
    def digest(self) -> bytes: ...
    def pieces(self, nbytes: int, layers: _Range, tokens: _Range) -> list[tuple[int, int]]: ...
    def chain(self, tokens: Any, block_tokens: int, partial: bool, extras: Sequence[bytes]) -> list[bytes]: ...

@final
class Progress:
    def __new__(cls) -> Progress: ...
    def wait(self, report: Callable[[int, int], None] | None, timeout: float | None) -> bool: ...

@final
class Completions:
    def __new__(cls) -> Completions: ...
    def fileno(self) -> int: ...
    def drain(self) -> list[int]: ...

@final
class Operation:
    def result(self) -> Any: ...
    def discard(self) -> None: ...

@final
class Job:
    def wait(self, timeout: float | None) -> bool: ...
    def done(self) -> bool: ...
    def cancel(self) -> None: ...
    def results(self) -> bytes | None: ...
    def notify(self, completions: Completions, token: int) -> None: ...

@final
class BlockView(Buffer):
    @property
    def nbytes(self) -> int: ...
    @property
    def tier(self) -> str: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

@final
class DlpackView(Buffer):
    def __new__(cls, capsule: Any) -> DlpackView: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def readonly(self) -> bool: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Lease:
    @property
    def reasons(self) -> list[str | None]: ...
    def blocks(self) -> list[BlockView | None]: ...
    def release(self) -> None: ...

@final
class Feed:
    def host(self) -> list[tuple[int, int]]: ...
    def next(self, wait: bool) -> Batch | None: ...
    def stop(self) -> None: ...

@final
class Batch:
    def copies(self) -> list[tuple[int, int, int]]: ...
    def verify(self) -> None: ...
    def finish(self, ok: bool) -> None: ...

@final
class Placed:
    @property
    def at(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

@final
class Region:
    @property
    def nbytes(self) -> int: ...
    def in_flight(self) -> int: ...

_Range = tuple[int, int] | None

@final
class Core:
    def __new__(
        cls,
        tiers: Sequence[dict[str, Any]],
        policy: str,
        verify: bool,
        high: float,
        low: float,
        write_budget: int | None = None,
        progress: Progress | None = None,
    ) -> Core: ...
    def put(
        self,
        space: Space,
        key: bytes,
        data: Any,
        parent: bytes | None,
        replaces: bytes | None,
        importance: float,
        timeout: float | None,
    ) -> int: ...
    def put_many(
        self,
        space: Space,
        keys: Sequence[bytes],
        datas: Iterable[Any],
        parents: Sequence[bytes | None],
        replaces: bytes | None,
        importance: Sequence[float],
        timeout: float | None,
    ) -> bytes: ...
    def contains(self, space: Space, keys: Sequence[bytes]) -> list[bool]: ...
    def matching(self, space: Space, keys: Sequence[bytes]) -> tuple[int, int, list[str], list[tuple[str, int]]]: ...
    def sizes(self, space: Space, keys: Sequence[bytes], layers: _Range, tokens: _Range) -> list[int | None]: ...
    def get_into(
        self,
        space: Space,
        keys: Sequence[bytes],
        outs: Iterable[Any],
        layers: _Range,
        tokens: _Range,
        timeout: float | None,
    ) -> bytes: ...
    def lease(self, space: Space, keys: Sequence[bytes], verify: bool, timeout: float | None) -> Lease: ...
    def pin(self, space: Space, keys: Sequence[bytes], timeout: float | None) -> list[bool]: ...
    def unpin(self, space: Space, keys: Sequence[bytes]) -> list[bool]: ...
    def remove(self, space: Space, keys: Sequence[bytes]) -> list[bool]: ...
    def set_importance(self, space: Space, keys: Sequence[bytes], scores: Sequence[float]) -> list[bool]: ...
    def clear(self, space: Space | None) -> int: ...
    def flush(self, timeout: float | None) -> None: ...
    def close(self, timeout: float | None) -> None: ...
    def prefetch(self, space: Space, keys: Sequence[bytes], to: str, deadline: float | None, priority: int) -> Job: ...
    def feed(self) -> Feed | None: ...
    def place(
        self, space: Space, keys: Sequence[bytes], layers: _Range, tokens: _Range, take: bool
    ) -> list[Placed | None]: ...
    def register_region(self, buffer: Buffer) -> Region: ...
    def start_put_many(
        self,
        space: Space,
        keys: Sequence[bytes],
        datas: Iterable[Any],
        parents: Sequence[bytes | None],
        replaces: bytes | None,
        importance: Sequence[float],
        timeout: float | None,
        to: Completions,
        token: int,
    ) -> Operation: ...
    def start_get_into(
        self,
        space: Space,
        keys: Sequence[bytes],
        outs: Iterable[Any],
        layers: _Range,
        tokens: _Range,
        timeout: float | None,
        to: Completions,
        token: int,
    ) -> Operation: ...
    def start_lease(
        self,
        space: Space,
        keys: Sequence[bytes],
        verify: bool,
        timeout: float | None,
        to: Completions,
        token: int,
    ) -> Operation: ...
    def start_pin(
        self, space: Space, keys: Sequence[bytes], timeout: float | None, to: Completions, token: int
    ) -> Operation: ...
    def start_flush(self, timeout: float | None, to: Completions, token: int) -> Operation: ...
    def report(self) -> dict[str, Any]: ...
    def set_coding(
        self, space: Space, codec: str | None, element: str, layers: Sequence[tuple[int, int, int]]
    ) -> None: ...
    def set_quota(
        self, space: Space, guaranteed: Sequence[int], cap: Sequence[int | None], priority: int, ttl: float | None
    ) -> None: ...
    def namespace_report(self, space: Space) -> dict[str, Any]: ...

def check_dirs(paths: list[str | PathLike[str]], repair: bool) -> list[dict[str, Any]]: ...
def inspect_dir(path: str | PathLike[str]) -> dict[str, Any]: ...
def probe(path: str | PathLike[str]) -> dict[str, Any]: ...
def copy_kernel() -> str: ...

# What the machine itself can do, for `kvtier bench`.

def bound_memcpy(dst: Any, src: Any, block: int) -> float: ...

@final
class BareDisk:
    def __new__(cls, path: str | PathLike[str], size: int) -> BareDisk: ...
    @property
    def prepare_s(self) -> float: ...
    def run(
        self, write: bool, block: int, depth: int, start: int, count: int, sync: bool
    ) -> tuple[float, float, bool]: ...
    def latencies(self, block: int, start: int, count: int) -> list[float]: ...

# Policies by themselves, and replay.

@final
class Policy:
    def __new__(cls, name: str, pages: int) -> Policy: ...
    def admit(self, fingerprint: int, parent: int | None = None, pages: int = 1, importance: float = 0.0) -> bool: ...
    def insert(
        self, block: int, fingerprint: int, parent: int | None = None, pages: int = 1, importance: float = 0.0
    ) -> None: ...
    def hit(self, block: int) -> None: ...
    def remove(self, block: int) -> None: ...
    def defer(self, block: int) -> None: ...
    def set_importance(self, block: int, score: float) -> None: ...
    def victims(self, n: int, pinned: set[int]) -> list[int]: ...
    def __len__(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...

@final
class Counter:
    def __new__(cls) -> Counter: ...
    @property
    def value(self) -> int: ...

@final
class Trace:
    def __new__(
        cls,
        blocks: Sequence[int],
        lengths: Sequence[int],
        tokens: Sequence[int],
        seconds: Sequence[float],
        block_tokens: int,
    ) -> Trace: ...
    def replay(
        self,
        policy: str,
        capacities: Sequence[int],
        tail_first: bool,
        counter: Counter,
        budget: float | None = None,
    ) -> dict[str, Any]: ...

# Codecs by hand, and their speed.

_Dims = tuple[int, int, int, int]

def codec_list() -> list[tuple[str, int, bool]]: ...
def codec_kernel() -> str: ...
def codec_encode(codec: str, element: str, dims: _Dims, src: Any, threads: int) -> bytes: ...
def codec_frames(frames: Any) -> list[tuple[int, int, str, bool, str, _Dims]]: ...
def codec_decode(
    frames: Any, layers: tuple[int, int], tokens: tuple[int, int] | None, dst: Any, threads: int
) -> None: ...
def codec_to_fp8(kind: str, element: str, src: Any) -> bytes: ...
def codec_from_fp8(kind: str, src: Any) -> bytes: ...
def codec_unzstd(frame: Any, size: int) -> bytes: ...

@final
class CodecBench:
    def __new__(cls, codec: str, element: str, dims: _Dims) -> CodecBench: ...
    @property
    def room(self) -> int: ...
    def encode(self, src: Any, coded: Any) -> tuple[float, list[int]]: ...
    def decode(self, coded: Any, sizes: Sequence[int], dst: Any) -> float: ...
    def library(self, src: Any) -> tuple[float, float]: ...
