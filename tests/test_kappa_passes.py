"""`kvtier.kappa.Passes`: a measured table against explicit sums, and decisions from it against trying everything."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.kappa import Measured, MeasuredTier, ModelSpec, Passes, Request, Residency, decide

TABLE = Passes((0, 100, 400), (1, 8, 32), ((0.04, 0.05, 0.1), (0.042, 0.06, 0.13), (0.05, 0.1, 0.25)))
MACHINE = Measured(
    ModelSpec.named("Llama-3.1-8B"),
    flops_per_s=1e11,
    memory_bytes_per_s=1e10,
    tiers=(MeasuredTier("dram", 9e7, latency_s=1e-3), MeasuredTier("nvme", 4e7, latency_s=3e-3)),
    date="2026-01-31",
    hit_s=2e-4,
    copy_bytes_per_s=1e9,
    passes=TABLE,
)


def by_hand(cached: int, new: int) -> float:
    """One pass after another."""
    total = 0.0
    while new:
        length = min(new, 32)
        total += TABLE.one(cached, length)
        cached, new = cached + length, new - length
    return total


def test_a_table_gives_its_points_and_lines_between_and_beyond() -> None:
    for i, cached in enumerate(TABLE.cached):
        for j, new in enumerate(TABLE.new):
            assert TABLE.one(cached, new) == pytest.approx(TABLE.seconds[i][j])
    assert TABLE.one(50, 8) == pytest.approx((0.05 + 0.06) / 2)
    assert TABLE.one(0, 20) == pytest.approx((0.05 + 0.1) / 2)
    assert TABLE.one(700, 8) == pytest.approx(0.1 + 0.04)
    assert TABLE.chunk == 32


@given(st.integers(0, 40), st.integers(1, 500))
def test_a_long_prefill_is_the_sum_of_its_passes(chunks: int, new: int) -> None:
    table = replace(TABLE)  # nothing summed up yet
    assert table.last(32 * chunks, new) == pytest.approx(by_hand(32 * chunks, new))
    assert table.prefix(new) == pytest.approx(by_hand(0, new))
    assert table.prefix(0) == 0


@given(st.integers(0, 300), st.integers(33, 200))
def test_a_prefix_off_the_grid_lies_between_its_neighbours(cached: int, new: int) -> None:
    before, after = cached // 32 * 32, cached // 32 * 32 + 32
    assert by_hand(before, new) * 0.999 <= TABLE.last(cached, new) <= by_hand(after, new) * 1.001


@given(
    st.integers(1, 900),
    st.integers(1, 100),
    st.floats(0, 1),
    st.sampled_from([1, 16, 96]),
    st.booleans(),
    st.sampled_from([1.0, 0.1, 0.01]),
)
def test_a_decision_from_passes_is_the_best_of_all(
    cached: int, new: int, front: float, step: int, concurrent: bool, slow: float
) -> None:
    tiers = tuple(replace(tier, read_bytes_per_s=tier.read_bytes_per_s * slow) for tier in MACHINE.tiers)
    machine = replace(MACHINE, concurrent=concurrent, tiers=tiers)
    size = 1e5 * cached
    sizes = {"dram": size * front, "nvme": size * (1 - front)}
    found = decide(Request(cached, new), Residency(sizes), machine, granularity=step)
    fixed = 2e-4 + max(tier.latency_s for tier in tiers if sizes[tier.kind] > 0)

    def loaded(s: int) -> float:
        skip = size * s / cached
        front_left = max(0.0, sizes["dram"] - skip)
        back_left = min(sizes["nvme"], size - skip)
        each = [
            left * (1 / tier.read_bytes_per_s + 1e-9) for left, tier in zip((front_left, back_left), tiers, strict=True)
        ]
        return max(each) if concurrent else sum(each)

    after = by_hand(cached, new) if cached % 32 == 0 else TABLE.last(cached, new)
    grid = math.lcm(32, step)
    splits = {s: max(by_hand(0, s), fixed + loaded(s)) + after for s in range(grid, cached, grid)}
    assert found.load_s == pytest.approx(fixed + loaded(0) + after)
    assert found.recompute_s == pytest.approx(by_hand(0, cached + new))
    assert found.predicted_s == pytest.approx(min([found.load_s, found.recompute_s, *splits.values()]))
    if found.action == "split":
        assert splits[found.split_at] == pytest.approx(found.predicted_s)


def test_emulation_is_a_cap_and_says_so() -> None:
    slow = MACHINE.emulating("nvme", 0.01)
    assert slow.emulated
    assert slow.rates["nvme"][0] == pytest.approx(1e-7 + 1e-9)
    assert slow.rates["dram"] == MACHINE.rates["dram"]
    assert MACHINE.emulating("nvme", 100).rates == MACHINE.rates
    for sizes in ({"nvme": 1e5}, {"nvme": 1e9}):
        assert decide(Request(64, 8), Residency(sizes), slow).why.endswith("(emulated)")
        assert "emulated" not in decide(Request(64, 8), Residency(sizes), MACHINE).why
    with pytest.raises(ConfigError, match="'cxl' was not measured"):
        MACHINE.emulating("cxl", 1)
    with pytest.raises(ConfigError, match="gbs=0"):
        MACHINE.emulating("nvme", 0)


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "measured.toml"
    machine = replace(MACHINE, peak_flops_per_s=2e11)
    path.write_text(machine.to_toml())
    assert Measured.from_toml(path) == machine
    assert Measured.from_toml(path).mfu == 0.5
    assert MACHINE.mfu is None
    path.write_text(machine.to_toml().replace("new = [1, 8, 32]", "new = [1, 8]"))
    with pytest.raises(ConfigError, match=r"seconds has rows of \[3, 3, 3\]"):
        Measured.from_toml(path)


@pytest.mark.parametrize(
    ("cached", "new", "message"),
    [
        ((1, 2), (1, 2), "cached="),
        ((0,), (1, 2), "cached="),
        ((0, 2), (2, 1), "new="),
        ((0, 2), (1, 1), "new="),
        ((0, 2.5), (1, 2), "cached="),
        ((0, 2), (1, 2, 3), "it needs 2 rows"),
    ],
)
def test_a_table_that_cannot_be_is_refused(cached: tuple[int, ...], new: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Passes(cached, new, ((1, 1), (1, 1)))
