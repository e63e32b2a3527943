"""The tables of the article behind the model, recomputed cell by cell, with the verdict on each.

For each published cell there is what it should be by its own definition (``recomputed``), what the paper's convention
gives (the 2:4-sparse peak, the nominal link one way, parameters as the model's name states them), and, where the cell is
really something else, what that something gives (``mixed_up``). The verdict follows from those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from kvtier.kappa.catalog import catalog, published
from kvtier.kappa.hardware import HardwareSpec, LinkSpec
from kvtier.kappa.model import ModelSpec
from kvtier.kappa.ratio import kappa_crit, kappa_hw, kappa_m
from kvtier.kappa.ttft import compute, serial

__all__ = ["TOLERANCE", "Cell", "cells"]

TOLERANCE = 0.055
"""How far a recomputed figure may be from the published one, as a share: those are rounded, and peaks differ by source."""

VERDICTS = (
    "reproduced",
    "reproduced only under the paper's convention",
    "mislabelled or mixed up",
    "published, not reproduced",
)

Figures = float | tuple[float, ...]


@dataclass(frozen=True)
class Cell:
    """One published figure (or row of figures) and what became of it, all in ``unit``."""

    id: str
    """The name of the cell."""
    quantity: str
    """What it says it is."""
    unit: str
    """Its unit; empty for a ratio."""
    published: Figures
    """The figure as published."""
    recomputed: Figures | None
    """What it should be; None where nothing can be computed."""
    paper: Figures | None
    """What the paper's convention gives; None where that is no different, or does not apply."""
    mixed_up: Figures | None
    """What the published figure really is; None where it is what it says, or where that is no figure."""
    verdict: str
    """One of :data:`VERDICTS`."""
    reason: str
    """Why, where the two differ."""


@dataclass(frozen=True)
class _Recipe:
    recomputed: Figures | None = None
    paper: Figures | None = None
    mixed_up: Figures | None = None
    mixed: bool = False  # the cell is something else, whether or not that is a figure


def cells() -> tuple[Cell, ...]:
    """Every published cell with its recomputed figures and verdict, in the order of the article."""
    return _cells()


@cache
def _cells() -> tuple[Cell, ...]:
    recipes = _recipes()
    found = []
    for row in published():
        recipe = recipes[row["id"]]()
        given = row["published"]
        figures: Figures = tuple(map(float, given)) if isinstance(given, list) else float(given)
        found.append(
            Cell(
                row["id"],
                row["quantity"],
                row["unit"],
                figures,
                recipe.recomputed,
                recipe.paper,
                recipe.mixed_up,
                _verdict(figures, recipe),
                row["note"],
            )
        )
    return tuple(found)


def _verdict(figures: Figures, recipe: _Recipe) -> str:
    reproduced, convention, mixed, lost = VERDICTS
    if recipe.mixed and (recipe.mixed_up is None or _agree(figures, recipe.mixed_up)):
        return mixed
    if _agree(figures, recipe.recomputed):
        return reproduced
    return convention if _agree(figures, recipe.paper) else lost


def _agree(one: Figures, other: Figures | None) -> bool:
    return other is not None and bool(np.allclose(other, one, rtol=TOLERANCE, atol=0.0))


def _mix(really: Figures | None, recomputed: Figures | None = None, paper: Figures | None = None) -> _Recipe:
    return _Recipe(recomputed, paper, really, mixed=True)


# The paper takes the parameters from the models' names, and rounds κ_HW before it goes on.
_NAMED = {"Llama-3.1-70B": 70e9, "Qwen3-235B-A22B": 22e9, "DeepSeek-V3": 37e9}
_PUBLISHED_HW = {"A100-80G-SXM": 107.5e-6, "H100-SXM": 34e-6, "B200-SXM(HGX)": 13.5e-6}
_NEW = 32  # the T of the paper's example
_MEGA = 1e6


