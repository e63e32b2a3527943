"""Draws docs/kappa_crit.svg: κ_crit against T for three models. Run: python docs/kappa_crit.py"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from kvtier.kappa import HardwareSpec, LinkSpec, ModelSpec, kappa_crit, t_star

GPU, LINK = HardwareSpec.named("H100-SXM"), LinkSpec.named("PCIe5 x16")
MODELS = {"Llama-3.1-405B": "#0b6fb8", "Llama-3.1-70B": "#c2410c", "DeepSeek-V3": "#15803d"}
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 400, 64, 44, 24, 48
X, Y = (1.0, 4000.0), (10.0, 100_000.0)


def place(value: float, limits: tuple[float, float], start: float, end: float) -> float:
    """Where a value lies on a logarithmic axis from ``start`` to ``end``."""
    share = math.log(value / limits[0]) / math.log(limits[1] / limits[0])
    return start + share * (end - start)


def x(tokens: float) -> float:
    """Pixels from the left."""
    return place(tokens, X, LEFT, WIDTH - RIGHT)


def y(kappa: float) -> float:
    """Pixels from the top."""
    return place(kappa, Y, HEIGHT - BOTTOM, TOP)


def draw() -> str:
    """The whole picture as SVG."""
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="22" font-size="14" fill="#111">κ_crit against T: {GPU.name}, {LINK.name}, bf16, dense peak</text>',
    ]
    for power in range(4):
        at = x(10**power)
        out.append(f'<path d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#e2e2e2"/>')
        out.append(f'<text x="{at:.1f}" y="{HEIGHT - 30}" text-anchor="middle" fill="#444">{10**power:,}</text>')
    for power in range(1, 6):
        at = y(10**power)
        out.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#e2e2e2"/>')
        out.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end" fill="#444">{10**power:,}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    out.append(f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle" fill="#111">T, new tokens</text>')
    for name, colour in MODELS.items():
        model = ModelSpec.named(name)
        star = t_star(model, GPU, LINK)
        tokens = np.concatenate([np.geomspace(1, star * 0.9, 60), star * (1 - np.geomspace(0.1, 1e-6, 60))[1:]])
        values = kappa_crit(model, GPU, LINK, tokens)
        points = [(t, k) for t, k in zip(tokens.tolist(), values.tolist(), strict=True) if k <= Y[1]]
        line = " ".join(f"{x(t):.1f},{y(k):.1f}" for t, k in points)
        out.append(f'<path d="M{x(star):.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="{colour}" stroke-dasharray="3 4"/>')
        out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        anchor, shift = ("start", 6) if name.startswith("Deep") else ("end", -6)
        out.append(
            f'<text x="{x(star) + shift:.1f}" y="{HEIGHT - BOTTOM - 8}" text-anchor="{anchor}" fill="{colour}">T* {star:,.0f}</text>'
        )
        below = 16 if name.startswith("Deep") else -7
        out.append(f'<text x="{LEFT + 8}" y="{y(values[0]) + below:.1f}" fill="{colour}">{name}</text>')
    return "\n".join([*out, "</svg>", ""])


if __name__ == "__main__":
    (Path(__file__).parent / "kappa_crit.svg").write_text(draw(), encoding="utf-8")
