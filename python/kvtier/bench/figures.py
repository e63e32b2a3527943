"""Samples, and the rows that they become."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Row", "alternate", "compared", "measured", "spread"]

Pair = tuple[float, float]
"""A sample of the bound, and the store's own that was taken right before or after it."""


@dataclass(frozen=True)
class Row:
    """One line of the result.

    Attributes:
        name: what was measured.
        value: the store's figure in ``unit``, a median; ``None`` where it could not be measured (``note`` says why).
        unit: ``GB/s`` (1e9 bytes a second), ``s``, ``s/GiB``, ``B`` or ``1`` (a share).
        bound: what the machine itself does, in the same unit, a median; or the aim, where ``bound_name`` says so.
        bound_name: what the bound is.
        ratio: value / bound: the median over the pairs. More is better for rates and shares, less for the rest.
        spread: interquartile range / median, of the pairs' ratios, or of the values where there is no measured bound.
        samples: how many pairs, or values.
        note: what a reader must know.
    """

    name: str
    value: float | None
    unit: str
    bound: float | None = None
    bound_name: str | None = None
    ratio: float | None = None
    spread: float | None = None
    samples: int = 0
    note: str = ""


def spread(values: Sequence[float]) -> float | None:
    """Interquartile range / median; ``None`` of fewer than two values, or a median of 0."""
    middle = statistics.median(values) if values else 0.0
    if len(values) < 2 or middle == 0:
        return None
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def alternate(count: int, bound: Callable[[], float], value: Callable[[], float]) -> list[Pair]:
    """``count`` pairs of samples. Who goes first changes from pair to pair, so that a drift favours neither."""
    pairs: list[Pair] = []
    for i in range(count):
        if i % 2:
            first = value()
            pairs.append((bound(), first))
        else:
            first = bound()
            pairs.append((first, value()))
    return pairs


def compared(name: str, unit: str, pairs: Sequence[Pair], bound_name: str, note: str = "") -> Row:
    """The row of pairs of samples."""
    ratios = [value / bound for bound, value in pairs if bound > 0]
    return Row(
        name,
        statistics.median(value for _, value in pairs),
        unit,
        statistics.median(bound for bound, _ in pairs),
        bound_name,
        statistics.median(ratios) if ratios else None,
        spread(ratios),
        len(pairs),
        note,
    )


def measured(
    name: str, unit: str, values: Sequence[float], aim: float | None = None, note: str = "", aim_name: str = "aim"
) -> Row:
    """The row of samples without a measured bound; ``aim`` is what is wanted."""
    middle = statistics.median(values)
    return Row(
        name,
        middle,
        unit,
        aim,
        None if aim is None else aim_name,
        middle / aim if aim else None,
        spread(values),
        len(values),
        note,
    )