def _recipes() -> dict[str, Callable[[], _Recipe]]:
    known = catalog()
    llama, small, qwen, deep = map(known.model, ("Llama-3.1-405B", "Llama-3.1-70B", "Qwen3-235B-A22B", "DeepSeek-V3"))
    a100, h100, b200, gb200, gh200 = map(
        known.hardware, ("A100-80G-SXM", "H100-SXM", "B200-SXM(HGX)", "GB200(per GPU)", "GH200")
    )
    pcie4, pcie5, pcie6 = map(known.link, ("PCIe4 x16", "PCIe5 x16", "PCIe6 x16"))
    c2c, c2c_gb = map(known.link, ("NVLink-C2C GH200 (per GPU)", "NVLink-C2C GB200 (per GPU)"))
    both_ways = LinkSpec("NVLink-C2C, both directions", 2 * c2c.read)
    stack = min(rate for rate, _ in pcie5.measured)  # the paper's own measurement
    pinned = float(np.median([rate for rate, _ in pcie5.measured if rate > stack]))

    def hw(gpu: HardwareSpec, link: LinkSpec) -> _Recipe:
        return _Recipe(_MEGA * kappa_hw(gpu, link), _MEGA * kappa_hw(gpu, link, "paper"))

    def crit(model: ModelSpec, gpu: HardwareSpec, link: LinkSpec) -> float:
        return float(kappa_crit(model, gpu, link, _NEW))

    def named(model: ModelSpec) -> float:
        return kappa_m(model, _NAMED.get(model.name, model.n_total))

    def paper_crit(model: ModelSpec, gpu: HardwareSpec) -> float:
        return named(model) * _PUBLISHED_HW[gpu.name]

    def total_crit(gpu: HardwareSpec, link: LinkSpec) -> _Recipe:
        return _Recipe(crit(llama, gpu, link), paper_crit(llama, gpu))

    def transfer_share(cached: int, new: int) -> _Recipe:
        # κ/(κ + κ_crit): with κ_crit as the paper measured it (1), and as it derived it.
        ratio = cached / new
        return _Recipe(ratio / (ratio + 1.0), ratio / (ratio + paper_crit(qwen, h100)))

    long = llama.kv_bytes_per_token * 65536
    computed = compute(llama, h100, 65536, _NEW)
    sparse_s = 2 * _NEW * 405e9 / h100.flops("paper")
    hbm = HardwareSpec("GB200", gb200.dense_flops, gb200.hbm_bandwidth, sparse_flops=gb200.sparse_flops)
    unified, stated = LinkSpec("8 TB/s", 8e12), LinkSpec("3 TB/s", 3e12)
    packed = deep.kv_bytes_per_token / 2  # one byte an element, without scales

    def deep_crit(link: LinkSpec) -> float:
        return named(deep) * kappa_hw(gb200, link, "paper")

    return {
        "kv_bytes_405b": lambda: _Recipe(float(llama.kv_bytes_per_token)),
        "kv_65k_405b": lambda: _Recipe(float(llama.kv_bytes_per_token * 65000)),
        "t_compute_32": lambda: _mix(sparse_s, float(computed.total)),
        "t_pcie_33g": lambda: _Recipe(33e9 / pcie5.read),
        "ratio_39": lambda: _mix(0.5 / 0.0128, float(long / pcie5.read / computed.total)),
        "kappa_hw_a100": lambda: _mix(_MEGA * kappa_hw(a100, pcie5, "paper"), *_pair(hw(a100, pcie4))),
        "kappa_hw_h100": lambda: hw(h100, pcie5),
        "kappa_hw_b200": lambda: hw(b200, pcie5),
        "kappa_crit_405b_a100": lambda: total_crit(a100, pcie4),
        "kappa_crit_405b_h100": lambda: total_crit(h100, pcie5),
        "kappa_crit_405b_b200": lambda: total_crit(b200, pcie6),
        "kappa_crit_qwen3_h100": lambda: _Recipe(crit(qwen, h100, pcie5), paper_crit(qwen, h100)),
        "kappa_crit_dense_h100": lambda: _mix(
            paper_crit(small, h100), crit(llama, h100, pcie5), paper_crit(llama, h100)
        ),
        "kappa_m_deepseek": lambda: _Recipe(kappa_m(deep) / _MEGA, named(deep) / _MEGA),
        "kappa_m_ratio": lambda: _Recipe(kappa_m(deep) / kappa_m(qwen), named(deep) / named(qwen)),
        "kv_gqa_mla_int8": lambda: _mix((qwen.kv_bytes_per_token, deep.kv_bytes_per_token, packed)),
        "kappa_crit_gqa_mla_int8": lambda: _mix(
            (
                paper_crit(qwen, h100),
                44e9 / deep.kv_bytes_per_token * _PUBLISHED_HW[h100.name],
                44e9 / packed * _PUBLISHED_HW[h100.name],
            ),
            (
                crit(qwen, h100, pcie5),
                crit(deep, h100, pcie5),
                crit(deep.with_kv("int8"), h100, pcie5),
            ),
            (paper_crit(qwen, h100), paper_crit(deep, h100), 2 * paper_crit(deep, h100)),
        ),
        "bw_effective": lambda: _Recipe(pinned),
        "bw_share": lambda: _Recipe(stack / pcie5.read),
        "kappa_crit_h100_measured": lambda: _Recipe(named(llama) * stack / h100.flops("paper")),
        "c2c_bw": lambda: _mix(both_ways.read, c2c.read),
        "c2c_gain": lambda: _mix(both_ways.read / pcie5.read, c2c.read / pcie5.read),
        "kappa_crit_gh_qwen3": lambda: _mix(
            named(qwen) * kappa_hw(gb200, both_ways, "paper"),
            crit(qwen, gh200, c2c),
            named(qwen) * kappa_hw(gb200, c2c_gb, "paper"),
        ),
        "hbm_gain": lambda: _mix(
            kappa_hw(hbm, unified, "paper") / _PUBLISHED_HW[h100.name],
            kappa_hw(hbm, stated, "paper") / _PUBLISHED_HW[h100.name],
        ),
        "table_5_1": lambda: _mix(
            (
                _MEGA * kappa_hw(a100, pcie4, "paper"),
                _MEGA * kappa_hw(h100, pcie5, "paper"),
                deep_crit(both_ways),
                deep_crit(unified),
            )
        ),
        "kappa_ratio_docqa": lambda: _Recipe(5000 / 19),
        "share_65k_64": lambda: transfer_share(65536, 64),
        "share_8k_128": lambda: transfer_share(8192, 128),
        "parallel_65k_32": lambda: _Recipe((192e9 - 2 * small.n_total) / (65536 * small.kv_bytes_per_token)),
        "finqa_vram": lambda: _mix(167e3 * llama.kv_bytes_per_token, long),
        "power_152": lambda: _mix(None),
    }


def _pair(recipe: _Recipe) -> Sequence[Any]:
    return recipe.recomputed, recipe.paper


def example() -> dict[str, float]:
    """The article's example, 65,536 cached and 32 new tokens on Llama-3.1-405B, H100 and PCIe 5, with everything counted.

    Returns:
        ``t_load``, ``t_flops``, ``t_weights``, ``t_compute``, ``ttft_serial`` in seconds, and ``ratio`` of the load over
        the computation. One GPU's time: eight of them that share the work share the links too.
    """
    known = catalog()
    model, gpu, link = known.model("Llama-3.1-405B"), known.hardware("H100-SXM"), known.link("PCIe5 x16")
    done = compute(model, gpu, 65536, _NEW)
    moved = 65536 * model.kv_bytes_per_token / link.read
    return {
        "t_load": moved,
        "t_flops": float(done.flops_s),
        "t_weights": float(done.stream_s),
        "t_compute": float(done.total),
        "ttft_serial": float(serial(moved, done.total).total),
        "ratio": float(moved / done.total),
    }
