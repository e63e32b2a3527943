"""Line charts as SVG: enough for κ, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import ArrayLike

from kvtier.kappa.hardware import HardwareSpec, LinkSpec
from kvtier.kappa.model import ModelSpec
from kvtier.kappa.ratio import kappa_crit, t_star

__all__ = ["Axis", "Series", "chart", "crit_chart", "share_chart"]

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 400, 70, 44, 24, 48
COLOURS = ("#0b6fb8", "#c2410c", "#15803d", "#7e22ce", "#a16207", "#0f766e")


@dataclass(frozen=True)
class Axis:
    """From ``low`` to ``high``, logarithmic (in decades) or linear (in fifths)."""

    label: str
    low: float
    high: float
    log: bool = True

    def share(self, value: float) -> float:
        """Where a value lies: 0 at ``low``, 1 at ``high``."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    @property
    def ticks(self) -> list[float]:
        """Values to draw a line at."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            return [10.0**power for power in range(first, last + 1)]
        return [self.low + (self.high - self.low) * i / 5 for i in range(6)]


@dataclass(frozen=True)
class Series:
    """A line through points inside both axes, dotted verticals with their labels, and single points."""

    name: str
    points: Sequence[tuple[float, float]]
    marks: Sequence[tuple[float, str]] = field(default=())
    dots: Sequence[tuple[float, float]] = field(default=())


def chart(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """The chart as an SVG document; the series' names stand at the upper left."""

    def at(value: float) -> float:
        return LEFT + x.share(value) * (WIDTH - RIGHT - LEFT)

    def up(value: float) -> float:
        return HEIGHT - BOTTOM - y.share(value) * (HEIGHT - BOTTOM - TOP)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" font-size="14" fill="#111">{escape(title)}</text>',
        f'<text x="{LEFT - 8}" y="{TOP - 13}" text-anchor="end" fill="#111">{escape(y.label)}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle" fill="#111">{escape(x.label)}</text>',
    ]
    for tick in x.ticks:
        out.append(f'<path d="M{at(tick):.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#e2e2e2"/>')
        out.append(
            f'<text x="{at(tick):.1f}" y="{HEIGHT - 30}" text-anchor="middle" fill="#444">{_number(tick)}</text>'
        )
    for tick in y.ticks:
        out.append(f'<path d="M{LEFT} {up(tick):.1f}H{WIDTH - RIGHT}" stroke="#e2e2e2"/>')
        out.append(f'<text x="{LEFT - 8}" y="{up(tick) + 4:.1f}" text-anchor="end" fill="#444">{_number(tick)}</text>')
    for row, one in enumerate(series):
        colour, below = COLOURS[row % len(COLOURS)], TOP + 18 + 16 * row
        line = " ".join(f"{at(a):.1f},{up(b):.1f}" for a, b in one.points if _inside(a, x) and _inside(b, y))
        out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [
            f'<circle cx="{at(a):.1f}" cy="{up(b):.1f}" r="4" fill="{colour}"/>'
            for a, b in one.dots
            if _inside(a, x) and _inside(b, y)
        ]
        for value, label in one.marks:
            if _inside(value, x):
                anchor, shift = ("end", -5) if x.share(value) > 0.5 else ("start", 5)
                place = HEIGHT - BOTTOM - 8 - 16 * row
                out.append(
                    f'<path d="M{at(value):.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="{colour}" stroke-dasharray="3 4"/>'
                )
                out.append(
                    f'<text x="{at(value) + shift:.1f}" y="{place}" text-anchor="{anchor}" fill="{colour}">{escape(label)}</text>'
                )
        out.append(f'<path d="M{LEFT + 8} {below - 4}h18" stroke="{colour}" stroke-width="2"/>')
        out.append(f'<text x="{LEFT + 32}" y="{below}" fill="{colour}">{escape(one.name)}</text>')
    return "\n".join([*out, "</svg>", ""])


def crit_chart(
    models: Sequence[ModelSpec], hardware: HardwareSpec, link: LinkSpec, request: tuple[int, int] | None = None
) -> str:
    """κ_crit against T for some models, with their T*; ``request`` is a (K, T) to mark."""
    stars = [t_star(model, hardware, link) for model in models]
    right = 10.0 ** math.ceil(math.log10(max([100.0, *(star for star in stars if math.isfinite(star))]) * 1.2))
    lines, lowest = [], 10.0
    for model, star in zip(models, stars, strict=True):
        end = min(star, right)
        tokens = np.concatenate([np.geomspace(1, end * 0.9, 60), end * (1 - np.geomspace(0.1, 1e-6, 60))[1:]])
        values = np.asarray(kappa_crit(model, hardware, link, tokens))
        lowest = min(lowest, float(values.min()))
        points = [(t, k) for t, k in zip(tokens.tolist(), values.tolist(), strict=True) if math.isfinite(k)]
        marks = [(star, f"T* {star:,.0f}")] if math.isfinite(star) else []
        lines.append(Series(model.name, points, marks))
    if request is not None:
        lines.append(
            Series(f"K = {request[0]:,}, T = {request[1]:,}", [], dots=[(request[1], request[0] / request[1])])
        )
        lowest = min(lowest, max(request[0] / request[1], 0.1))
    kv = ", ".join(dict.fromkeys(model.kv.dtype for model in models))
    share = "dense peak" if hardware.mfu == 1 else f"{hardware.mfu:.0%} of the dense peak"
    return chart(
        f"κ_crit against T: {hardware.name}, {link.name}, {kv}, {share}",
        Axis("T, new tokens", 1, right),
        Axis("κ_crit", 10.0 ** math.floor(math.log10(lowest)), 1e5),
        lines,
    )


def share_chart(title: str, values: ArrayLike, weights: ArrayLike, marks: Sequence[tuple[float, str]] = ()) -> str:
    """The share of requests with at most each κ_ratio; values below 0.01 are drawn there.

    Args:
        title: stands above.
        values: κ_ratio of each, at least one.
        weights: how many requests each stands for.
        marks: κ values to show on the axis, with labels.
    """
    found, weight = np.maximum(np.asarray(values, np.float64), 0.01), np.asarray(weights, np.float64)
    order = np.argsort(found)
    found, shares = found[order], np.cumsum(weight[order]) / weight.sum()
    low = 10.0 ** math.floor(math.log10(found[0]))
    high = 10.0 ** max(math.ceil(math.log10(found[-1])), round(math.log10(low)) + 1)
    points = [(low, 0.0)]
    for at in np.unique(np.linspace(0, found.size - 1, min(found.size, 500)).astype(int)).tolist():
        points += [(float(found[at]), points[-1][1]), (float(found[at]), float(shares[at]))]
    x = Axis("κ_ratio, cached over new tokens", low, high)
    return chart(title, x, Axis("share", 0, 1, log=False), [Series("requests", [*points, (high, 1.0)], marks)])


def _inside(value: float, axis: Axis) -> bool:
    return axis.low * (1 - 1e-9) <= value <= axis.high * (1 + 1e-9)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:g}"
