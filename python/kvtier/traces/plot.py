"""A plot of replays, as SVG: capacity against token hit ratio, a panel a trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

__all__ = ["Point", "draw"]

WIDTH, HEIGHT, LEFT, TOP, LEGEND = 420, 300, 52, 34, 150
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#999933", "#882255", "#44aa99", "#bbbbbb")


class Point(NamedTuple):
    """One replay."""

    trace: str
    name: str
    blocks: int
    token_hit: float


def draw(points: Sequence[Point]) -> str:
    """An SVG of all points; what knows the future (``min…``) is dashed black, ``auto`` is drawn thick."""
    traces = list(dict.fromkeys(point.trace for point in points))
    names = sorted(dict.fromkeys(point.name for point in points), key=lambda name: not name.startswith("min"))
    colours = dict(zip((n for n in names if not n.startswith("min")), COLOURS * 8, strict=False))
    panel = LEFT + WIDTH + 24
    width, height = panel * len(traces) + LEGEND, max(TOP + HEIGHT + 46, TOP + 16 * len(names) + 10)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for i, trace in enumerate(traces):
        out += _panel(i * panel + LEFT, [point for point in points if point.trace == trace], names, colours)
    for i, name in enumerate(names):
        x, y = panel * len(traces), TOP + 16 * i + 8
        out.append(f'<line x1="{x}" y1="{y}" x2="{x + 22}" y2="{y}" {_stroke(name, colours)}/>')
        out.append(f'<text x="{x + 28}" y="{y + 4}">{escape(name)}</text>')
    return "\n".join([*out, "</svg>", ""])


def _stroke(name: str, colours: dict[str, str]) -> str:
    if name.startswith("min"):
        dash = "6 3" if name.startswith("min-bypass") else "2 3"
        return f'stroke="black" stroke-dasharray="{dash}" fill="none"'
    weight = 3 if name.startswith("auto") else 1.4
    return f'stroke="{colours[name]}" stroke-width="{weight}" fill="none"'


def _panel(left: int, points: Sequence[Point], names: Sequence[str], colours: dict[str, str]) -> list[str]:
    blocks = sorted({max(1, point.blocks) for point in points})
    low, high = math.log(blocks[0]), math.log(blocks[-1])
    top = max(0.1, math.ceil(max(point.token_hit for point in points) * 10) / 10)

    def x(count: int) -> float:
        share = (math.log(max(1, count)) - low) / (high - low) if high > low else 0.5
        return left + share * WIDTH

    def y(ratio: float) -> float:
        return TOP + HEIGHT * (1 - ratio / top)

    out = [f'<text x="{left}" y="{TOP - 12}" font-size="13">{escape(points[0].trace)}</text>']
    for step in range(6):
        ratio = top * step / 5
        out.append(f'<line x1="{left}" y1="{y(ratio):.1f}" x2="{left + WIDTH}" y2="{y(ratio):.1f}" stroke="#dddddd"/>')
        out.append(f'<text x="{left - 6}" y="{y(ratio) + 4:.1f}" text-anchor="end">{ratio:.2f}</text>')
    below = TOP + HEIGHT + 16
    out += [f'<text x="{x(count):.1f}" y="{below}" text-anchor="middle">{count:,}</text>' for count in blocks]
    out.append(f'<text x="{left + WIDTH / 2}" y="{TOP + HEIGHT + 34}" text-anchor="middle">capacity, blocks</text>')
    for name in names:
        mine = sorted((point.blocks, point.token_hit) for point in points if point.name == name)
        path = " ".join(f"{x(count):.1f},{y(ratio):.1f}" for count, ratio in mine)
        out.append(f'<polyline points="{path}" {_stroke(name, colours)}/>')
    return out
