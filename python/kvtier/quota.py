"""What a namespace may hold of each tier, and for how long."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvtier.config import Size, Tier, parse_size
from kvtier.errors import ConfigError

__all__ = ["Amount", "Quota"]

Amount: TypeAlias = Size | float
"""Part of a tier: bytes, text such as ``"4GiB"``, or a ``float`` above 0 up to 1.0, which is a share of the tier's size."""

_PAGE = 4096
_YEAR = 365 * 86400.0


@dataclass(frozen=True)
class Quota:
    """A namespace's quota: what is guaranteed to it, its cap, its priority, and how long its blocks live.

    An amount holds in every tier, each by itself: ``0.25`` is a quarter of DRAM and a quarter of NVMe, ``"4GiB"`` is that
    much of each. A mapping names tiers, ``{"dram": "4GiB", "nvme": 0.3}``; those it leaves out get none. Amounts count
    what blocks take there, in whole 4 KiB pages. What leaves the last tier below leaves HBM too, whatever is guaranteed there.

    Args:
        guaranteed: what no other namespace's blocks can push out. What is not used of it, others use meanwhile. All
            guarantees together are at most 90 % of a tier, and of DRAM at most 90 % of what the tables leave: where very many
            small blocks leave less, all shrink alike. Default none.
        cap: what the namespace never holds more than; at it, its own blocks make room for its own. Default no cap.
        priority: of what namespaces hold above their guarantees, that of lower priority leaves first; within one
            priority, that of the namespace whose blocks stay longest unused. Namespaces without a quota have 0, the
            default, and no guarantee.
        ttl: seconds from when a block was stored after which it is a miss, and the first to leave; at least a 64th of a
            second. Blocks that are there when the quota is set, as after a restart, count from then. Default none.

    Raises:
        ConfigError: for a value outside these.
    """

    guaranteed: Amount | Mapping[str, Amount] | None = None
    cap: Amount | Mapping[str, Amount] | None = None
    priority: int = 0
    ttl: float | None = None

    def __post_init__(self) -> None:
        for what, given in (("guaranteed", self.guaranteed), ("cap", self.cap)):
            for amount in given.values() if isinstance(given, Mapping) else [given]:
                _bytes(what, amount, 1 << 40)
        if (
            isinstance(self.priority, bool)
            or not isinstance(self.priority, int)
            or not -(2**31) <= self.priority < 2**31
        ):
            raise ConfigError(
                f"priority={self.priority!r} is not a priority; allowed are whole numbers, 0 is the usual one"
            )
        number = isinstance(self.ttl, int | float) and not isinstance(self.ttl, bool)
        if self.ttl is not None and not (number and 1 / 64 <= self.ttl <= _YEAR):
            raise ConfigError(
                f"ttl={self.ttl!r} was given; allowed are seconds from 1/64 to {_YEAR:.0f} (a year), or None"
            )

    def of(self, tiers: Sequence[Tier]) -> tuple[list[int], list[int | None]]:
        """Bytes that are guaranteed, and bytes at most, of each of these tiers."""
        guaranteed = [amount or 0 for amount in _resolve("guaranteed", self.guaranteed, tiers)]
        return guaranteed, _resolve("cap", self.cap, tiers)


def _resolve(what: str, given: Amount | Mapping[str, Amount] | None, tiers: Sequence[Tier]) -> list[int | None]:
    sizes = {type(tier).__name__.lower(): tier.size_bytes for tier in tiers}
    if not isinstance(given, Mapping):
        return [_bytes(what, given, size) for size in sizes.values()]
    unknown = sorted(set(given) - set(sizes))
    if unknown:
        raise ConfigError(f"{what} names {', '.join(unknown)}; the tiers of this store are {', '.join(sizes)}")
    return [_bytes(what, given.get(name), size) for name, size in sizes.items()]


def _bytes(what: str, amount: Amount | None, size: int) -> int | None:
    """Bytes of an amount of a tier of ``size`` bytes."""
    if amount is None:
        return None
    if isinstance(amount, float):
        if not 0 < amount <= 1:
            raise ConfigError(
                f'{what}={amount!r} is not a share of a tier; allowed are numbers above 0 up to 1.0, or sizes such as "4GiB"'
            )
        return max(_PAGE, math.floor(amount * size))
    try:
        return parse_size(amount, what, least=_PAGE)
    except ConfigError as error:
        raise ConfigError(
            f"{error}. A share of a tier is a float, such as 0.5, or 1.0 for all of it; for none, leave {what} out"
        ) from None
