"""Who was busy when, within one request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

__all__ = ["Event", "busy"]

Kind = Literal["load", "compute", "stall", "store"]


class Event(NamedTuple):
    """Something that took time."""

    kind: Kind
    """``"load"``, ``"compute"``, ``"stall"`` (the model waited for a load) or ``"store"``."""
    layer: int
    """The layer, or the first of several; -1 for what no layer has to itself."""
    tokens: tuple[int, int]
    """Of which tokens."""
    start_s: float
    """Seconds since the request began."""
    end_s: float
    tier: str | None = None
    """Of a load: where the bytes were found."""
    bytes: int = 0
    """Of a load or store."""


def busy(events: Iterable[Event]) -> float:
    """Seconds in which at least one of the events was going on."""
    total, until = 0.0, 0.0
    for event in sorted(events, key=lambda e: e.start_s):
        if event.end_s > until:
            total += event.end_s - max(event.start_s, until)
            until = event.end_s
    return total
