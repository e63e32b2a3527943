"""`kvtier.kappa.decide`: against the vectorised formulas and exhaustive search; its measurement file; its speed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.kappa import Measured, MeasuredTier, ModelSpec, Request, Residency, compute, decide, kv_bytes, load
from kvtier.kappa.ttft import Part

NAMES = ["Llama-3.1-70B", "DeepSeek-V3", "Mixtral-8x7B", "gpt-oss-120b", "Mistral-7B-v0.1"]


def measured(name: str = "Llama-3.1-70B", **changes: object) -> Measured:
    base = Measured(
        ModelSpec.named(name),
        flops_per_s=4e14,
        memory_bytes_per_s=3e12,
        tiers=(MeasuredTier("dram", 50e9), MeasuredTier("nvme", 6.5e9, latency_s=1e-4)),
        date="2026-01-31",
        hit_s=2e-4,
        pass_s=1e-3,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def remaining(machine: Measured, sizes: dict[str, float], cached: int, s: int) -> float:
    """Seconds to load what lies behind the first s tokens, from the general formula."""
    total, gone, parts = sum(sizes.values()), 0.0, []
    skip = total * s / cached
    rates = {tier.kind: tier.read_bytes_per_s for tier in machine.tiers}
    for tier, size in sizes.items():
        parts.append(Part(tier, max(0.0, size - max(0.0, skip - gone)), rates[tier]))
        gone += size
    return load(parts, concurrent=machine.concurrent, shared_rate=machine.shared_bytes_per_s).total


def best_of_all(machine: Measured, cached: int, new: int, sizes: dict[str, float], step: int, groups: int = 1) -> float:
    """The least TTFT over every choice, from the vectorised formulas."""
    model, gpu = machine.model, machine.hardware
    after = float(compute(model, gpu, cached, new).total) + machine.pass_s
    latency = max(tier.latency_s for tier in machine.tiers if sizes.get(tier.kind, 0) > 0)
    times = [float(compute(model, gpu, 0, cached + new).total) + machine.pass_s]
    for s in range(0, cached, step):
        front = float(compute(model, gpu, 0, s, head=False).total) + machine.pass_s if s else 0.0
        loaded = machine.hit_s + latency + remaining(machine, sizes, cached, s)
        times.append(max(front + after, loaded + after / groups))
    return min(times)


@settings(max_examples=120)
@given(
    st.sampled_from(NAMES),
    st.integers(1, 600),
    st.integers(1, 300),
    st.floats(0, 1),
    st.sampled_from([1, 16, 100]),
    st.booleans(),
    st.none() | st.sampled_from([2e10, 1e12]),
    st.sampled_from([1e12, 1e13, 4e14]),
    st.sampled_from([1.0, 0.2, 0.05]),
    st.sampled_from([1, 2, 30]),
)
def test_the_decision_is_the_best_of_all(
    name: str,
    cached: int,
    new: int,
    front: float,
    step: int,
    concurrent: bool,
    shared: float | None,
    rate: float,
    slow: float,
    groups: int,
) -> None:
    tiers = (MeasuredTier("dram", 50e9 * slow), MeasuredTier("nvme", 6.5e9 * slow, latency_s=1e-4))
    machine = measured(name, concurrent=concurrent, shared_bytes_per_s=shared, flops_per_s=rate, tiers=tiers)
    size = float(kv_bytes(machine.model, cached)) or 1.0
    sizes = {"dram": size * front, "nvme": size * (1 - front)}
    found = decide(Request(cached, new), Residency(sizes), machine, granularity=step, groups=groups)
    assert found.predicted_s == pytest.approx(best_of_all(machine, cached, new, sizes, step, groups), rel=1e-9)
    assert found.predicted_s == min(found.load_s, found.recompute_s, found.split_s)
    assert (found.action, found.split_at) in {
        ("load", 0),
        ("recompute", cached),
        ("split", found.split_at if 0 < found.split_at < cached and found.split_at % step == 0 else -1),
    }


@settings(max_examples=150)
@given(
    st.sampled_from(NAMES),
    st.integers(20, 300),
    st.floats(0.05, 1.5),
    st.integers(1, 200),
    st.floats(0, 1),
    st.floats(0.1, 10),
    st.booleans(),
)
def test_splits_wherever_they_fall(
    name: str, cached: int, load_share: float, stream_until: int, front: float, ratio: float, concurrent: bool
) -> None:
    """Rates made for a crossing within the prefix: in either tier, under the parabola or under the floor."""
    model = ModelSpec.named(name)
    per_token = 2.0 * model.n_active
    stream = float(compute(model, measured(name).hardware, 0, 1, head=False).weight_bytes)
    rate = per_token * 1000  # a thousand tokens a second
    machine = measured(
        name, flops_per_s=rate, memory_bytes_per_s=stream / (stream_until / 1000), concurrent=concurrent, pass_s=0.0
    )
    size, total_s = float(kv_bytes(model, cached)), load_share * cached / 1000
    slow = size / total_s
    tiers = (MeasuredTier("dram", slow * ratio), MeasuredTier("nvme", slow / ratio))
    machine = replace(machine, tiers=tiers)
    sizes = {"dram": size * front, "nvme": size * (1 - front)}
    found = decide(Request(cached, 2000), Residency(sizes), machine)
    assert found.predicted_s == pytest.approx(best_of_all(machine, cached, 2000, sizes, 1), rel=1e-9)


@pytest.mark.parametrize("cached", [100, 3_000])
@pytest.mark.parametrize("concurrent", [False, True])
def test_a_vocabulary_smaller_than_the_prefix(cached: int, concurrent: bool) -> None:
    # The embedding is read whole after 40 tokens, and reading it is most of the work.
    model = replace(ModelSpec.named("Llama-3.1-70B"), vocab=40, layers=1, windows=(), expert_layers=(), hidden=1 << 20)
    machine = measured(concurrent=concurrent, flops_per_s=1.4e12, memory_bytes_per_s=1e10, pass_s=0.0)
    machine = replace(machine, model=replace(model, heads=8, kv_heads=8, head_dim=1, ffn=1))
    for seconds in (0.0165, 0.017, 0.0175, 0.018, 0.5):
        sizes = {"dram": seconds * 25e9, "nvme": seconds * 3e9}
        found = decide(Request(cached, 7), Residency(sizes), machine)
        assert found.predicted_s == pytest.approx(best_of_all(machine, cached, 7, sizes, 1), rel=1e-9)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("cached", "new"), [(65_536, 32), (3_000, 1_000), (200_000, 10)])
def test_long_prefixes_too(name: str, cached: int, new: int) -> None:
    machine = measured(name)
    size = float(kv_bytes(machine.model, cached))
    sizes = {"dram": size * 0.4, "nvme": size * 0.6}
    step = cached // 300
    found = decide(Request(cached, new), Residency(sizes), machine, granularity=step)
    assert found.predicted_s == pytest.approx(best_of_all(machine, cached, new, sizes, step), rel=1e-9)


def test_what_it_says() -> None:
    machine = measured()
    bytes_ = 4000 * 327_680
    found = decide(Request(4000, 2000), Residency({"dram": bytes_}), machine)
    assert found.action in ("load", "split")
    assert "MB" in found.why or "computing" in found.why
    slow = replace(machine, tiers=(MeasuredTier("nvme", 1e8),))
    assert decide(Request(4000, 2000), Residency({"nvme": bytes_}), slow).action in ("recompute", "split")
    assert decide(Request(20, 2000), Residency({"nvme": 20 * 327_680}), slow).split_at > 0
    none = decide(Request(0, 10), Residency(), machine)
    assert (none.action, none.split_at, none.load_s) == ("recompute", 0, math.inf)
    # A split that gains little is not worth it.
    picky = decide(Request(4000, 2000), Residency({"dram": bytes_}), machine, margin=0.5)
    assert picky.action == "load"
    assert picky.split_s <= found.split_s


def test_more_bandwidth_never_lengthens_it() -> None:
    last = math.inf
    for rate in (1e8, 1e9, 5e9, 2e10, 1e11, 1e12):
        machine = measured(tiers=(MeasuredTier("dram", rate),))
        now = decide(Request(8000, 200), Residency({"dram": 8000 * 327_680}), machine).predicted_s
        assert now <= last
        last = now


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Request(-1, 1), "cached=-1"),
        (lambda: Request(1, 0), "new=0"),
        (lambda: Residency({"dram": -1}), "bytes in dram"),
        (
            lambda: decide(Request(5, 1), Residency({"cxl": 5}), measured()),
            "'cxl' was not measured; there are dram, nvme",
        ),
        (lambda: decide(Request(5, 1), Residency(), measured()), "no bytes for 5 cached tokens"),
        (lambda: decide(Request(5, 1), Residency({"dram": 5}), measured(), granularity=0), "granularity=0"),
        (lambda: decide(Request(5, 1), Residency({"dram": 5}), measured(), groups=0), "groups=0"),
        (lambda: measured(tiers=()), "tiers are none"),
        (lambda: measured(tiers=(MeasuredTier("dram", 1),) * 2), "each kind once"),
        (lambda: measured(date="yesterday"), "YYYY-MM-DD"),
        (lambda: measured(flops_per_s=0), "flops_per_s=0"),
        (lambda: measured(concurrent=1), "not a switch"),
        (lambda: MeasuredTier("tape", 1), "kind='tape'"),
        (lambda: MeasuredTier("dram", 1, emulated=1), "not a switch"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_is_refused(call: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()  # type: ignore[operator]


@pytest.mark.parametrize("name", NAMES)
def test_a_measurement_survives_its_file(name: str, tmp_path: Path) -> None:
    machine = measured(name, shared_bytes_per_s=5e10, concurrent=True, flops_spread=0.1, machine='a "box"')
    machine = replace(machine, model=machine.model.with_kv("int8"))
    path = tmp_path / "measured.toml"
    path.write_text(machine.to_toml())
    again = Measured.from_toml(path)
    assert again == machine
    assert again.machine == 'a "box"'
    assert not again.emulated
    assert replace(machine, tiers=(MeasuredTier("dram", 1e9, emulated=True),)).emulated


FILE = """
[measured]
date = 2026-01-31
[model]
catalog = "Llama-3.1-70B"
kv = "fp8"
[compute]
flops_per_s = 4e14
memory_bytes_per_s = 3e12
[[tier]]
kind = "dram"
read_bytes_per_s = 5e10
"""


def test_a_measurement_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "measured.toml"
    path.write_text(FILE)
    machine = Measured.from_toml(path)
    assert machine.date == "2026-01-31"
    assert machine.model.kv_bytes_per_token == 163_840
    assert decide(Request(100, 10), Residency({"dram": 16_384_000}), machine).predicted_s > 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("date = 2026-01-31", "", r"\[measured\] has no date"),
        ("flops_per_s = 4e14", "", "has no flops_per_s"),
        ("flops_per_s = 4e14", "flops = 4e14", "unknown key flops"),
        ('kind = "dram"', 'kind = "tape"', "kind='tape'"),
        ('kind = "dram"', "", "has no kind"),
        ("[[tier]]", "[tier]", r"write \[\[tier\]\]"),
        ('catalog = "Llama-3.1-70B"', 'catalog = "x"', "not in the catalog"),
        ('catalog = "Llama-3.1-70B"', "", "has no head_dim"),
        ("[compute]", "[computer]", "unknown table computer"),
    ],
)
def test_a_measurement_that_cannot_be_is_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "measured.toml"
    path.write_text(FILE.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        Measured.from_toml(path)
