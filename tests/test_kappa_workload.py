"""`kvtier.kappa`'s workloads and plans: reuse distances against a list, real traces, and the advisor's arithmetic."""

from __future__ import annotations

import csv
import gzip
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.kappa import HardwareSpec, LinkSpec, ModelSpec, compute, kappa_crit, kv_bytes, tensor_parallel
from kvtier.kappa.plan import Plan, advise
from kvtier.kappa.workload import _ReuseStack, read_trace, report

H100, PCIE5 = HardwareSpec.named("H100-SXM"), LinkSpec.named("PCIe5 x16")
MODEL = ModelSpec.named("Llama-3.1-70B")
TRACES = Path(os.environ.get("KVTIER_SHARED") or Path(__file__).parents[2] / "shared") / "traces"


def trace(name: str) -> Path:
    """A real trace, or a skip that names it."""
    path = TRACES / name
    if not path.is_file():
        pytest.skip(f"the trace {name} is not in {TRACES}")
    return path


@given(st.lists(st.lists(st.integers(0, 12), max_size=6, unique=True), max_size=25))
def test_reuse_distances_are_those_of_a_list(requests: list[list[int]]) -> None:
    stack, recent = _ReuseStack(), list[int]()  # the most recent last
    stack._tree = [0] * 4  # so that it has to grow
    for blocks in requests:
        hit = next((i for i, block in enumerate(blocks) if block not in recent), len(blocks))
        places = [recent.index(block) for block in blocks[:hit]]
        distance = len(recent) - min(places) if hit else 0
        assert stack.touch(blocks) == (hit, distance)
        for block in reversed(blocks):
            if block in recent:
                recent.remove(block)
            recent.append(block)


def test_a_small_trace(tmp_path: Path) -> None:
    lines = [
        {"input_length": 10, "output_length": 3, "hash_ids": [1, 2, 3]},
        {"input_length": 12, "output_length": 1, "runs": [1, 2, 7, 1]},
        {"input_length": 12, "hash_ids": [1, 2, 3]},
    ]
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    found = read_trace(path, block_tokens=4)
    assert found.cached.tolist() == [0, 8, 11]  # at least one token is always computed
    assert found.new.tolist() == [10, 4, 1]
    assert found.generated.tolist() == [3, 1, 0]
    assert found.distance.tolist() == [0, 8, 16]
    path.write_text("cached,new\n10,2\n0,5\n")
    assert read_trace(path).cached.tolist() == [10, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"input_length": 4}', "line 1 is no request"),
        ('{"input_length": 0, "hash_ids": []}', "input_length=0"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3", "without block ids nobody knows"),
        ("cached,new\n1,x", "line 2"),
        ("cached,new\n1,0", "fewer than"),
    ],
)
def test_a_trace_that_is_none_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none")


