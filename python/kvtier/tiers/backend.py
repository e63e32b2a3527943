"""What a device's memory must do, and which implementation there is on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtier.config import Size, parse_size
from kvtier.errors import ClosedError, ConfigError, InvalidBlockError, StorageError, UnsupportedError

__all__ = [
    "Copy",
    "Copying",
    "Delivery",
    "DeviceBackend",
    "check_copies",
    "check_deliveries",
    "check_place",
    "open_backend",
]

CLOSED = "the device's memory is closed: open a backend again"


class Copy(NamedTuple):
    """Bytes to move between the pool and the host's memory."""

    at: int
    """Where they begin in the pool."""
    host: NDArray[np.uint8]
    """``uint8[bytes]``, C-contiguous, on the host: the source of a copy in, the target of a copy out."""


class Delivery(NamedTuple):
    """Bytes to copy for a caller: into an array on the device, or out of one."""

    source: Any
    """``uint8[bytes]``, contiguous: on the device (a view of the pool too), or on the host."""
    target: Any
    """``uint8[bytes]``, contiguous, on the device or on the host."""


class Copying(Protocol):
    """A batch of copies under way: an event."""

    def done(self) -> bool:
        """Whether it has ended, well or not. Does not block."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it has ended; whether it has after ``timeout`` seconds (default: wait).

        Raises:
            StorageError: a copy failed; nothing of the batch may be used, and its place is free for another.
        """
        ...

    def before(self, stream: Any) -> None:
        """Let a compute stream of the device's library wait for it, without blocking the caller."""
        ...


@runtime_checkable
class DeviceBackend(Protocol):
    """A pool of bytes on a device, and two queues of copies: one in, one out.

    Batches of one direction are done in the order in which they were given; between the two there is no order, save what
    ``after`` asks for. The backend keeps the host's memory of a batch alive until it has ended. Who frees a place in the
    pool, or reads from it, waits for the copies that touch it: which place holds what is the caller's (the core's) matter.
    All methods may be called from any thread.
    """

    @property
    def name(self) -> str:
        """``"host"`` or ``"cuda:0"``."""
        ...

    @property
    def capacity(self) -> int:
        """Bytes of the pool."""
        ...

    def register(self, memory: NDArray[np.uint8]) -> None:
        """Make the host's memory (the DRAM arena) known to the driver, so that copies need no second one. Blocks.

        It must stay mapped until :meth:`close`.
        """
        ...

    def copy_in(self, copies: Sequence[Copy], *, after: Copying | None = None) -> Copying:
        """Host to pool. Does not block.

        Args:
            copies: the batch; their places in the pool do not overlap.
            after: begin only when this one has ended.

        Raises:
            InvalidBlockError: for a place outside the pool, or memory that is not contiguous bytes; nothing was begun.
            ClosedError: after :meth:`close`.
        """
        ...

    def copy_out(self, copies: Sequence[Copy], *, after: Copying | None = None) -> Copying:
        """Pool to host, as :meth:`copy_in`."""
        ...

    def view(self, at: int, size: int, keep: Any = None) -> Any:
        """``uint8[size]`` of the pool from ``at`` on, without a copy: an object with ``__dlpack__`` on the device.

        ``keep`` is kept as long as the view, or an array made from it, is; so is the pool itself.
        """
        ...

    def array(self, obj: Any) -> Any | None:
        """``uint8[bytes]`` over an array of the caller's on this device, without a copy; ``None`` for what lies elsewhere.

        Raises:
            InvalidBlockError: it is not contiguous, or on another device of this kind.
        """
        ...

    def deliver(self, deliveries: Sequence[Delivery], stream: Any = None) -> Copying:
        """Copy into or out of arrays of the caller's, behind what is queued on ``stream``. Does not block.

        Args:
            deliveries: the batch. Sources and targets are kept alive until it has ended.
            stream: a stream of the device's library, of torch or of any other that has ``__cuda_stream__``, or its address;
                default the current one.
        """
        ...

    def staging(self, size: int) -> NDArray[np.uint8]:
        """``uint8[size]`` on the host that is copied to fast, of any content."""
        ...

    def scatter(
        self, blocks: Sequence[Any], planes: Sequence[Any], slots: Sequence[ArrayLike], stream: Any = None
    ) -> Copying:
        """Spread blocks over an engine's paged KV. Does not block.

        Args:
            blocks: ``uint8[bytes]`` on the device each, in a layout's order.
            planes: the paged KV, one array a layer and plane in the block's order (keys, then values; one for MLA):
                ``[pages, page_tokens, heads, head_dim]``, or ``[pages, page_tokens, dim]``, of any dtype. Axes may be
                permuted views, but the last one is contiguous.
            slots: of each block, where its tokens go: ``page * page_tokens + place in the page``. No slot twice.
            stream: as in :meth:`deliver`.

        Raises:
            InvalidBlockError: shapes, sizes and slots do not fit together; nothing was begun.
        """
        ...

    def gather(
        self, blocks: Sequence[Any], planes: Sequence[Any], slots: Sequence[ArrayLike], stream: Any = None
    ) -> Copying:
        """Collect blocks from an engine's paged KV: :meth:`scatter`, the other way."""
        ...

    def close(self) -> None:
        """Block until all copies have ended, forget registered memory, let go of the pool: it is freed with its last view.
        Closing twice is allowed.
        """
        ...


