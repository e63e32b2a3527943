"""`kvtier.prefill`: overlapped and split prefills, over real stores, against the same KV held in a dict."""

from __future__ import annotations

import itertools
import json
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvtier import Cxl, Dram, Nvme, Store
from kvtier.errors import ClosedError, ConfigError
from kvtier.integrations.reference import DictNamespace
from kvtier.integrations.tensors import BlockBuffer
from kvtier.kappa import Request, Residency, decide
from kvtier.prefill import Prefill, PrefillEngine, forward, layout_of, namespace
from kvtier.prefill.loading import layer_groups
from kvtier.prefill.plan import Meter, plan
from kvtier.prefill.timeline import Event, busy, picture, rows
from test_prefill import CONFIGS, build, llama, unsplit

CHUNK, BLOCK = 32, 16
PROMPT = [int(t) for t in np.random.default_rng(11).integers(0, 256, 210)]
CACHED = 192
WAIT = 60.0


@pytest.fixture(scope="module")
def model() -> Any:
    return build(llama())


def same(one: Prefill, other: Prefill) -> None:
    """Logits and KV of two runs are the same bits."""
    assert torch.equal(one.logits, other.logits)
    for mine, theirs in zip(one.cache.layers, other.cache.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys)
        assert torch.equal(mine.values, theirs.values)


@contextmanager
def store_of(kind: str, place: Path) -> Iterator[Store]:
    tiers: dict[str, tuple[Any, ...]] = {
        "dram": (Dram("32MiB"),),
        "cxl": (Dram("1MiB"), Cxl("32MiB", path=place / "cxl")),
        "nvme": (Dram("8MiB"), Nvme(place / "nvme", "64MiB")),
    }
    if kind == "cxl":
        (place / "cxl").write_bytes(bytes(32 << 20))
    else:
        (place / "nvme").mkdir(exist_ok=True)
    # What comes pushes down what is there.
    with Store(*tiers[kind], policy="lru-leaf") as store:
        yield store