def test_a_report_is_what_each_request_alone_gives(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = [(0, 500), (30_000, 20), (2_000, 900), (100_000, 3000), (50, 1)]
    path.write_text("cached,new\n" + "\n".join(f"{k},{t}" for k, t in rows))
    found = report(read_trace(path), MODEL, H100, PCIE5, [("disk", 1e9), ("fast", 1e15)])
    assert found.requests == 5
    assert found.with_prefix == 0.8
    assert found.beyond_crit == sum(k / t > kappa_crit(MODEL, H100, PCIE5, t) for k, t in rows) / 5
    again = [float(compute(MODEL, H100, 0, k + t).total) for k, t in rows]
    for tier, rate in zip(found.tiers, (PCIE5.read, 1e9, PCIE5.read), strict=True):
        loaded = [kv_bytes(MODEL, k) / rate + float(compute(MODEL, H100, k, t).total) for k, t in rows]
        assert tier.recompute_s == pytest.approx(sum(again))
        assert tier.loaded_s == pytest.approx(sum(map(min, loaded, again)))
        assert tier.rate == rate
    path.write_text("cached,new\n")
    with pytest.raises(ConfigError, match="no requests"):
        report(read_trace(path), MODEL, H100, PCIE5)


@pytest.mark.parametrize("name", ["agentic64_b512", "mooncake_conversation_trace"])
def test_real_traces(name: str) -> None:
    found = read_trace(trace(f"{name}.jsonl.gz"))
    with trace("reference_hit_ratios.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["trace"].startswith(name[:8]) and row["policy"] == "LRU"]
    rows = [row for row in rows if row["touch_order"] == "rev"]
    assert rows
    total = found.tokens
    for row in rows:
        # The independent simulator counts prefixes that are partly there; a whole one is a lower bound of that.
        whole = found.cached[found.distance <= float(row["capacity_tokens"])].sum() / total
        assert whole <= float(row["token_hit"]) + 0.01
    shown = report(found, MODEL, H100, PCIE5)
    assert 0 < shown.beyond_turn <= shown.beyond_crit < 1
    values = list(shown.quantiles.values())
    assert values == sorted(values)


def test_traces_without_blocks_say_so() -> None:
    with pytest.raises(ConfigError, match="without block ids"):
        read_trace(trace("azure2023_code.csv.gz"))


PLAN = """
[model]
name = "Llama-3.1-70B"
kv = ["bf16", "fp8"]
[traffic]
requests_per_s = 2.0
[[traffic.class]]
share = 0.7
cached = 16000
new = 200
generated = 300
working_set_tokens = 4000000
[[traffic.class]]
share = 0.3
cached = 0
new = 1500
[target]
ttft_s = 0.5
utilisation = 0.6
[[hardware]]
name = "H100-SXM"
gpus = 4
mfu = 0.5
price_hour = 2.5
[[hardware]]
name = "A100"
gpus = 2
mfu = 0.5
price_hour = 1.3
links = ["PCIe4"]
[[hardware]]
name = "H100-SXM"
price_hour = 2.5
[[link]]
name = "PCIe4 x16"
[[link]]
name = "PCIe5 x16"
price_hour = 0.02
[[tier]]
kind = "dram"
link = "PCIe5 x16"
sizes = ["256GB", "1TB"]
price_gb_hour = 0.003
[[tier]]
kind = "nvme"
gbs = 13
sizes = [0, "4TB"]
price_gb_hour = 0.0001
"""


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    return Plan.from_toml(path)


def test_the_ranking(plan: Plan) -> None:
    advice = advise(plan)
    # Two GPUs with two links, and one that can have one of them; two dtypes; four pairs of tiers.
    assert len(advice.ranked) == (2 + 1 + 2) * 2 * 4
    assert not any(option.hardware.startswith("A100") and option.link != "PCIe4 x16" for option in advice.ranked)
    kinds = [(option.fits, option.meets) for option in advice.ranked]
    assert kinds == sorted(kinds, reverse=True)
    prices = [option.price for option in advice.ranked if option.meets]
    assert prices
    assert prices == sorted(prices)
    for option in advice.ranked:
        assert option.meets == (option.ttft_s <= plan.ttft_s)
        if option.gpus == 1:  # 141 GB of weights on 86 GB
            assert (option.fits, option.binds, option.price) == (False, "memory", math.inf)
    assert advice.upgrades
    gains = [upgrade.gain_per_unit for upgrade in advice.upgrades]
    assert gains == sorted(gains, reverse=True)
    for upgrade in advice.upgrades:
        assert upgrade.gain_s > 0
        assert upgrade.extra == pytest.approx(upgrade.option.price - advice.best.price)


def test_one_option_by_hand(plan: Plan) -> None:
    option = next(
        option
        for option in advise(plan).ranked
        if option.hardware == "H100-SXM"
        and option.gpus == 4
        and option.link == "PCIe4 x16"
        and option.kv == "bf16"
        and option.tiers == {"dram": 10**12, "nvme": 0}
    )
    held = math.floor(16 * (1e12 / 327_680) / 4e6) / 16  # of the working set, in sixteenths
    assert option.hits == {"dram": pytest.approx(0.7 * 16000 * held / (0.7 * 16200 + 0.3 * 1500)), "nvme": 0}
    gpu = plan.hardware[0].spec
    link = LinkSpec.named("PCIe4 x16")
    again = tensor_parallel(MODEL, gpu, link, 4, 0, 16200).compute_s
    hit = (
        max(16000 * 327_680 / 64e9, 16000 * 327_680 / 4 / 32e9)
        + tensor_parallel(MODEL, gpu, link, 4, 16000, 200).compute_s
    )
    cold = tensor_parallel(MODEL, gpu, link, 4, 0, 1500).compute_s
    mean = 0.7 * (held * hit + (1 - held) * again) + 0.3 * cold
    assert option.mean_ttft_s == pytest.approx(mean)
    assert option.ttft_s == pytest.approx(again)  # a quarter of the prefixes misses, more than one in twenty
    assert option.binds == "misses"
    assert option.instances == math.ceil(2 * mean / 0.6)
    assert option.price == pytest.approx(option.instances * (4 * 2.5 + 1000 * 0.003))


def test_more_of_a_tier_is_never_slower(plan: Plan) -> None:
    by_place = {(o.hardware, o.gpus, o.link, o.kv, *o.tiers.values()): o for o in advise(plan).ranked}
    for (*place, dram, nvme), option in by_place.items():
        for more in ((1e12, nvme), (dram, 4e12)):
            assert by_place[*place, *more].mean_ttft_s <= option.mean_ttft_s


def test_what_is_busy_costs_more(plan: Plan) -> None:
    many = advise(replace(plan, requests_per_s=50.0))
    assert many.best.price > advise(plan).best.price
    tight = advise(replace(plan, ttft_s=1e-6))
    assert not any(option.meets for option in tight.ranked)
    assert tight.best.ttft_s == min(option.ttft_s for option in tight.ranked)


def test_a_plan_from_a_trace(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("cached,new\n" + "5000,100\n" * 20)
    text = PLAN[: PLAN.index("[[traffic.class]]")] + 'trace = "t.csv"\n' + PLAN[PLAN.index("[target]") :]
    (tmp_path / "plan.toml").write_text(text)
    best = advise(Plan.from_toml(tmp_path / "plan.toml")).best
    assert best.meets
    assert best.hits["dram"] == pytest.approx(5000 / 5100)
    assert np.isfinite(best.price)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "Llama-3.1-70B"', "", "either name or config"),
        ("utilisation = 0.6", "", "has no utilisation"),
        ("utilisation = 0.6", "utilisation = 2", "are shares"),
        ("gbs = 13", "", "either link or gbs"),
        ("gbs = 13", "gbs = 13\nspeed = 1", "unknown key speed"),
        ("sizes = [0,", "sizes = [12,", "is too small; allowed are 1 MiB to"),
        ('links = ["PCIe4"]', 'links = "PCIe4"', "not a list"),
        ('kv = ["bf16", "fp8"]', 'kv = "bf16"', "not a list of dtypes"),
        ("[target]", "[goal]", "unknown table goal"),
        ("requests_per_s = 2.0", 'requests_per_s = 2.0\ntrace = "x"', "either trace or"),
    ],
)
def test_a_plan_that_is_none_is_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        Plan.from_toml(path)
