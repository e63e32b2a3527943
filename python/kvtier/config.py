"""How a store is set up: its tiers, its options, and the TOML that names them."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

from kvtier import _kvtier
from kvtier._kvtier import show_bytes
from kvtier.errors import ConfigError, UnsupportedError
from kvtier.machine import usable_memory

if TYPE_CHECKING:
    from kvtier.tiers.backend import DeviceBackend

__all__ = ["Cxl", "Dram", "Hbm", "Nvme", "Policy", "Size", "StoreConfig", "Tier", "parse_size"]

Size: TypeAlias = int | str
"""Bytes, or text such as ``"4GiB"`` (powers of 1024) or ``"100GB"`` (powers of 1000)."""
HugePages = Literal["transparent", "hugetlb", "off"]
Engine = Literal["auto", "io_uring", "threads"]
Policy = Literal[
    "auto",
    "importance",
    "fifo",
    "lru",
    "lfu",
    "clock",
    "sieve",
    "s3-fifo",
    "arc",
    "w-tinylfu",
    "gdsf",
    "fifo-leaf",
    "lru-leaf",
    "lfu-leaf",
    "clock-leaf",
    "sieve-leaf",
    "s3-fifo-leaf",
    "arc-leaf",
    "w-tinylfu-leaf",
    "gdsf-leaf",
]

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", 1)}
_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", 1)}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_NO_UNIT = re.compile(r"\s*([\d.]+)\s*([kmgtp])i?\s*", re.IGNORECASE)
"""What most programs take for a size, by two rules: powers of 1000, or of 1024."""

MIN_TIER = 1 << 20
_MOST = 1 << 63
DEFAULT_DRAM = 8 << 30


def parse_size(size: Size, what: str = "size", *, least: int = MIN_TIER) -> int:
    """Bytes of a size.

    Args:
        size: a whole number of bytes, or text with a unit: B, KB, MB, GB, TB, PB (powers of 1000) or KiB to PiB
            (powers of 1024).
        what: the name to use in the error.
        least: the smallest size that is allowed. Default 1 MiB, the smallest tier.

    Raises:
        ConfigError: for anything else, less than ``least``, or 2**63 and more.
    """
    count: int | None = None
    if isinstance(size, int) and not isinstance(size, bool):
        count = size
    elif isinstance(size, str) and (match := _SIZE.fullmatch(size)) and match[2].lower() in _UNITS:
        count = math.floor(float(match[1]) * _UNITS[match[2].lower()])
    if count is None:
        number, letter = "4", "G"
        if isinstance(size, str) and (match := _NO_UNIT.fullmatch(size)):
            number, letter = match[1], match[2].upper()
        raise ConfigError(
            f"{what}={size!r} is not a size; allowed are whole bytes, or text with a unit: "
            f'"{number}{letter}iB" (powers of 1024) or "{number}{letter}B" (powers of 1000), from KiB and KB to PiB and PB'
        )
    if not least <= count < _MOST:
        raise ConfigError(
            f"{what}={size!r} is too {'small' if count < least else 'large'}; allowed are {show_bytes(least)} to 8192 PiB, "
            'such as "4GiB"; a number without a unit is bytes'
        )
    return count


def _choice(what: str, value: object, allowed: object) -> None:
    names = get_args(allowed)
    if value not in names:
        raise ConfigError(f"{what}={value!r} is not known; allowed are {', '.join(names)}")


def check_policy(what: str, value: object, more: tuple[str, ...] = ()) -> None:
    """Raise :class:`ConfigError` unless ``value`` names a policy, one of ``more``, or is ``importance:SLOPE``."""
    if value in more:
        return
    try:
        _kvtier.Policy(value, 1)  # type: ignore[arg-type]
    except (TypeError, ConfigError):
        names = (*_kvtier.POLICIES, *more)
        raise ConfigError(
            f"{what}={value!r} is not known; allowed are {', '.join(names)}, and importance:SLOPE with a number of at least 0"
        ) from None


def _flag(what: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{what}={value!r} is not a switch; allowed are true and false")


def _rate(rate: object) -> None:
    if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf):
        raise ConfigError(f"emulate_gbs={rate!r} is not a rate; allowed is a number of GB/s above 0, or leave it out")


@dataclass(frozen=True)
class Dram:
    """A tier in memory: one arena, mapped once and kept.

    Args:
        size: its capacity; see :func:`parse_size`.
        huge_pages: ``"transparent"`` (default) asks the kernel for huge pages, ``"hugetlb"`` takes reserved ones and
            fails without, ``"off"`` uses 4 KiB pages.
        prefault: whether to touch all of it in the background right after the start (default), or on first use. Only
            memory that was prefaulted is registered with io_uring, which saves CPU time of every transfer.
        emulate_gbs: a rate limit of reads; see :class:`Nvme`.

    Raises:
        ConfigError: for a value outside the ones named.
    """

    size: Size = field(compare=False)
    huge_pages: HugePages = field(default="transparent", kw_only=True)
    prefault: bool = field(default=True, kw_only=True)
    emulate_gbs: float | None = field(default=None, kw_only=True)
    size_bytes: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size_bytes", parse_size(self.size))
        _choice("huge_pages", self.huge_pages, HugePages)
        _flag("prefault", self.prefault)
        _rate(self.emulate_gbs)


@dataclass(frozen=True)
class Cxl:
    """A tier in CXL memory: an arena on a NUMA node, or a mapping of a DAX device or file. Give exactly one of the two.

    Args:
        size: its capacity; see :func:`parse_size`.
        numa_node: the node to bind to; Linux shows CXL memory as a node without CPUs.
        path: a DAX device or a plain file to map.
        emulate_gbs: a rate limit of reads; see :class:`Nvme`.

    Raises:
        ConfigError: for neither or both of ``numa_node`` and ``path``, or a bad value.
    """

    size: Size = field(compare=False)
    numa_node: int | None = field(default=None, kw_only=True)
    path: str | Path | None = field(default=None, kw_only=True)
    emulate_gbs: float | None = field(default=None, kw_only=True)
    size_bytes: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size_bytes", parse_size(self.size))
        if (self.numa_node is None) == (self.path is None):
            raise ConfigError(
                f"a cxl tier takes either numa_node or path; given were numa_node={self.numa_node!r} and path={self.path!r}: "
                "`kvtier info` lists the nodes"
            )
        if self.numa_node is not None and (
            not isinstance(self.numa_node, int) or isinstance(self.numa_node, bool) or self.numa_node < 0
        ):
            raise ConfigError(
                f"numa_node={self.numa_node!r} is not a node; allowed are whole numbers from 0: `kvtier info` lists them"
            )
        if self.path is not None:
            _check_path(self.path)
            object.__setattr__(self, "path", Path(self.path))
        _rate(self.emulate_gbs)


@dataclass(frozen=True)
class Nvme:
    """A tier on one or several NVMe drives: one preallocated file in each directory, or block devices.

    Args:
        path: a directory or block device, or several of them to stripe blocks over.
        size: the capacity of all paths together; see :func:`parse_size`. The files never grow past it.
            A part of it describes the blocks, a block for every 16 KiB of the size: smaller ones cannot fill it (of
            4 KiB, a quarter).
        engine: ``"io_uring"``, ``"threads"``, or ``"auto"`` (default): io_uring where a real read through it works,
            else threads.
        emulate_gbs: a rate limit in GB/s (1e9 bytes) for what-if runs; every output that used one says "emulated".
            Default none.
        codec: ``"zstd"`` to compress what lies here, of every namespace that names no codec itself; ``"auto"`` to do so
            where the tier reads slower than one core decodes, by a quick look at both when the first namespace is made
            (``emulate_gbs`` counts as the tier's rate). Default no. A lossy codec is a namespace's to ask for.

    Raises:
        ConfigError: for no path, a path twice, or a bad value.
    """

    path: str | Path | tuple[str | Path, ...] = field(compare=False)
    size: Size = field(compare=False)
    engine: Engine = field(default="auto", kw_only=True)
    emulate_gbs: float | None = field(default=None, kw_only=True)
    codec: Literal["zstd", "auto"] | None = field(default=None, compare=False, kw_only=True)
    size_bytes: int = field(init=False, repr=False)
    paths: tuple[Path, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size_bytes", parse_size(self.size))
        given = self.path if isinstance(self.path, tuple | list) else (self.path,)
        if not given:
            raise ConfigError("an nvme tier needs at least one path: give a directory on the drive")
        for path in given:
            _check_path(path)
        paths = tuple(Path(path) for path in given)
        if len(set(paths)) != len(paths):
            raise ConfigError(f"path names the same place twice ({', '.join(map(str, paths))}): name each drive once")
        object.__setattr__(self, "path", given[0] if len(given) == 1 else tuple(given))
        object.__setattr__(self, "paths", paths)
        _choice("engine", self.engine, Engine)
        _rate(self.emulate_gbs)
        if self.codec not in (None, "zstd", "auto"):
            raise ConfigError(
                f'codec={self.codec!r} is not allowed for a tier; allowed are "zstd", which loses nothing, and "auto". A '
                "lossy codec is a namespace's to ask for: store.namespace(identity, layout, codec=...)"
            )


@dataclass(frozen=True)
class Hbm:
    """A tier in the memory of a GPU: a pool of copies of what the tiers below hold.

    Args:
        size: its capacity; see :func:`parse_size`.
        device: the GPU's number. Default 0.
        backend: ``"cuda"`` for the GPU through CuPy, ``"host"`` for memory of the process (for tests, and without a
            GPU), ``"auto"`` (default) for the GPU if it can be used, else the host, which a warning of the logger
            ``kvtier`` then says; or a :class:`kvtier.tiers.DeviceBackend` of the caller's, which the store closes.
            :attr:`Store.config` and ``stats()["tiers"]["hbm"]["device"]`` say which it is.

    Raises:
        ConfigError: for a value outside the ones named.
    """

    size: Size = field(compare=False)
    device: int = field(default=0, kw_only=True)
    backend: str | DeviceBackend = field(default="auto", kw_only=True)
    size_bytes: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size_bytes", parse_size(self.size))
        if isinstance(self.device, bool) or not isinstance(self.device, int) or self.device < 0:
            raise ConfigError(f"device={self.device!r} is not a GPU; allowed are whole numbers from 0")
        from kvtier.tiers.backend import DeviceBackend

        if self.backend not in ("auto", "cuda", "host") and not isinstance(self.backend, DeviceBackend):
            raise ConfigError(
                f"backend={self.backend!r} is not known; allowed are auto, cuda, host and a kvtier.tiers.DeviceBackend"
            )


Tier: TypeAlias = Hbm | Dram | Cxl | Nvme


@dataclass(frozen=True)
class StoreConfig:
    """Everything a store is opened with.

    Args:
        tiers: fastest first; at most one of each kind. None gives one :class:`Dram` of :func:`default_dram` bytes.
        policy: which block leaves first (docs/POLICIES.md); always in chain order, so that the last block of a chain
            goes before the others, whether or not the name says ``-leaf``. Default ``"auto"``. ``"importance:SLOPE"``
            says what each block before one adds to the cost of computing it; see :func:`kvtier.kappa.depth_slope`.
        verify: whether every read checks the checksums made at put (default). Without, a broken disk may go unnoticed.
        watermarks: ``(high, low)`` shares of a tier's capacity: above the first the mover starts to demote, down to
            the second. Over NVMe it also keeps 16 MiB free or on their way down, at most a sixteenth of the tier, so that
            puts go on while the device writes. Default ``(0.98, 0.95)``.
        write_budget: bytes a day that may be written to NVMe; see :func:`parse_size`. Default no limit.

    Raises:
        ConfigError: for a tier kind twice, tiers out of order, or a bad value.
    """

    tiers: tuple[Tier, ...] = ()
    policy: Policy | str = "auto"
    verify: bool = True
    watermarks: tuple[float, float] = (0.98, 0.95)
    write_budget: Size | None = None
    write_budget_bytes: int | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        tiers = tuple(self.tiers) or (Dram(default_dram()),)
        object.__setattr__(self, "tiers", tiers)
        order = [Hbm, Dram, Cxl, Nvme]
        for tier in tiers:
            if type(tier) not in order:
                raise ConfigError(f"{tier!r} is not a tier; allowed are Hbm(...), Dram(...), Cxl(...) and Nvme(...)")
        ranks = [order.index(type(tier)) for tier in tiers]
        if ranks != sorted(set(ranks)):
            given = ", ".join(type(tier).__name__ for tier in tiers)
            raise ConfigError(
                f"the tiers are {given}; allowed is at most one of each, in the order Hbm, Dram, Cxl, Nvme (an Nvme takes "
                "several paths)"
            )
        check_policy("policy", self.policy)
        _flag("verify", self.verify)
        marks = self.watermarks
        if not isinstance(marks, tuple | list) or len(marks) != 2 or not all(isinstance(m, int | float) for m in marks):
            raise ConfigError(
                f"watermarks={marks!r} is not a pair; allowed are two shares (high, low), for example (0.98, 0.95)"
            )
        if not 0 < marks[1] <= marks[0] <= 1:
            raise ConfigError(
                f"watermarks={tuple(marks)!r} are out of order; allowed is 0 < low <= high <= 1, given as (high, low)"
            )
        object.__setattr__(self, "watermarks", (float(marks[0]), float(marks[1])))
        budget = None if self.write_budget is None else parse_size(self.write_budget, "write_budget")
        object.__setattr__(self, "write_budget_bytes", budget)

    @classmethod
    def from_toml(cls, path: str | Path) -> StoreConfig:
        """Read a store's TOML: a ``[store]`` table with ``policy, verify, watermarks, write_budget`` and a ``[[tier]]`` table a tier.

        A tier has ``kind`` (``"hbm"``, ``"dram"``, ``"cxl"`` or ``"nvme"``), ``size`` and what its kind takes: ``device``,
        ``backend`` (hbm); ``numa_node``, ``path`` or ``device`` (cxl); ``path``, ``paths`` or ``device``, ``engine``,
        ``codec`` (nvme); ``huge_pages``, ``prefault`` (dram); all but hbm also ``emulate_gbs``. Relative paths count from the file's directory.

        Raises:
            ConfigError: where the file cannot be read, or holds an unknown table, key or value.
            UnsupportedError: for a ``codec`` of a memory tier, which this version does not have.
        """
        path = Path(path)
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read ({error.strerror}): give the path of a store's TOML file"
            ) from error
        except ValueError as error:
            raise ConfigError(f"{path} is not TOML: {error}") from error
        try:
            return cls._from_document(document, path.parent)
        except (ConfigError, UnsupportedError) as error:
            raise type(error)(f"{path}: {error}") from None

    @classmethod
    def _from_document(cls, document: Mapping[str, Any], base: Path) -> StoreConfig:
        _known("the file", document, {"store", "tier"})
        store = document.get("store", {})
        tiers = document.get("tier", [])
        if not isinstance(store, Mapping):
            raise ConfigError(f"store = {store!r} is not a table: write [store]")
        if not isinstance(tiers, list) or not all(isinstance(tier, Mapping) for tier in tiers):
            raise ConfigError("tier is not a list of tables: write [[tier]], with two brackets, once a tier")
        _known("[store]", store, {"policy", "verify", "watermarks", "write_budget"})
        options = dict(store)
        if "watermarks" in options and isinstance(options["watermarks"], list):
            options["watermarks"] = tuple(options["watermarks"])
        return cls(tuple(_tier(tier, base) for tier in tiers), **options)


_TIER_KEYS: Mapping[str, frozenset[str]] = {
    "hbm": frozenset({"kind", "size", "device", "backend"}),
    "dram": frozenset({"kind", "size", "huge_pages", "prefault", "emulate_gbs"}),
    "cxl": frozenset({"kind", "size", "numa_node", "path", "device", "emulate_gbs"}),
    "nvme": frozenset({"kind", "size", "path", "paths", "device", "engine", "emulate_gbs", "codec"}),
}


def _tier(table: Mapping[str, Any], base: Path) -> Tier:
    kind = table.get("kind")
    if not isinstance(kind, str) or kind not in _TIER_KEYS:
        raise ConfigError(f"a [[tier]] has kind = {kind!r}; allowed are {', '.join(_TIER_KEYS)}")
    if "codec" in table and kind != "nvme":
        raise UnsupportedError(
            f"codec = {table['codec']!r} in the {kind} tier is not in this version: take the line out"
        )
    _known(f"the {kind} tier", table, _TIER_KEYS[kind])
    if "size" not in table:
        raise ConfigError(f'the {kind} tier has no size: add one, for example size = "4GiB"')
    if kind == "hbm":
        return Hbm(table["size"], **{key: value for key, value in table.items() if key not in ("kind", "size")})
    places = [key for key in ("path", "paths", "device") if key in table]
    if len(places) > 1:
        raise ConfigError(f"the {kind} tier has {' and '.join(places)}: give one of them")
    paths = tuple(_resolve(path, base) for path in _listed(table[places[0]])) if places else ()
    fields = {key: value for key, value in table.items() if key not in ("kind", "size", "path", "paths", "device")}
    if kind == "dram":
        return Dram(table["size"], **fields)
    if kind == "cxl":
        return Cxl(table["size"], path=paths[0] if paths else None, **fields)
    return Nvme(paths, table["size"], **fields)


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _known(where: str, table: Mapping[str, Any], allowed: frozenset[str] | set[str]) -> None:
    unknown = sorted(set(table) - allowed)
    if unknown:
        raise ConfigError(f"{where} has the unknown key {', '.join(unknown)}; allowed are {', '.join(sorted(allowed))}")


def _check_path(path: object) -> None:
    if not isinstance(path, str | Path) or not str(path):
        raise ConfigError(f"path={path!r} is not a path; give the directory of a drive, or a device")


def _resolve(path: object, base: Path) -> Path:
    _check_path(path)
    return base / cast("str | Path", path)


def default_dram() -> int:
    """Bytes of DRAM for a plain ``Store()``: a quarter of what this process may use, at most 8 GiB. Does not block."""
    return max(MIN_TIER, min(DEFAULT_DRAM, usable_memory() // 4))