@pytest.mark.parametrize("block", [BLOCK, 128], ids=["small-blocks", "segmented-blocks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_way_gives_the_bits_of_a_dict(name: str, dtype: torch.dtype, block: int, tmp_path: Path) -> None:
    """Serial, pipelined and split, from DRAM, and from NVMe after a restart. INV 1."""
    model = build(CONFIGS[name](), dtype)
    chunk = max(CHUNK, block)
    prompt = (PROMPT * 3)[: 6 * chunk + 18] if block == BLOCK else (PROMPT * 3)[: 3 * chunk + 18]
    usable = len(prompt) // chunk * chunk
    with PrefillEngine(model, DictNamespace(layout_of(model, block)), chunk_tokens=chunk) as engine:
        cold = engine.run(prompt)
        assert engine.flush(cold)
        reference = engine.run(prompt, front=0, overlap=False)
    same(reference, cold)
    ways: list[dict[str, Any]] = [
        {"overlap": False},
        {},
        {"front": chunk},
        {"front": usable - chunk},
        {"front": usable},
    ]
    with store_of("nvme", tmp_path) as store:
        blocks = namespace(store, model, block_tokens=block, weights=b"tests")
        with PrefillEngine(model, blocks, chunk_tokens=chunk) as engine:
            same(engine.run(prompt), reference)
        with PrefillEngine(model, blocks, chunk_tokens=chunk) as engine:
            for way in ways:
                warm = engine.run(prompt, **{"front": 0} | way)
                same(warm, reference)
                assert warm.report.tokens_reused == usable - way.get("front", 0)
                assert set(warm.report.bytes) == ({"dram"} if warm.report.tokens_reused else set())
    for way in ways:
        with store_of("nvme", tmp_path) as store:  # empty memory: what is there comes from the disk
            blocks = namespace(store, model, block_tokens=block, weights=b"tests")
            with PrefillEngine(model, blocks, chunk_tokens=chunk) as engine:
                warm = engine.run(prompt, **{"front": 0} | way)
            same(warm, reference)
            assert warm.report.tokens_reused == usable - way.get("front", 0)
            if warm.report.tokens_reused:
                assert "nvme" in warm.report.bytes
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(reference.logits, unsplit(model, prompt), atol=tolerance, rtol=tolerance)


def test_cxl_memory_gives_the_same_bits(model: Any, tmp_path: Path) -> None:
    with store_of("cxl", tmp_path) as store:
        blocks = namespace(store, model, weights=b"tests")
        with PrefillEngine(model, blocks, chunk_tokens=CHUNK) as engine:
            cold = engine.run(PROMPT)
            assert engine.flush(cold)
            # Push the prompt's blocks down with others.
            others = [PROMPT[::-1], *([(t + i) % 256 for t in PROMPT] for i in range(1, 24))]
            for other in others:
                engine.flush(engine.run(other))
            warm = engine.run(PROMPT, front=0)
            same(warm, cold)
            assert "cxl" in warm.report.bytes


@dataclass
class Held(DictNamespace):
    """Loads that arrive when they are let go: ``gate(layers)`` blocks until then."""

    gate: Callable[[tuple[int, int]], None] = lambda layers: None
    loaded: list[tuple[int, int]] = field(default_factory=list)

    def get_into(
        self,
        keys: Sequence[bytes],
        outs: Sequence[NDArray[np.uint8]],
        *,
        layers: tuple[int, int] | None = None,
        tokens: tuple[int, int] | None = None,
        timeout: float | None = None,
    ) -> Any:
        assert layers is not None
        self.gate(layers)
        results = super().get_into(keys, outs, layers=layers, tokens=tokens, timeout=timeout)
        self.loaded.append(layers)
        return results


@pytest.fixture
def stored(model: Any) -> DictNamespace:
    blocks = DictNamespace(layout_of(model, BLOCK))
    with PrefillEngine(model, blocks, chunk_tokens=CHUNK) as engine:
        engine.flush(engine.run(PROMPT))
    return blocks


@contextmanager
def after_layers(model: Any, note: Callable[[int], None]) -> Iterator[None]:
    """Tells of each layer that the model has computed."""
    hooks = [
        layer.register_forward_hook(lambda *_, number=number: note(number))
        for number, layer in enumerate(model.model.layers)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def test_a_layer_is_computed_while_the_next_one_still_loads(model: Any, stored: DictNamespace) -> None:
    computed = [threading.Event() for _ in range(3)]

    def gate(layers: tuple[int, int]) -> None:
        # Layer n arrives only once layer n - 1 has been computed: an engine that loads first would never end.
        if layers[0]:
            assert computed[layers[0] - 1].wait(WAIT)

    held = Held(stored.layout, stored.blocks, gate=gate)
    with PrefillEngine(model, stored, chunk_tokens=CHUNK) as engine:
        reference = engine.run(PROMPT, front=0)
    with PrefillEngine(model, held, chunk_tokens=CHUNK) as engine, after_layers(model, lambda n: computed[n].set()):
        warm = engine.run(PROMPT, front=0)
    same(warm, reference)
    assert held.loaded == [(0, 1), (1, 2), (2, 3)]


def test_the_first_layer_has_the_link_to_itself_and_is_copied_while_the_next_one_is_read(
    model: Any, stored: DictNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, early = threading.Event(), []

    def gate(layers: tuple[int, int]) -> None:
        if layers[0]:
            second.set()
        else:
            early.append(second.wait(0.1))

    write_to = BlockBuffer.write_to

    def copying(*args: Any) -> None:
        assert second.wait(WAIT)
        write_to(*args)

    with PrefillEngine(model, stored, chunk_tokens=CHUNK) as engine:
        reference = engine.run(PROMPT, front=0)
    monkeypatch.setattr(BlockBuffer, "write_to", copying)
    with PrefillEngine(model, Held(stored.layout, stored.blocks, gate=gate), chunk_tokens=CHUNK) as engine:
        same(engine.run(PROMPT, front=0), reference)
    assert early == [False]


@pytest.mark.parametrize("order", ["tail-first", "front-first", "layer-by-layer", "tail-last"])
def test_the_front_and_the_tail_may_arrive_in_any_order(model: Any, stored: DictNamespace, order: str) -> None:
    """The front is computed while the tail loads; each is placed where it belongs, whatever comes first."""
    front, done, passed = 3, threading.Condition(), [0, 0]  # layers loaded, layers computed
    layers = len(model.model.layers)

    def until(which: int, count: int) -> None:
        with done:
            assert done.wait_for(lambda: passed[which] >= count, WAIT)

    def gate(part: tuple[int, int]) -> None:
        if order == "front-first":
            until(1, front * layers)
        elif order == "tail-last":
            until(1, front * layers + part[0])
        elif order == "layer-by-layer":
            until(1, part[0] + 1)

    class Counted(Held):
        def get_into(self, *args: Any, **kwargs: Any) -> Any:
            results = super().get_into(*args, **kwargs)
            with done:
                passed[0] += 1
                done.notify_all()
            return results

    def computed(layer: int) -> None:
        if order == "tail-first":
            until(0, layers)
        with done:
            passed[1] += 1
            done.notify_all()

    held = Counted(stored.layout, stored.blocks, gate=gate)
    with PrefillEngine(model, stored, chunk_tokens=CHUNK) as engine:
        reference = engine.run(PROMPT, front=0, overlap=False)
    with PrefillEngine(model, held, chunk_tokens=CHUNK) as engine, after_layers(model, computed):
        warm = engine.run(PROMPT, front=front * CHUNK)
    same(warm, reference)
    assert warm.report.decision == "split"
    assert (warm.report.tokens_front, warm.report.tokens_reused) == (front * CHUNK, CACHED - front * CHUNK)


@pytest.mark.parametrize("front", [0, 2 * CHUNK])
def test_a_load_that_is_late_is_given_up(model: Any, tmp_path: Path, front: int) -> None:
    with store_of("nvme", tmp_path) as store:
        blocks = namespace(store, model, weights=b"tests")
        with PrefillEngine(model, blocks, chunk_tokens=CHUNK) as engine:
            cold = engine.run(PROMPT)
    size = blocks.layout.block_bytes
    with Store(Dram("8MiB"), Nvme(tmp_path / "nvme", "64MiB", emulate_gbs=0.001)) as store:
        # One block alone takes ten times the deadline here.
        assert size >= 12_000
        blocks = namespace(store, model, weights=b"tests")
        with PrefillEngine(model, blocks, chunk_tokens=CHUNK, timeout=1e-3) as engine:
            late = engine.run(PROMPT, front=front)
    same(late, cold)
    assert late.report.tokens_lost > 0
    assert "deadline" in late.report.why
    assert late.report.tokens_reused + late.report.tokens_lost == CACHED - front


def test_a_failure_while_the_front_is_computed_costs_what_failed(model: Any, stored: DictNamespace) -> None:
    lost = stored.chain(PROMPT)[9]
    blocks = {key: block for key, block in stored.blocks.items() if key != lost}

    class Forgetful(DictNamespace):
        def match(self, keys: Sequence[bytes]) -> Any:
            return stored.match(keys)

    with PrefillEngine(model, stored, chunk_tokens=CHUNK) as engine:
        reference = engine.run(PROMPT, front=0)
    forgetful = Forgetful(stored.layout, blocks)
    with PrefillEngine(model, forgetful, chunk_tokens=CHUNK) as engine:
        warm = engine.run(PROMPT, front=2 * CHUNK)
        engine.flush(warm)
    same(warm, reference)
    assert warm.report.tokens_lost == CHUNK
    assert warm.report.tokens_reused == CACHED - 3 * CHUNK
    assert lost in forgetful.blocks  # and is stored again
    assert warm.report.blocks_stored == 1


def test_the_write_back_is_behind_the_computation(model: Any) -> None:
    """The logits are there before anything is stored, and a cache that is overwritten does not change what is stored."""
    gate = threading.Event()

    class Slow(DictNamespace):
        def contains(self, keys: Sequence[bytes]) -> list[bool]:
            assert gate.wait(WAIT)
            return super().contains(keys)

    slow = Slow(layout_of(model, BLOCK))
    with PrefillEngine(model, slow, chunk_tokens=CHUNK) as engine:
        result = engine.run(PROMPT)
        assert not slow.blocks
        assert not engine.flush(result, timeout=0)
        expected = [layer.keys[:, :, :208].clone() for layer in result.cache.layers]
        result.cache.crop(-len(PROMPT) + 5)
        overwriter = threading.Thread(target=forward, args=(model, [1] * 50, result.cache))
        overwriter.start()  # waits, for the tokens from 5 on are still to be copied
        gate.set()
        overwriter.join(WAIT)
        assert engine.flush(result)
        assert result.report.blocks_stored == len(PROMPT) // BLOCK
        again = engine.run(PROMPT, front=0)
    for layer, keys in zip(again.cache.layers, expected, strict=True):
        assert torch.equal(layer.keys[:, :, :CACHED], keys[:, :, :CACHED])


def test_a_backlog_is_bounded_and_what_is_beyond_it_is_refused(model: Any) -> None:
    gate = threading.Event()

    class Slow(DictNamespace):
        def contains(self, keys: Sequence[bytes]) -> list[bool]:
            assert gate.wait(WAIT)
            return super().contains(keys)

    slow = Slow(layout_of(model, BLOCK))
    long = [int(t) for t in np.random.default_rng(5).integers(0, 256, 500)] * 4
    wide = build(llama(num_hidden_layers=12, max_position_embeddings=4096))
    slow.layout = layout_of(wide, BLOCK)
    with PrefillEngine(wide, slow, chunk_tokens=256, backlog="1MiB") as engine:
        result = engine.run(long)
        gate.set()
        engine.flush(result)
    room = (1 << 20) // (slow.layout.block_bytes * 16) * 16
    assert result.report.blocks_stored == room == len(slow.blocks)
    assert result.report.blocks_refused == len(long) // BLOCK - room > 0


def test_what_is_stored_already_fills_no_backlog() -> None:
    """Else a conversation longer than the backlog would keep nothing of what is added to it."""
    wide = build(llama(num_hidden_layers=12, max_position_embeddings=1024))
    blocks = DictNamespace(layout_of(wide, BLOCK))
    prompt = [int(t) for t in np.random.default_rng(5).integers(0, 256, 480)]
    assert len(prompt) // BLOCK * blocks.layout.block_bytes > 1 << 20
    with PrefillEngine(wide, blocks, chunk_tokens=CHUNK) as engine:
        assert engine.flush(engine.run(prompt))
    with PrefillEngine(wide, blocks, chunk_tokens=CHUNK, backlog="1MiB") as engine:
        told = list(engine.generate(prompt, 2 * BLOCK))
    assert len(told) == 2 * BLOCK
    assert set(blocks.blocks) == set(blocks.chain([*prompt, *told]))


def test_it_learns_and_decides(model: Any, tmp_path: Path) -> None:
    """The first requests measure; then a store that is far too slow is declined, and says why."""
    with (
        store_of("nvme", tmp_path) as store,
        PrefillEngine(model, namespace(store, model, weights=b"tests"), chunk_tokens=CHUNK) as engine,
    ):
        engine.run(PROMPT)
    with Store(Dram("8MiB"), Nvme(tmp_path / "nvme", "64MiB", emulate_gbs=0.001)) as store:
        blocks = namespace(store, model, weights=b"tests")
        with PrefillEngine(model, blocks, chunk_tokens=CHUNK) as engine:
            assert engine.meter.measured() is None
            engine.run(PROMPT[::-1])
            engine.meter.loaded({"nvme": 1000}, {"nvme": 1000.0})
            report = engine.run(PROMPT).report
    assert report.decision == "recompute"
    assert report.tokens_front == CACHED
    assert report.bytes == {}
    assert "recompute" in report.why
    assert report.why.count("(emulated)") == 1
    assert report.emulated
    assert "prefill (emulated)" in report.chrome_trace()
    report.save_timeline(tmp_path / "a.png")
    assert b"tEXtComment\0emulated" in (tmp_path / "a.png").read_bytes()
    assert "load" in report.why
    assert set(report.predicted) == set(report.measured) == {"load_s", "front_s", "new_s", "ttft_s"}


def test_the_timeline_is_complete(model: Any, stored: DictNamespace) -> None:
    with PrefillEngine(model, stored, chunk_tokens=CHUNK) as engine:
        report = engine.run(PROMPT, front=CHUNK).report
        report.stored.wait()
    computed = [event for event in report.timeline if event.kind == "compute"]
    assert list(dict.fromkeys((event.layer, event.tokens) for event in computed)) == [
        (layer, span) for span in [(0, 32), (192, 210)] for layer in range(3)
    ]
    assert sum(event.end_s - event.start_s for event in computed) == pytest.approx(report.compute_s)
    stalls = [event for event in report.timeline if event.kind == "stall"]
    assert sum(event.end_s - event.start_s for event in stalls) == pytest.approx(report.stalled_s)
    assert busy([*computed, *stalls]) == pytest.approx(report.compute_s + report.stalled_s)  # at different times
    loads = [event for event in report.timeline if event.kind == "load"]
    assert sum(event.bytes for event in loads) == report.bytes["dict"] == 160 * stored.layout.bytes_per_token
    assert sorted(event.layer for event in loads) == [0, 1, 2]
    trace = json.loads(report.chrome_trace())["traceEvents"]
    assert sum(event["ph"] == "X" for event in trace) == len(report.timeline) + len(report.stored.events)
    for row in range(1, 1 + len({event["tid"] for event in trace if event["ph"] == "X"})):
        inside = sorted((e["ts"], e["ts"] + e["dur"]) for e in trace if e["ph"] == "X" and e["tid"] == row)
        assert inside
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(inside))  # viewers drop what overlaps
    assert not report.emulated
    assert "emulated" not in report.why
    assert "emulated" not in json.dumps(trace)
    plain = json.dumps(report.to_dict())
    assert "blocks_stored" in plain


def test_what_goes_on_at_a_time_has_rows_of_its_own() -> None:
    spans = [(0.0, 2.0), (1.0, 3.0), (2.0, 4.0), (2.5, 5.0)]
    events = [*(Event("load", i, (0, 1), *span) for i, span in enumerate(spans)), Event("stall", 0, (0, 1), 0.5, 1.0)]
    placed = rows(events[::-1])
    assert [name for name, event in placed if event.kind == "load"] == ["loads", "loads 2", "loads", "loads 3"]
    assert [name for name, event in placed if event.kind == "stall"] == ["model"]


def test_busy_time_is_a_union() -> None:
    events = [Event("load", 0, (0, 1), *span) for span in [(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.8)]]
    assert busy(events) == pytest.approx(4.0)
    assert busy([]) == 0


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([4096] * 3, [1, 1, 1]),
        ([4096] * 32, [2] * 16),
        ([12288] * 32, [2] * 16),
        ([65536] * 16, [1] * 16),
        ([24576] * 30, [1] * 30),
    ],
)
def test_layers_load_in_groups_of_a_useful_size(sizes: list[int], expected: list[int]) -> None:
    groups = layer_groups(sizes)
    assert [len(group) for group in groups] == expected
    assert [layer for group in groups for layer in group] == list(range(len(sizes)))


def test_bad_settings_are_refused(model: Any) -> None:
    blocks = DictNamespace(layout_of(model, BLOCK))
    with pytest.raises(ConfigError, match="chunk_tokens=24"):
        PrefillEngine(model, blocks, chunk_tokens=24)
    with pytest.raises(ConfigError, match="staging"):
        PrefillEngine(model, blocks, staging="ten")
    for what in ("chunk_tokens", "reserve_tokens"):
        for bad in (-1, 1.5, "16"):
            with pytest.raises(ConfigError, match=what):
                PrefillEngine(model, blocks, **{what: bad})

    for late in (-1, float("nan"), "x"):
        with pytest.raises(ConfigError, match="timeout"):
            PrefillEngine(model, blocks, chunk_tokens=CHUNK, timeout=late)  # type: ignore[arg-type]
    with PrefillEngine(model, blocks, chunk_tokens=CHUNK) as engine:
        result = engine.run(PROMPT)
        for token in (-1, 256, 1.5):
            with pytest.raises(ConfigError, match="token"):
                engine.step(token, result.cache)  # type: ignore[arg-type]
        assert result.cache.get_seq_length() == len(PROMPT)


@pytest.mark.parametrize("front", [-100, -1, 2.5, float("nan"), "3"])
def test_a_front_that_is_no_number_of_tokens_is_refused(model: Any, stored: DictNamespace, front: Any) -> None:
    with PrefillEngine(model, stored, chunk_tokens=CHUNK) as engine:
        for begin in (engine.run, engine.submit):
            with pytest.raises(ConfigError, match="front="):
                begin(PROMPT, front=front)
        assert engine.run(PROMPT, front=np.int64(CHUNK)).report.tokens_front == CHUNK


def test_a_closed_engine_begins_nothing(model: Any, stored: DictNamespace) -> None:
    engine = PrefillEngine(model, stored, chunk_tokens=CHUNK)
    engine.close()
    engine.close()
    for begin in (engine.run, engine.submit):
        with pytest.raises(ClosedError, match="engine is closed"):
            begin(PROMPT)


def test_the_meter_finds_what_passes_take(model: Any) -> None:
    """F + a·T + b·T·K, from passes that take exactly that."""
    meter = Meter(model, CHUNK)
    meter.loaded({"dram": 3000}, {"dram": 1.5})

    def seconds(cached: int, new: int) -> float:
        return 2.0 + 0.25 * new + 1e-3 * new * cached

    meter.computed([(at, CHUNK, seconds(at, CHUNK)) for at in range(0, 320, CHUNK)])
    measured = meter.measured()
    assert measured is not None
    # Passes of one length say nothing of f; what they do say is right.
    assert measured.prefill.last(96, CHUNK) == pytest.approx(seconds(96, CHUNK))
    meter.computed([(192, 5, seconds(192, 5))])
    measured = meter.measured()
    assert measured is not None
    assert measured.prefill.last(64, 9) == pytest.approx(seconds(64, 9))
    assert measured.rates["dram"][0] == pytest.approx(1 / 2000)


def test_chunks_of_one_token_are_measured_too(model: Any) -> None:
    with PrefillEngine(model, DictNamespace(layout_of(model, 1)), chunk_tokens=1) as engine:
        cold = engine.run(PROMPT[:9])
        engine.flush(cold)
        same(engine.run(PROMPT[:9], front=0), cold)
        same(engine.run(PROMPT[:9]), cold)


def test_a_rate_that_is_not_used_is_measured_again(model: Any) -> None:
    """Else one slow load would decline a tier for ever."""
    meter = Meter(model, CHUNK)
    meter.computed([(0, CHUNK, 1.0)])
    meter.loaded({"nvme": 1000, "dram": 1000}, {"nvme": 1000.0, "dram": 1.0})
    for _ in range(16):
        measured = meter.measured()
        assert measured is not None
        assert "nvme" in measured.rates
        meter.loaded({"dram": 1000}, {"dram": 1.0})
    measured = meter.measured()
    assert measured is not None
    assert set(measured.rates) == {"dram"}


@pytest.mark.parametrize("front", [None, 0, 64, 128])
@pytest.mark.parametrize("rate", [1e2, 1e4, 2e4, 1e5, 1e7])
def test_the_plan_is_the_best_of_all(model: Any, rate: float, front: int | None) -> None:
    meter = Meter(model, CHUNK)
    meter.computed([(0, CHUNK, 1.0), (64, CHUNK, 1.2), (64, 4, 0.2)])
    meter.loaded({"dram": int(rate)}, {"dram": 1.0})
    measured = meter.measured()
    assert measured is not None
    chosen = plan(128, 10, ["dram"] * 8, [10_000] * 8, CHUNK, 4, measured, front)

    # More than a chunk of new tokens: only the first one is overlapped.
    longer = plan(128, CHUNK + 10, ["dram"] * 8, [10_000] * 8, CHUNK, 4, measured, 0).predicted
    first = measured.prefill.last(128, CHUNK)
    assert longer["ttft_s"] == pytest.approx(
        max(longer["new_s"], longer["load_s"] + longer["new_s"] - first + first / 4)
    )

    def ttft(chunks: int) -> float:
        load, first, after = (
            (4 - chunks) * 2 * 10_000 / rate,
            measured.prefill.prefix(chunks * CHUNK),
            measured.prefill.last(128, 10),
        )
        return max(first + after, load + after / 4) if load else first + after

    if front is not None:
        assert chosen.front == front
    best = min(ttft(chunks) for chunks in range(5)) if front is None else ttft(front // CHUNK)
    assert best * (1 - 1e-9) <= chosen.predicted["ttft_s"] <= best / (1 - 0.02) ** 4
    assert chosen.predicted["ttft_s"] == pytest.approx(ttft(chosen.front // CHUNK))
    assert chosen.action == {0: "load", 128: "recompute"}.get(chosen.front, "split")


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("new", [10, CHUNK + 10])
@pytest.mark.parametrize("rate", [1e2, 1e4, 2e4, 1e5, 1e7])
@pytest.mark.parametrize("below", [0, 3, 8])
def test_the_plan_is_what_the_cost_model_decides(model: Any, below: int, rate: float, new: int, groups: int) -> None:
    meter = Meter(model, CHUNK)
    meter.computed([(0, CHUNK, 1.0), (64, CHUNK, 1.2), (64, 4, 0.2)])
    meter.loaded({"dram": int(rate), "nvme": int(rate / 3)}, {"dram": 1.0, "nvme": 1.0})
    measured = meter.measured()
    assert measured is not None
    tiers = ["dram"] * (8 - below) + ["nvme"] * below
    residency = Residency({tier: 10_000.0 * tiers.count(tier) for tier in dict.fromkeys(tiers)})
    decided = decide(Request(128, new), residency, measured, granularity=CHUNK, groups=groups)
    ttft = [
        plan(128, new, tiers, [10_000] * 8, CHUNK, groups, measured, at).predicted["ttft_s"]
        for at in range(0, 128, CHUNK)
    ]
    assert decided.load_s == pytest.approx(ttft[0])
    assert min(decided.load_s, decided.split_s) == pytest.approx(min(ttft))
    if decided.action == "split":
        assert decided.predicted_s == pytest.approx(ttft[decided.split_at // CHUNK])


def test_the_timeline_is_a_picture_too(model: Any, stored: DictNamespace, tmp_path: Path) -> None:
    """Decoded by hand: the size is right, and every pixel of an event has its colour."""
    events = [
        Event("load", 0, (0, 1), 0.0, 1.0),
        Event("compute", 1, (0, 1), 1.0, 2.0),
        Event("stall", 1, (0, 1), 0.5, 1.0),
    ]
    png = picture(events, width=200)
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    size = struct.unpack(">I", png[33:37])[0]
    assert png[37:41] == b"IDAT"
    rows = np.frombuffer(zlib.decompress(png[41 : 41 + size]), np.uint8).reshape(height, 1 + 3 * width)
    pixels = rows[:, 1:].reshape(height, width, 3)
    row = height // 3  # two layers, and what no layer has to itself
    assert tuple(pixels[row // 4, 50]) == (11, 111, 184)
    assert tuple(pixels[row // 4, 150]) == (255, 255, 255)
    assert tuple(pixels[row + 3 * row // 4, 150]) == (21, 128, 61)
    assert tuple(pixels[row + 3 * row // 4, 75]) == (194, 65, 12)
    with PrefillEngine(model, stored, chunk_tokens=CHUNK) as engine:
        report = engine.run(PROMPT, front=CHUNK).report
    report.save_timeline(tmp_path / "a.png")
    report.save_timeline(tmp_path / "a.json")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((tmp_path / "a.json").read_text())["traceEvents"]
