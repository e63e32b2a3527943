"""`kvtier.kappa`'s times: pipelines against an event simulation, splits against exhaustive search, limits as properties."""

from __future__ import annotations

import heapq
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.kappa import (
    HardwareSpec,
    LinkSpec,
    ModelSpec,
    Part,
    compute,
    flops,
    kv_bytes,
    layer_times,
    load,
    pipelined,
    recurrence,
    serial,
    shard,
    split,
    split_at,
    tensor_parallel,
    write_back,
)

H100, PCIE5 = HardwareSpec.named("H100-SXM"), LinkSpec.named("PCIe5 x16")
NAMES = ["Llama-3.1-405B", "DeepSeek-V3", "Mixtral-8x7B", "gpt-oss-120b", "Mistral-7B-v0.1"]
seconds = st.floats(0, 10)


def simulate(loads: list[float], computes: list[float]) -> float:
    """Events of a link that loads layer after layer, and of a GPU that computes each when it and its predecessor are there."""
    layers = len(loads)
    events: list[tuple[float, str, int]] = [(loads[0], "loaded", 0)]
    here, running, done, now = set[int](), -1, -1, 0.0
    while done < layers - 1:
        now, what, layer = heapq.heappop(events)
        if what == "loaded":
            here.add(layer)
            if layer + 1 < layers:
                heapq.heappush(events, (now + loads[layer + 1], "loaded", layer + 1))
        else:
            done, running = layer, -1
        if running < 0 and done + 1 in here:
            running = done + 1
            heapq.heappush(events, (now + computes[running], "computed", running))
    return now


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=12))
def test_the_recurrence_is_what_a_simulation_gives(times: list[tuple[float, float]]) -> None:
    loads, computes = [each for each, _ in times], [each for _, each in times]
    found = recurrence(loads, computes)
    assert found.total == pytest.approx(simulate(loads, computes), abs=1e-12, rel=1e-12)
    assert max(sum(loads), sum(computes)) <= found.total * (1 + 1e-12)
    assert found.total <= serial(sum(loads), sum(computes)).total * (1 + 1e-12)
    assert found.hidden == pytest.approx(found.load + found.compute - found.total)


@given(seconds, seconds, st.integers(1, 40))
def test_uniform_layers_are_the_recurrence_of_equal_ones(load_s: float, compute_s: float, layers: int) -> None:
    closed = pipelined(load_s, compute_s, layers)
    each = recurrence([load_s / layers] * layers, [compute_s / layers] * layers)
    assert closed.total == pytest.approx(each.total, abs=1e-12, rel=1e-9)
    assert closed.exposed == closed.total - compute_s


def test_the_recurrence_runs_over_the_last_axis() -> None:
    loads, computes = np.ones((2, 3, 4)), np.arange(4.0)
    found = recurrence(loads, computes)
    assert found.total.shape == (2, 3)
    assert found.total[0, 0] == simulate([1.0] * 4, [0.0, 1.0, 2.0, 3.0])
    with pytest.raises(ConfigError, match="no layers"):
        recurrence([], [])
    with pytest.raises(ConfigError, match="layers=0"):
        pipelined(1, 1, 0)


@pytest.mark.parametrize("name", NAMES)
def test_layers_add_up_to_the_whole(name: str) -> None:
    model = ModelSpec.named(name)
    for cached, new in ((0, 100), (5000, 1), (5000, 3000)):
        loads, computes = layer_times(model, H100, PCIE5, cached, new)
        assert len(loads) == len(computes) == model.layers + 1
        assert loads.sum() == pytest.approx(kv_bytes(model, cached) / PCIE5.read, rel=1e-12)
        done = compute(model, H100, cached, new)
        # Each layer has a roofline of its own, so the sum is at least the whole's and at most both terms together.
        assert done.total * (1 - 1e-12) <= computes.sum() <= (done.flops_s + done.stream_s) * (1 + 1e-12)


def exhaustive(model: ModelSpec, cached: int, new: int, step: int) -> tuple[float, list[int]]:
    """The least time over every split, and the splits that have it."""
    after = float(compute(model, H100, cached, new).total)
    times = {}
    for s in [*range(0, cached, step), cached]:
        held = sum(min(cached - s, math.inf if w is None else w - 1) for w in model.windows) * model.layer_kv_bytes
        front = float(compute(model, H100, 0, s, head=False).total) if s else 0.0
        times[s] = max(front, held / PCIE5.read) + after
    least = min(times.values())
    return least, [s for s, time in times.items() if time <= least * (1 + 1e-12)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("cached", "step"), [(0, 1), (1, 1), (700, 1), (700, 16), (40_000, 2_500), (50, 64)])
