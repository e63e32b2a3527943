"""`kvtier.kappa`'s closed forms against a second implementation that counts, token by token, layer by layer, head by head."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import Dram, Store
from kvtier.errors import ConfigError
from kvtier.kappa import (
    Experts,
    HardwareSpec,
    KVFormat,
    Latent,
    LinkSpec,
    ModelSpec,
    compute,
    depth_slope,
    experts_touched,
    flops,
    kappa_crit,
    kappa_hw,
    kappa_m,
    kappa_ratio,
    kappa_turn,
    kv_bytes,
    pairs,
    t_star,
    weight_bytes,
)
from kvtier.kappa.cost import layer_flops, layer_weight_bytes
from kvtier.layout import DTYPES

H100, PCIE5 = HardwareSpec.named("H100-SXM"), LinkSpec.named("PCIe5 x16")
sizes = st.integers(1, 5)


@st.composite
def models(draw: st.DrawFn, windows: bool = True) -> ModelSpec:
    """Any small model."""
    layers, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    latent = experts = None
    if draw(st.booleans()):
        latent = Latent(draw(sizes), draw(sizes), draw(sizes), draw(sizes), draw(st.none() | sizes))
    flags: tuple[bool, ...] = (False,) * layers
    if draw(st.booleans()):
        count = draw(st.integers(1, 5))
        experts = Experts(count, draw(st.integers(1, count)), draw(sizes), draw(st.integers(0, 3)))
        flags = tuple(draw(st.booleans()) for _ in range(layers))
    window = st.none() | st.integers(1, 9) if windows and latent is None else st.none()
    dtype = draw(st.sampled_from(["bf16", "int8", "fp32"]))
    group = draw(st.integers(0, 3))
    return ModelSpec(
        name="drawn",
        layers=layers,
        hidden=draw(sizes),
        vocab=draw(st.integers(1, 9)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(sizes),
        ffn=draw(sizes),
        latent=latent,
        experts=experts,
        expert_layers=flags,
        windows=tuple(draw(window) for _ in range(layers)),
        tied=draw(st.booleans()),
        kv=KVFormat(dtype, group, 4 if group else 0, draw(st.sampled_from([None, "bf16"]))),
    )


class Counter:
    """Counts multiplications and the parameters they use."""

    def __init__(self) -> None:
        self.multiplications = 0

    def vector_matrix(self, rows: int, columns: int) -> None:
        for _ in range(columns):
            self.multiplications += rows

    def dot(self, length: int) -> None:
        self.multiplications += length


def matrices(model: ModelSpec, layer: int) -> list[tuple[int, int]]:
    """The attention projections of a layer, (rows, columns) each."""
    h, n = model.hidden, model.heads
    if model.latent is None:
        wide, narrow = n * model.head_dim, model.kv_heads * model.head_dim
        return [(h, wide), (h, narrow), (h, narrow), (wide, h)]
    at = model.latent
    query = n * (at.nope_dim + at.rope_dim)
    queries = [(h, query)] if at.q_rank is None else [(h, at.q_rank), (at.q_rank, query)]
    down = [(h, at.kv_rank), (h, at.rope_dim)]
    up = [(at.kv_rank, at.nope_dim), (at.kv_rank, at.v_dim)] * n  # or their absorbed twins: the same products
    return [*queries, *down, *up, (n * at.v_dim, h)]


def gated(hidden: int, width: int) -> list[tuple[int, int]]:
    return [(hidden, width), (hidden, width), (width, hidden)]


def count_prefill(model: ModelSpec, cached: int, new: int, form: str) -> int:
    """Operations of a prefill, counted."""
    work = Counter()
    for layer in range(model.layers):
        for token in range(new):
            for matrix in matrices(model, layer):
                work.vector_matrix(*matrix)
            if model.expert_layers[layer]:
                assert model.experts
                work.vector_matrix(model.hidden, model.experts.count)
                for _ in range(model.experts.per_token):
                    for matrix in gated(model.hidden, model.experts.width):
                        work.vector_matrix(*matrix)
                for matrix in gated(model.hidden, model.experts.shared_width):
                    work.vector_matrix(*matrix)
            else:
                for matrix in gated(model.hidden, model.ffn):
                    work.vector_matrix(*matrix)
            position = cached + token
            window = model.windows[layer]
            for _ in range(model.heads):
                for context in range(position + 1):
                    if window is not None and position - context >= window:
                        continue
                    if model.latent is None:
                        work.dot(model.head_dim)
                        work.dot(model.head_dim)
                    elif form == "absorbed":
                        work.dot(model.latent.kv_rank + model.latent.rope_dim)
                        work.dot(model.latent.kv_rank)
                    else:
                        work.dot(model.latent.nope_dim + model.latent.rope_dim)
                        work.dot(model.latent.v_dim)
        if model.latent is not None and form == "decompressed" and new:
            for _ in range(cached):
                for _ in range(model.heads):
                    work.vector_matrix(model.latent.kv_rank, model.latent.nope_dim)
                    work.vector_matrix(model.latent.kv_rank, model.latent.v_dim)
    if new:
        work.vector_matrix(model.hidden, model.vocab)
    return 2 * work.multiplications


def count_kv(model: ModelSpec, cached: int) -> int:
    """Bytes to load, element by element."""
    total = 0

    def vector(elements: int) -> int:
        size = 0
        for element in range(elements):
            size += DTYPES[model.kv.dtype]
            if model.kv.group and element % model.kv.group == 0:
                size += model.kv.scale_bytes
        return size

    for window in model.windows:
        for token in range(cached):
            # The first new token stands at `cached` and sees `window` tokens, itself included.
            if window is not None and cached - token >= window:
                continue
            if model.latent is not None:
                total += vector(model.latent.kv_rank)
                total += model.latent.rope_dim * DTYPES[model.kv.rope_dtype or model.kv.dtype]
                continue
            for _ in range(model.kv_heads):
                total += 2 * vector(model.head_dim)
    return total


@given(models(), st.integers(0, 12), st.integers(0, 6))
def test_operations_are_those_that_counting_gives(model: ModelSpec, cached: int, new: int) -> None:
    closed = flops(model, cached, new)
    forms = ("heads",) if model.latent is None else ("absorbed", "decompressed")
    counted = {form: count_prefill(model, cached, new, form) for form in forms}
    assert isinstance(closed.total, int)
    assert closed.total == min(counted.values())
    if model.latent is not None:
        assert closed.total == counted["absorbed" if closed.absorbed else "decompressed"]
    assert closed.linear == 2 * new * model.n_active
    by_layer = sum(layer_flops(model, kind, cached, new, closed.absorbed) for kind in model.kinds)
    assert by_layer + closed.head == closed.total
    assert flops(model, cached, new, head=False).total == closed.total - closed.head


@given(models(), st.integers(0, 20))
def test_kv_bytes_are_those_that_counting_gives(model: ModelSpec, cached: int) -> None:
    assert kv_bytes(model, cached) == count_kv(model, cached)
    unbounded = replace(model, windows=(None,) * model.layers)
    assert kv_bytes(unbounded, cached) == cached * model.kv_bytes_per_token == count_kv(unbounded, cached)


@given(models())
def test_parameters_are_those_of_the_matrices(model: ModelSpec) -> None:
    active = total = 0
    for layer in range(model.layers):
        attention = sum(rows * columns for rows, columns in matrices(model, layer))
        feed = gated(model.hidden, model.ffn)
        everything = list(feed)
        if model.expert_layers[layer]:
            assert model.experts
            router = (model.hidden, model.experts.count)
            one, shared = gated(model.hidden, model.experts.width), gated(model.hidden, model.experts.shared_width)
            feed = [router, *one * model.experts.per_token, *shared]
            everything = [router, *one * model.experts.count, *shared]
        active += attention + sum(rows * columns for rows, columns in feed)
        total += attention + sum(rows * columns for rows, columns in everything)
    assert model.n_active == active
    assert model.n_total == total + model.hidden * model.vocab * (1 if model.tied else 2)


@given(models(), st.integers(0, 12))
def test_weights_are_those_that_tokens_touch(model: ModelSpec, new: int) -> None:
    touched: float = 0
    for layer in range(model.layers):
        here: Fraction = Fraction(sum(rows * columns for rows, columns in matrices(model, layer)))
        if model.expert_layers[layer]:
            assert model.experts
            count = model.experts.count
            missed = Fraction(count - model.experts.per_token, count) ** new
            experts = count * (1 - missed)
            width = experts * model.experts.width + model.experts.shared_width
            here += model.hidden * count + 3 * model.hidden * width
        else:
            here += 3 * model.hidden * model.ffn
        touched += float(here)
    rows = 0 if model.tied else min(new, model.vocab) * model.hidden
    expected = (touched + rows + model.hidden * model.vocab) * model.weight_bytes if new else 0
    assert weight_bytes(model, new) == pytest.approx(expected, rel=1e-12)
    by_layer = sum(layer_weight_bytes(model, kind, new) for kind in model.kinds)
    expected_layers = touched * model.weight_bytes if new else 0
    assert by_layer == pytest.approx(expected_layers, rel=1e-12)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("new", [1, 2, 3])
def test_touched_experts_are_the_mean_over_all_routings(count: int, new: int) -> None:
    for per_token in range(1, count + 1):
        choices = list(itertools.combinations(range(count), per_token))
        distinct = [len(set().union(*routing)) for routing in itertools.product(choices, repeat=new)]
        assert experts_touched(count, per_token, new) == pytest.approx(sum(distinct) / len(distinct), rel=1e-12)


@given(st.integers(0, 50), st.integers(0, 30), st.none() | st.integers(1, 40))
def test_pairs_are_those_that_counting_gives(cached: int, new: int, window: int | None) -> None:
    counted = sum(min(cached + i, window or math.inf) for i in range(1, new + 1))
    assert pairs(cached, new, window) == counted


@given(models())
def test_arrays_give_what_numbers_give(model: ModelSpec) -> None:
    cached, new = np.array([[0], [3], [40]]), np.array([0, 1, 7, 100])
    terms, weights, size = flops(model, cached, new), weight_bytes(model, new), kv_bytes(model, cached)
    assert np.shape(terms.total) == (3, 4)
    for i, j in np.ndindex(3, 4):
        one = flops(model, int(cached[i, 0]), int(new[j]))
        for name in ("projections", "ffn", "experts", "router", "attention", "latent_up", "head", "total"):
            assert np.broadcast_to(getattr(terms, name), (3, 4))[i, j] == getattr(one, name)
        assert weights[j] == pytest.approx(weight_bytes(model, int(new[j])), rel=1e-12)
        assert size[i, 0] == kv_bytes(model, int(cached[i, 0]))


@pytest.mark.parametrize("bad", [-1, 1.5, True, float("nan"), "many", [1, -2], None])
def test_what_is_no_number_of_tokens_is_refused(bad: object) -> None:
    for call in (lambda: pairs(bad, 1), lambda: pairs(1, bad), lambda: kv_bytes(ModelSpec.named("405B"), bad)):
        with pytest.raises(ConfigError, match="number of tokens"):
            call()


def test_the_published_checks() -> None:
    def star(name: str) -> float:
        return t_star(ModelSpec.named(name), H100, PCIE5)

    assert round(star("Llama-3.1-405B")) == round(star("Qwen3-235B")) == 966
    assert round(star("Llama-3.1-70B")) == 1932
    assert round(star("DeepSeek-V3")) == 64
    deep = ModelSpec.named("DeepSeek-V3")
    assert kappa_m(deep) == pytest.approx(1.016e6, rel=1e-3)
    assert kappa_m(deep, 37e9) == pytest.approx(1.053e6, rel=1e-3)
    assert kappa_hw(H100, PCIE5) == pytest.approx(64.7e-6, rel=1e-3)
    assert kappa_hw(H100, PCIE5, "paper") == pytest.approx(32.3e-6, rel=2e-3)
    # The two forms of latent attention cross near T = 171, for a long prefix.
    assert flops(deep, 10**7, 170).absorbed
    assert not flops(deep, 10**7, 172).absorbed
    # What attention adds at 65K, to one token's products.
    for name, share in (("Llama-3.1-405B", 0.67), ("Llama-3.1-70B", 1.26), ("Qwen3-235B", 4.82)):
        terms = flops(ModelSpec.named(name), 65536, 1)
        assert terms.attention / terms.linear == pytest.approx(share, abs=0.02)


def crossing(model: ModelSpec, new: int) -> float:
    """K/T at which load and products take equally long, by bisection over the written-out definition."""
    c, bw = H100.flops(), PCIE5.read

    def late(cached: int) -> float:
        done = flops(model, cached, new, head=False)
        # The closed form's diagonal is T²/2, the exact one's T(T+1)/2.
        full = sum(window is None for window in model.windows)
        per_pair = 4 * model.heads * model.head_dim
        return kv_bytes(model, cached) / bw - (done.total - full * per_pair * new / 2) / c

    low, high = 0, 10**12
    if late(high) < 0:
        return math.inf
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if late(middle) >= 0 else (middle, high)
    return high / new


@pytest.mark.parametrize("name", ["Llama-3.1-405B", "Llama-3.1-70B", "Qwen3-235B-A22B", "Mixtral-8x7B"])
@pytest.mark.parametrize("new", [1, 32, 500, 960, 3000])
def test_kappa_crit_is_where_load_and_products_meet(name: str, new: int) -> None:
    model = ModelSpec.named(name)
    expected = crossing(model, new)
    assert kappa_crit(model, H100, PCIE5, new) == pytest.approx(expected, abs=1.0 / new, rel=1e-9)
    b, a, f = model.kv_bytes_per_token, 4 * model.layers * model.heads * model.head_dim, 2 * model.n_active
    slope = b / PCIE5.read - a * new / H100.flops()
    if slope > 0:
        formula = ((f + a * new / 2) / H100.flops()) / slope
        assert kappa_crit(model, H100, PCIE5, new) == pytest.approx(formula, rel=1e-12)


@pytest.mark.parametrize(
    "name", catalog_names := ["Llama-3.1-405B", "DeepSeek-V3", "Mixtral-8x7B", "gpt-oss-120b", "Mistral-7B-v0.1"]
)
@pytest.mark.parametrize("new", [1, 20, 60, 400])
def test_kappa_turn_is_where_load_and_compute_meet(name: str, new: int) -> None:
    model = ModelSpec.named(name)
    turn = float(kappa_turn(model, H100, PCIE5, new))
    if math.isinf(turn):
        for cached in (1, 1000, 10**6, 10**9):
            assert kv_bytes(model, cached) / PCIE5.read < compute(model, H100, cached, new).total
        return
    before, after = math.floor(turn * new), math.ceil(turn * new) + 1
    assert kv_bytes(model, before) / PCIE5.read <= compute(model, H100, before, new).total * (1 + 1e-9)
    assert kv_bytes(model, after) / PCIE5.read >= compute(model, H100, after, new).total * (1 - 1e-9)


@pytest.mark.parametrize(
    "name", ["Llama-3.1-405B", "DeepSeek-V3", "DeepSeek-V2-Lite", "gpt-oss-120b", "Mistral-7B-v0.1"]
)
def test_kappa_crit_goes_to_infinity_at_its_pole(name: str) -> None:
    model = ModelSpec.named(name)
    star = t_star(model, H100, PCIE5)
    below = star * np.array([0.5, 0.9, 0.99, 0.999]) if name[0] != "M" else np.array([star - 3, star - 2, star - 1])
    values = kappa_crit(model, H100, PCIE5, below)
    assert np.all(np.isfinite(values))
    assert np.all(np.diff(values) > 0)
    assert np.all(np.isinf(kappa_crit(model, H100, PCIE5, star * np.array([1.0, 1.01, 10.0]))))


@settings(max_examples=40)
@given(models(windows=False), st.integers(1, 200), st.floats(1.01, 10))
def test_kappa_and_its_units(model: ModelSpec, new: int, factor: float) -> None:
    fast = replace(H100, dense_flops=H100.dense_flops * factor)
    wide = LinkSpec("wide", PCIE5.read * factor)
    crit, star = kappa_crit(model, H100, PCIE5, new), t_star(model, H100, PCIE5)
    # Only the product has no unit: both rates times the same factor change nothing.
    assert kappa_crit(model, fast, wide, new) == pytest.approx(crit, rel=1e-9)
    assert t_star(model, fast, wide) == pytest.approx(star, rel=1e-9)
    # A wider link is the bottleneck later, a faster GPU makes it one sooner.
    assert kappa_crit(model, H100, wide, new) >= crit * (1 - 1e-12)
    assert kappa_crit(model, fast, PCIE5, new) <= crit * (1 + 1e-12)
    assert t_star(model, H100, wide) <= star * (1 + 1e-12)
    if model.latent is None and math.isfinite(crit):
        assert crit >= kappa_m(model) * kappa_hw(H100, PCIE5) * (1 - 1e-12)
    assert kappa_turn(model, H100, PCIE5, new) >= crit * (1 - 1e-12)


def test_kappa_refuses_what_has_none() -> None:
    model = ModelSpec.named("405B")
    for bad in (0, -1, float("inf")):
        with pytest.raises(ConfigError, match="above 0"):
            kappa_crit(model, H100, PCIE5, bad)
    assert list(kappa_ratio([0, 10], [5, 5])) == [0, 2]
    with pytest.raises(ConfigError, match="fewer than"):
        kappa_ratio(1, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 3}, "no multiple"),
        ({"layers": 0}, "at least 1"),
        ({"ffn": 0}, "ffn is missing"),
        ({"windows": (1,)}, "1 entries for 2 layers"),
        ({"expert_layers": (True, False)}, "experts is not given"),
        ({"latent": Latent(1, 1, 1, 1), "windows": (4, None)}, "not modelled"),
        ({"weight_bytes": 0}, "above 0"),
    ],
)
def test_a_model_that_cannot_be_is_refused(changes: dict[str, object], message: str) -> None:
    base = ModelSpec("m", layers=2, hidden=4, vocab=5, heads=4, kv_heads=2, head_dim=2, ffn=3)
    with pytest.raises(ConfigError, match=message):
        replace(base, **changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="of count=2 experts"):
        Experts(2, 3, 4)


def test_late_blocks_cost_more_by_the_attention_to_those_before() -> None:
    model = ModelSpec.named("Llama-3.1-8B")
    slope = depth_slope(model, 512)
    # 4·layers·hidden·block_tokens of 2·n_active FLOPs a token, which are 7 billion without embeddings and head.
    assert slope == pytest.approx(4 * 32 * 4096 * 512 / (2 * 6.98e9), rel=0.02)
    tenth = flops(model, 9 * 512, 512, head=False).total / flops(model, 0, 512, head=False).total
    assert tenth == pytest.approx(1 + 9 * slope)
    with Store(Dram("4MiB"), policy=f"importance:{slope}") as store:
        store.put(b"k" * 16, np.zeros(4096, np.uint8))
        assert store.get(b"k" * 16) is not None
