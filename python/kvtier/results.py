"""What the verbs give: one small immutable value a key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier import _kvtier
from kvtier.errors import DeadlineError, FullError

__all__ = ["Match", "PutResult", "Result"]


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one key of a read.

    Attributes:
        hit: whether exactly the bytes that were put are there now.
        tier: ``"hbm"``, ``"dram"``, ``"cxl"`` or ``"nvme"``: where they were found; ``None`` for a miss.
        reason: why it is a miss: ``"absent"``, ``"corrupt"`` (dropped), ``"deadline"`` (it may still arrive),
            ``"full"`` (no memory to load it into), ``"device"`` (the device failed; dropped), ``"codec"`` or
            ``"cancelled"``; ``None`` for a hit.
    """

    hit: bool
    tier: str | None = None
    reason: str | None = None

    def __bool__(self) -> bool:
        return self.hit


@dataclass(frozen=True, slots=True)
class PutResult:
    """What became of one block that was put.

    Attributes:
        stored: whether it was stored by this call.
        present: whether it was there already.
        tier: where it is now; ``None`` if it is nowhere.
        reason: why it is nowhere: ``"parent"`` (the parent that was named is not in the store, so the block would be
            useless), ``"full"`` or ``"deadline"`` (no room).
    """

    stored: bool
    present: bool
    tier: str | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Match:
    """How long a prefix is resident, and where.

    Attributes:
        blocks: how many leading keys are resident.
        tokens: the tokens in them; 0 in an opaque namespace.
        tiers: the fastest tier of each.
        bytes: their payload bytes by that tier.
    """

    blocks: int = 0
    tokens: int = 0
    tiers: Sequence[str] = ()
    bytes: dict[str, int] = field(default_factory=dict)


# The extension gives one byte a key (rust/kvtier-py/src/core.rs): the values behind it are shared.
_RESULTS = {code: Result(True, tier) for code, tier in enumerate(_kvtier.TIERS)}
_RESULTS |= {16 + code: Result(False, None, reason) for code, reason in enumerate(_kvtier.MISSES)}
_MISSES = {result.reason: result for result in _RESULTS.values()}
_PUTS = {code: PutResult(True, False, tier) for code, tier in enumerate(_kvtier.TIERS)}
_PUTS |= {16 + code: PutResult(False, True, tier) for code, tier in enumerate(_kvtier.TIERS)}
_PUTS |= {32 + i: PutResult(False, False, None, reason) for i, reason in enumerate(("parent", "full", "deadline"))}


def results(codes: bytes) -> list[Result]:
    """Results of the extension's codes."""
    return [_RESULTS[code] for code in codes]


def miss(reason: str | None) -> Result:
    """The result of a key that is a miss for this reason."""
    return _MISSES[reason]


def put_results(codes: bytes) -> list[PutResult]:
    """Results of the extension's codes for puts."""
    return [_PUTS[code] for code in codes]


def put_result(code: int) -> PutResult:
    """The result of a put of one block, where a lack of room is an error."""
    result = _PUTS[code]
    if result.reason == "full":
        raise FullError("no room for the block now: release leases, wait with timeout=, or use a larger tier")
    if result.reason == "deadline":
        raise DeadlineError("no room for the block before the deadline: wait longer, or use a larger tier")
    return result