def open_backend(capacity: Size, device: int | str = "auto") -> DeviceBackend:
    """A pool on a device.

    Args:
        capacity: its size; see :func:`kvtier.config.parse_size`.
        device: ``"host"`` for memory of the process, ``"cuda"`` or a number for a GPU through CuPy, ``"auto"`` (default)
            for the first GPU if there is one, else the host.

    Raises:
        UnsupportedError: a GPU was asked for and cannot be used; the message says what was found.
        ConfigError: for another device.
        StorageError: the device has not that much memory.
    """
    size = parse_size(capacity, "capacity")
    if device not in ("auto", "host", "cuda") and (
        isinstance(device, bool) or not isinstance(device, int) or device < 0
    ):
        raise ConfigError(f'device={device!r} is not known; allowed are "auto", "host", "cuda" and a GPU\'s number')
    from kvtier.tiers.host import HostBackend

    if device == "host":
        return HostBackend(size)
    from kvtier.tiers import cuda

    found = cuda.missing(device if isinstance(device, int) else 0)
    if found is None:
        return cuda.CupyBackend(size, device if isinstance(device, int) else 0)
    if device == "auto":
        return HostBackend(size)
    raise UnsupportedError(f'a GPU was asked for (device={device!r}), but {found}: mend that, or ask for "host"')


def no_thread(name: str, error: RuntimeError) -> StorageError:
    """What to raise where a thread cannot be started."""
    return StorageError(f"cannot start the thread {name}: {error}. Raise the limit on processes (ulimit -u)")


def check_copies(copies: Sequence[Copy], capacity: int, *, closed: bool) -> None:
    """Refuse a batch that cannot be copied."""
    if closed:
        raise ClosedError(CLOSED)
    for at, host in copies:
        if not isinstance(host, np.ndarray) or host.dtype != np.uint8 or host.ndim != 1 or not host.flags.c_contiguous:
            raise InvalidBlockError(
                "a copy takes a C-contiguous uint8 array of one dimension: pass a view of that kind"
            )
        check_place(at, host.nbytes, capacity)


def check_deliveries(deliveries: Sequence[Delivery], *, closed: bool) -> None:
    """Refuse a batch that cannot be copied."""
    if closed:
        raise ClosedError(CLOSED)
    for source, target in deliveries:
        if source.nbytes != target.nbytes:
            raise InvalidBlockError(
                f"{source.nbytes} bytes were given for an array of {target.nbytes}: make them equal"
            )


def check_place(at: int, size: int, capacity: int) -> None:
    """Refuse bytes that do not lie in the pool."""
    if size < 0 or not 0 <= at <= capacity - size:
        raise InvalidBlockError(
            f"{size} bytes at {at} do not lie in the pool, which has {capacity}: give another place"
        )