def test_the_split_is_the_best_of_all(name: str, cached: int, step: int) -> None:
    model = ModelSpec.named(name)
    found = split(model, H100, PCIE5, cached, 50, granularity=step)
    least, where = exhaustive(model, cached, 50, step)
    assert found.total == pytest.approx(least, rel=1e-12)
    assert found.at in where
    assert found.total <= serial(kv_bytes(model, cached) / PCIE5.read, compute(model, H100, cached, 50).total).total * (
        1 + 1e-12
    )


@settings(max_examples=60)
@given(
    st.integers(0, 80),
    st.lists(st.floats(0, 1), min_size=80, max_size=80),
    st.lists(st.floats(0, 1), min_size=80, max_size=80),
    st.integers(1, 9),
)
def test_any_rising_and_falling_times_split_best(
    cached: int, rises: list[float], falls: list[float], step: int
) -> None:
    up = np.cumsum([0.0, *rises])
    down = np.cumsum([0.0, *falls])[: cached + 1][::-1] if cached else np.zeros(1)
    at = int(split_at(cached, lambda s: up[s], lambda s: down[s], step))
    allowed = [*range(0, cached, step), cached]
    assert at in allowed
    assert max(up[at], down[at]) == pytest.approx(min(max(up[s], down[s]) for s in allowed))


def test_splits_of_many_requests_at_once() -> None:
    model = ModelSpec.named("Llama-3.1-70B")
    cached, new = np.array([0, 1000, 65536]), np.array([[1], [500]])
    found = split(model, H100, PCIE5, cached, new)
    for i, j in np.ndindex(2, 3):
        one = split(model, H100, PCIE5, int(cached[j]), int(new[i, 0]))
        assert found.at[i, j] == one.at
        assert found.total[i, j] == pytest.approx(one.total)
    assert np.all(found.idle >= 0)


def test_compute_is_a_roofline() -> None:
    model = ModelSpec.named("Llama-3.1-405B")
    few, many = compute(model, H100, 65536, 32), compute(model, H100, 65536, 4096)
    assert few.streaming
    assert not many.streaming
    assert few.total == few.stream_s == pytest.approx(0.241, rel=1e-3)
    assert many.total == many.flops_s
    assert compute(model, H100, 100, 0).total == 0
    # No cache: pure compute.
    assert serial(kv_bytes(model, 0) / PCIE5.read, few.total).total == few.total
    assert split(model, H100, PCIE5, 0, 32).total == compute(model, H100, 0, 32).total


@settings(max_examples=40)
@given(
    st.sampled_from(NAMES),
    st.integers(0, 100_000),
    st.integers(1, 5_000),
    st.floats(1, 20),
    st.sampled_from(["link", "flops", "memory"]),
)
def test_faster_is_never_slower(name: str, cached: int, new: int, factor: float, what: str) -> None:
    model = ModelSpec.named(name)
    gpu, link = H100, PCIE5
    if what == "link":
        link = LinkSpec("faster", link.read * factor)
    elif what == "flops":
        gpu = replace(gpu, dense_flops=gpu.dense_flops * factor)
    else:
        gpu = replace(gpu, hbm_bandwidth=gpu.hbm_bandwidth * factor)

    def times(gpu: HardwareSpec, link: LinkSpec) -> list[float]:
        moved, done = kv_bytes(model, cached) / link.read, compute(model, gpu, cached, new).total
        return [
            serial(moved, done).total,
            pipelined(moved, done, model.layers).total,
            recurrence(*layer_times(model, gpu, link, cached, new)).total,
            split(model, gpu, link, cached, new).total,
            tensor_parallel(model, gpu, link, 4, cached, new).load_s,
        ]

    for after, before in zip(times(gpu, link), times(H100, PCIE5), strict=True):
        assert after <= before * (1 + 1e-12)


def test_more_tokens_never_take_less() -> None:
    for name in NAMES:
        model = ModelSpec.named(name)
        grid = compute(model, H100, np.arange(0, 5000, 333)[:, None], np.arange(0, 2000, 77)).total
        assert np.all(np.diff(grid, axis=0) >= -1e-12)
        assert np.all(np.diff(grid, axis=1) >= -1e-12)


def test_tiers_at_once_or_in_turn() -> None:
    parts = [Part("dram", 8e9, 50e9), Part("nvme", 6e9, 6e9)]
    together = load(parts)
    assert (together.total, together.binds) == (1.0, "nvme")
    assert together.seconds == {"dram": 0.16, "nvme": 1.0}
    assert load(parts, concurrent=False).total == pytest.approx(1.16)
    shared = load(parts, shared_rate=7e9)
    assert (shared.total, shared.binds) == (2.0, "shared")
    assert load(parts, concurrent=False, shared_rate=10e9).total == pytest.approx(0.8 + 1.0)
    assert load([]).total == 0
    with pytest.raises(ConfigError, match="rate of dram"):
        load([Part("dram", 1, 0)])
    with pytest.raises(ConfigError, match="bytes in dram"):
        load([Part("dram", -1, 1)])


def fluid(reading: float, writing: float, link: LinkSpec) -> float:
    """When the read ends, by small steps of both transfers."""
    both = link.contended
    time, step = 0.0, 1e-4
    while reading > 0:
        rate = both[0] if writing > 0 else link.read
        time += min(step, reading / rate)
        reading -= rate * step
        writing -= both[1] * step
    return time


@pytest.mark.parametrize("generated", [0, 500, 20_000])
def test_write_back(generated: int) -> None:
    model, link = ModelSpec.named("Llama-3.1-70B"), LinkSpec("x", 50e9, 50e9, both=83e9)
    load_s = kv_bytes(model, 10_000) / link.read
    blocking = write_back(model, link, 128, generated, load_s, blocking=True)
    assert blocking.bytes == (128 + generated) * model.kv_bytes_per_token
    assert blocking.added == blocking.seconds == blocking.bytes / 50e9
    beside = write_back(model, link, 128, generated, load_s)
    assert beside.load == pytest.approx(fluid(load_s * 50e9, blocking.bytes, link), abs=3e-4)
    assert 0 <= beside.added <= load_s * (50 / 41.5 - 1) + 1e-12
    assert write_back(model, PCIE5, 128, generated, load_s).added == pytest.approx(0, abs=1e-12)
    assert write_back(model, link, 128, generated).added == 0


def test_tensor_parallel_heads() -> None:
    model = ModelSpec.named("Llama-3.1-70B")
    whole = kv_bytes(model, 1000)
    for gpus, replicas in ((1, 1), (2, 1), (8, 1), (16, 2), (64, 8)):
        found = tensor_parallel(model, H100, PCIE5, gpus, 1000, 100)
        assert found.replicas == replicas
        assert found.load_bytes == whole * replicas / gpus
        assert found.total_bytes == whole * replicas
        assert found.load_s == found.load_bytes / PCIE5.read
        assert found.reduce is None
    # Every rank's part of the products, counted over the ranks, is the whole, up to the replicated KV projections.
    for gpus in (2, 8):
        rank = flops(shard(model, gpus), 1000, 100)
        assert gpus * rank.total == flops(model, 1000, 100).total
    more = flops(shard(model, 16), 1000, 100)
    extra = 2 * 100 * model.layers * 2 * model.hidden * model.head_dim * (16 - 8)
    assert 16 * more.total - flops(model, 1000, 100).total == extra
    counted = tensor_parallel(model, H100, PCIE5, 4, 1000, 100, fabric=450e9)
    assert counted.reduce == pytest.approx(2 * 80 * 2 * (3 / 4) * 100 * 8192 * 2 / 450e9)
    assert counted.compute_s == counted.compute.total + counted.reduce


def test_tensor_parallel_latents() -> None:
    model = ModelSpec.named("DeepSeek-V3")
    whole = kv_bytes(model, 1000)
    each = tensor_parallel(model, H100, PCIE5, 8, 1000, 100)
    assert (each.replicas, each.load_bytes, each.total_bytes, each.exchange) == (8, whole, 8 * whole, 0)
    once = tensor_parallel(model, H100, PCIE5, 8, 1000, 100, latents="broadcast", fabric=450e9)
    assert (once.replicas, once.load_bytes, once.total_bytes) == (8, whole / 8, whole)
    assert once.exchange == pytest.approx(whole * 7 / 8 / 450e9)
    assert once.load_s < each.load_s
    # What is not sharded: the down-projections, and the router.
    rank = shard(model, 8)
    kept = model.layers * (model.hidden * (1536 + 512 + 64)) + 58 * model.router_params
    assert 8 * rank.n_active - model.n_active == 7 * kept
    for bad, message in (
        ({"gpus": 3}, "does not fit DeepSeek-V3"),
        ({"gpus": 8, "latents": "broadcast"}, "needs a model with latent attention, and fabric"),
        ({"gpus": 8, "latents": "none"}, "allowed are replicated and broadcast"),
    ):
        with pytest.raises(ConfigError, match=message):
            tensor_parallel(model, H100, PCIE5, cached=1, new=1, **bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="latent attention"):
        tensor_parallel(ModelSpec.named("70B"), H100, PCIE5, 2, 1, 1, latents="broadcast", fabric=1e9)
