"""`retain`: only the most attended tokens of a stored prefix are loaded, each at its own position."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvtier import Dram, Store
from kvtier.errors import ConfigError, FullError, StorageError
from kvtier.integrations.reference import DictNamespace
from kvtier.kappa import Measured, MeasuredTier, ModelSpec
from kvtier.layout import KVLayout
from kvtier.prefill import Prefill, PrefillEngine, layout_of, namespace
from kvtier.prefill.attended import Attended, most_attended
from kvtier.prefill.importance import SINKS, AttentionMass
from kvtier.prefill.model import cache_argument
from kvtier.prefill.request import needed
from test_prefill import CONFIGS, build, llama
from test_prefill_engine import BLOCK, CACHED, CHUNK, PROMPT, WAIT, after_layers, same, store_of
from test_prefill_queue import Recording

FRACTION = 0.3
FEW = 0.03
"""Six tokens, the first four among them."""


@torch.no_grad()
def sharp(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A model that attends to some tokens much more than to others; else all of the most attended ones are at the front."""
    model = build(config, dtype)
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("q_proj", "k_proj", "q_b_proj", "kv_b_proj")):
            parameter.mul_(20)
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    return sharp(llama())


def stored(model: Any, block: int = BLOCK) -> DictNamespace:
    """The prompt's KV, and what its tokens received."""
    blocks = DictNamespace(layout_of(model, block))
    with PrefillEngine(model, blocks, chunk_tokens=max(CHUNK, block), importance=True) as engine:
        assert engine.flush(engine.run(PROMPT))
    return blocks


def kept_of(blocks: Any, tokens: int = CACHED, fraction: float = FRACTION) -> torch.Tensor:
    keys = blocks.chain(PROMPT)[: tokens // blocks.layout.block_tokens]
    return most_attended(Attended(blocks).read(keys), fraction)


def blocks_of(store: Any, model: Any) -> Any:
    return namespace(store, model, weights=b"tests")


def exact(model: Any, blocks: DictNamespace) -> Prefill:
    with PrefillEngine(model, blocks, chunk_tokens=CHUNK) as engine:
        return engine.run(PROMPT, front=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_kept_tokens_stay_where_they_are_and_the_others_are_not_seen(name: str, dtype: torch.dtype) -> None:
    """The same bits as the model itself gives over the same KV with a mask; close to the kept KV alone, at its positions."""
    model = sharp(CONFIGS[name](), dtype)
    blocks = stored(model)
    kept, whole = kept_of(blocks), exact(model, blocks)
    assert int(kept.sum()) == -(-CACHED * 3 // 10)
    assert kept[:SINKS].all()
    with PrefillEngine(model, blocks, chunk_tokens=CHUNK) as engine:
        some = engine.run(PROMPT, front=0, retain=FRACTION)
        step = engine.step(5, some.cache)
    assert some.report.tokens_reused == int(kept.sum())
    assert some.report.tokens_left_out == CACHED - int(kept.sum())
    assert some.report.bytes == {"dict": int(kept.sum()) * blocks.layout.bytes_per_token}
    assert not torch.equal(some.logits, whole.logits)

    def told(keep: torch.Tensor, masked: bool) -> list[torch.Tensor]:
        """The model over a cache of its own, in which only ``keep`` is visible, or is at all."""
        cache, logits = transformers.DynamicCache(), []
        for index, layer in enumerate(whole.cache.layers):
            pair = (layer.keys[:, :, :CACHED], layer.values[:, :, :CACHED])
            pair = tuple(t.masked_fill(~keep[:, None], 0) if masked else t[:, :, keep] for t in pair)
            cache.update(pair[0].clone(), pair[1].clone(), index)
        for start, part in ((CACHED, PROMPT[CACHED:]), (len(PROMPT), [5])):
            options: dict[str, Any] = {cache_argument(model): cache}
            if masked:
                behind = torch.ones(start + len(part) - CACHED, dtype=torch.long)
                options["attention_mask"] = torch.cat([keep.long(), behind])[None]
            else:
                options["position_ids"] = torch.arange(start, start + len(part))[None]
            with torch.no_grad():
                ids = torch.tensor([part])
                logits.append(model(input_ids=ids, use_cache=True, logits_to_keep=1, **options).logits[:, -1])
        return logits

    for mine, theirs in zip((some.logits, step), told(kept, masked=True), strict=True):
        assert torch.equal(mine, theirs)
    if "sliding" not in name:  # a window counts positions, which tokens moved together no longer have
        tolerance = 1e-4 if dtype == torch.float32 else 0.1
        for mine, theirs in zip((some.logits, step), told(kept, masked=False), strict=True):
            torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("block", [BLOCK, 128], ids=["small-blocks", "segmented-blocks"])
@pytest.mark.parametrize("kind", ["dram", "nvme"])
def test_every_way_gives_the_bits_of_a_dict(kind: str, block: int, tmp_path: Path) -> None:
    """From memory, and from NVMe after a restart, where the counts of attention come from too."""
    model, chunk = sharp(llama(num_hidden_layers=4)), max(CHUNK, block)
    cached = len(PROMPT) // chunk * chunk
    reference = stored(model, block)
    kept = kept_of(reference, cached)
    ways: list[dict[str, Any]] = [{"front": 0, "overlap": False}, {"front": 0}, {"front": cached - chunk}]
    with store_of(kind, tmp_path) as store:
        blocks = namespace(store, model, block_tokens=block, weights=b"tests")
        with PrefillEngine(model, blocks, chunk_tokens=chunk, importance=True) as engine:
            assert engine.flush(engine.run(PROMPT))
        with PrefillEngine(model, blocks, chunk_tokens=chunk) as engine:
            warm = [engine.run(PROMPT, retain=FRACTION, **way) for way in ways] if kind == "dram" else []
    for way in ways if kind == "nvme" else []:
        with store_of(kind, tmp_path) as store:
            blocks = namespace(store, model, block_tokens=block, weights=b"tests")
            with PrefillEngine(model, blocks, chunk_tokens=chunk) as engine:
                warm.append(engine.run(PROMPT, retain=FRACTION, **way))
    with PrefillEngine(model, reference, chunk_tokens=chunk) as engine:
        for way, result in zip(ways, warm, strict=True):
            same(result, engine.run(PROMPT, retain=FRACTION, **way))
            loaded = kept[way["front"] :]
            assert result.report.tokens_reused == int(loaded.sum())
            # Whole segments of the blocks that have a kept token are read from NVMe.
            touched = loaded.view(-1, block).any(1).repeat_interleave(block)
            read = int((loaded if kind == "dram" else touched).sum())
            assert result.report.bytes == {kind: read * blocks.layout.bytes_per_token}


def test_what_is_left_out_costs_no_reads(model: Any) -> None:
    """As many calls as without a selection, however many ranges there are; half of the bytes."""
    source = stored(model)
    calls: list[int] = []

    class Counting(DictNamespace):
        def get_into(self, keys: Sequence[bytes], outs: Sequence[Any], **options: Any) -> Any:
            calls.append(len(keys))
            return super().get_into(keys, outs, **options)

    blocks = Counting(source.layout, source.blocks, besides=source.besides)
    with PrefillEngine(model, blocks, chunk_tokens=CHUNK) as engine:
        whole = engine.run(PROMPT, front=0)
        assert len(calls) == len(engine.groups)
        some = engine.run(PROMPT, front=0, retain=0.5)
    assert calls[len(engine.groups) :] == [int(kept_of(source, fraction=0.5).view(-1, BLOCK).any(1).sum())] * len(
        engine.groups
    )
    assert some.report.bytes["dict"] * 2 == whole.report.bytes["dict"]


@pytest.mark.parametrize("slow", [True, False])
def test_nothing_is_left_out_where_that_saves_no_time(slow: bool) -> None:
    """Unless the front was chosen: then nothing is decided."""
    model, prompt = sharp(llama()), PROMPT[: CACHED + 1]
    with Store(Dram("32MiB")) as store:
        blocks = blocks_of(store, model)
        with PrefillEngine(model, blocks, chunk_tokens=CHUNK, importance=True) as engine:
            cold = engine.run(prompt)
            assert engine.flush(cold)
        # Loading everything takes three times as long as the last token, or next to nothing of it.
        machine = Measured(ModelSpec.from_config(model.config), 1e6, 1e6, (MeasuredTier("dram", 1e15),), "2026-01-01")
        if slow:
            rate = CACHED * blocks.layout.bytes_per_token / 3 / machine.prefill.last(CACHED, 1)
            machine = dataclasses.replace(machine, tiers=(MeasuredTier("dram", rate),))
        for front in (None, 0):
            with PrefillEngine(model, blocks, chunk_tokens=CHUNK, measured=machine) as engine:
                some = engine.run(prompt, retain=FRACTION, front=front)
            left_out = slow or front == 0
            assert some.report.decision == "load"
            assert bool(some.report.tokens_left_out) == left_out
            if not left_out:
                same(some, cold)


def test_nothing_is_left_out_of_blocks_that_are_read_whole(tmp_path: Path) -> None:
    """On NVMe each block has a kept token."""
    model = sharp(llama())
    with store_of("nvme", tmp_path) as store:
        blocks = namespace(store, model, block_tokens=CHUNK, weights=b"tests")
        with PrefillEngine(model, blocks, chunk_tokens=CHUNK, importance=True) as engine:
            cold = engine.run(PROMPT)
            assert engine.flush(cold)
    with store_of("nvme", tmp_path) as store:
        blocks = namespace(store, model, block_tokens=CHUNK, weights=b"tests")
        kept = kept_of(blocks, fraction=0.5).view(-1, CHUNK)
        assert kept.any(1).all()
        assert not kept.all()
        with PrefillEngine(model, blocks, chunk_tokens=CHUNK) as engine:
            warm = engine.run(PROMPT, retain=0.5)
    assert warm.report.tokens_left_out == 0
    assert warm.report.decision == "load"
    same(warm, cold)


def test_all_of_them_is_no_selection_at_all(model: Any) -> None:
    blocks = stored(model)
    whole = exact(model, blocks)
    with PrefillEngine(model, blocks, chunk_tokens=CHUNK) as engine:
        all_kept = engine.run(PROMPT, front=0, retain=1.0)
    same(all_kept, whole)
    assert all_kept.report.bytes == whole.report.bytes
    assert all_kept.report.tokens_left_out == 0


def test_tokens_of_which_nothing_is_known_are_loaded(model: Any) -> None:
    blocks = DictNamespace(layout_of(model, BLOCK))
    with PrefillEngine(model, blocks, chunk_tokens=CHUNK) as engine:
        cold = engine.run(PROMPT)
        engine.flush(cold)
        same(engine.run(PROMPT, front=0, retain=FRACTION), cold)


def test_nothing_is_stored_of_what_was_computed_behind_a_selection(model: Any) -> None:
    blocks = stored(model)
    before = dict(blocks.blocks)
    longer = [*PROMPT[:CACHED], *([3] * 100)]
    with PrefillEngine(model, blocks, chunk_tokens=CHUNK) as engine:
        result = engine.run(longer, front=0, retain=FRACTION)
        told = list(engine.generate(longer, 20, after=result))
        assert engine.keep([*longer, *told], result.cache).wait(WAIT)
        assert engine.flush(result)
    assert result.report.tokens_left_out > 0
    assert blocks.blocks == before


def test_a_load_that_fails_is_computed_with_all_of_its_tokens(model: Any) -> None:
    good = stored(model)
    kept = kept_of(good)
    number = next(i for i in range(4, CACHED // BLOCK) if kept[i * BLOCK : (i + 1) * BLOCK].any())
    lost, chunk = good.chain(PROMPT)[number], number * BLOCK // CHUNK * CHUNK

    class Forgetful(DictNamespace):
        def match(self, keys: Sequence[bytes]) -> Any:
            return good.match(keys)

    blocks = Forgetful(good.layout, {k: v for k, v in good.blocks.items() if k != lost}, besides=good.besides)
    with PrefillEngine(model, blocks, chunk_tokens=CHUNK) as engine:
        result = engine.run(PROMPT, front=0, retain=FRACTION)
    rest = int(kept.sum()) - int(kept[chunk : chunk + CHUNK].sum())
    assert result.report.tokens_lost == CHUNK
    assert result.report.tokens_reused == rest
    assert result.report.tokens_left_out == CACHED - rest - CHUNK
    assert result.cache.hidden is not None
    assert not result.cache.hidden[chunk : chunk + CHUNK].any()
    assert result.logits.isfinite().all()


class Failing(DictNamespace):
    """Its blocks are served, what lies beside them is not."""

    def beside(self, name: str) -> DictNamespace:
        class Broken(DictNamespace):
            def get_into(self, *args: Any, **options: Any) -> Any:
                raise StorageError("the drive failed")

        return Broken(super().beside(name).layout)


def test_a_store_that_cannot_say_what_was_attended_to_has_everything_loaded(model: Any) -> None:
    blocks = Failing(layout_of(model, BLOCK))
    with PrefillEngine(model, blocks, chunk_tokens=CHUNK) as engine:
        cold = engine.run(PROMPT)
        engine.flush(cold)
        warm = engine.run(PROMPT, front=0, retain=FRACTION)
    same(warm, cold)
    assert warm.report.tokens_reused == CACHED


def test_attention_to_blocks_that_were_all_refused_is_counted_to_none(model: Any) -> None:
    class Full(DictNamespace):
        def put_many(self, *args: Any, **options: Any) -> Any:
            raise FullError("no room")

    blocks = Full(layout_of(model, BLOCK))
    with PrefillEngine(model, blocks, chunk_tokens=CHUNK, importance=True) as engine:
        result = engine.run(PROMPT)
        assert engine.flush(result, WAIT)
    assert result.report.stored.blocks_refused == len(blocks.chain(PROMPT))
    assert not blocks.beside("attention").blocks


def test_products_beyond_fp16_spoil_no_sum() -> None:
    mass = AttentionMass(8, queries=None)
    large = torch.full((1, 2, 4, 8), 300.0, dtype=torch.float16)
    mass.look(0, large, large, None, 1.0, None)
    assert mass.mass.isfinite().all()
    mass.look(0, large / 300, large / 300, None, 1.0, None)
    assert (mass.mass[:4] > 0).all()


def test_tokens_that_a_mask_of_either_kind_hides_are_not_counted() -> None:
    query, key = torch.ones(1, 2, 4, 8), torch.ones(1, 2, 8, 8)
    there = torch.tensor([1, 0, 0, 1, 1, 1, 1, 1])
    causal = torch.ones(4, 8, dtype=torch.bool).tril(4) & there.bool()
    seen = []
    for mask in (there[None], causal[None, None]):
        mass = AttentionMass(8, queries=None)
        mass.look(0, query, key, mask, 1.0, None)
        seen.append(mass.seen)
        assert not mass.mass[1:3].any()
    assert torch.equal(*seen)


def test_attention_adds_up_over_requests_and_a_restart(model: Any, tmp_path: Path) -> None:
    keys, sums = [], []
    for _ in range(2):
        with store_of("nvme", tmp_path) as store:
            blocks = namespace(store, model, weights=b"tests")
            with PrefillEngine(model, blocks, chunk_tokens=CHUNK, importance=True) as engine:
                engine.flush(engine.run(PROMPT, front=len(PROMPT)))
            keys = blocks.chain(PROMPT)
            sums.append(Attended(blocks).read(keys))
    assert (sums[0][1] > 0).all()
    torch.testing.assert_close(sums[1], 2 * sums[0])


@dataclasses.dataclass
class Late(DictNamespace):
    """Some of its blocks do not come in time."""

    late: dict[bytes, str] = dataclasses.field(default_factory=dict)

    def get_into(self, keys: Sequence[bytes], outs: Sequence[Any], **kwargs: Any) -> Any:
        results = super().get_into(keys, outs, **kwargs)
        failed = [
            dataclasses.replace(r, hit=False, tier=None, reason=self.late.get(k))
            for k, r in zip(keys, results, strict=True)
        ]
        for key, out in zip(keys, outs, strict=True):
            if key in self.late:
                out[:] = 255
        return [fail if fail.reason else result for fail, result in zip(failed, results, strict=True)]


@pytest.mark.parametrize("reason", ["deadline", "full", "cancelled", "device", "corrupt"])
def test_counts_that_do_not_come_in_time_stay_as_they_are(reason: str) -> None:
    beside = Late(KVLayout.opaque())
    attended = Attended(
        DictNamespace(
            KVLayout(2, "gqa", kv_heads=2, head_dim=8, block_tokens=4, dtype="fp32"), besides={"attention": beside}
        )
    )
    keys, more = [bytes([n]) * 32 for n in range(3)], torch.arange(24.0).reshape(2, 12)
    assert torch.equal(attended.add(keys, more), more)
    assert torch.equal(attended.add(keys, more), 2 * more)
    beside.late = {keys[1]: reason}
    expected = 3 * more
    expected[:, 4:8] = more[:, 4:8]
    assert torch.equal(attended.add(keys, more), expected)
    beside.late = {}
    if reason in ("deadline", "full", "cancelled"):
        expected[:, 4:8] = 2 * more[:, 4:8]
    assert torch.equal(attended.read(keys), expected), "what is lost begins anew"
    assert attended.add([], torch.zeros(2, 0)).shape == (2, 0)


def test_what_counts_is_attention_by_visibility() -> None:
    seen = torch.full((10,), 8.0)
    seen[6] = 0
    mass = torch.tensor([0.0, 0, 0, 0, 5, 1, 0, 3, 4, 2])
    seen[8] = 80
    assert most_attended(torch.stack([mass, seen]), 0.7).nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 6, 7]
    assert most_attended(torch.stack([mass, seen]), 0.1).nonzero().flatten().tolist() == [0, 1, 2, 3, 6]
    assert most_attended(torch.stack([mass, seen]), 1.0).all()


@pytest.mark.parametrize("fraction", [0, -0.5, 1.5, float("nan"), "0.5", [0.5]])
def test_what_is_no_fraction_is_refused(model: Any, fraction: Any) -> None:
    with PrefillEngine(model, DictNamespace(layout_of(model, BLOCK)), chunk_tokens=CHUNK) as engine:
        with pytest.raises(ConfigError, match="retain="):
            engine.run(PROMPT, retain=fraction)
        with pytest.raises(ConfigError, match="retain="):
            engine.submit(PROMPT, retain=fraction)


def test_of_a_request_that_waits_only_blocks_with_kept_tokens_are_fetched(model: Any) -> None:
    source = stored(model)
    blocks = Recording(source.layout, source.blocks, besides=source.besides)
    kept, keys = kept_of(source, fraction=FEW), source.chain(PROMPT)
    expected = [key for key, some in zip(keys, kept.view(-1, BLOCK).any(1).tolist(), strict=False) if some]
    assert 0 < len(expected) < CACHED // BLOCK
    go, fetched = threading.Event(), threading.Event()

    def prefetch(keys: Sequence[bytes], **options: Any) -> Any:
        job = Recording.prefetch(blocks, keys, **options)
        if list(keys) == expected:
            fetched.set()
        return job

    blocks.prefetch = prefetch  # type: ignore[method-assign]
    with (
        PrefillEngine(model, blocks, chunk_tokens=CHUNK) as engine,
        after_layers(model, lambda _: go.wait(WAIT) and None),
    ):
        futures = [engine.submit(PROMPT, front=0, retain=fraction) for fraction in (1.0, FEW, 1.0)]
        assert fetched.wait(WAIT)
        assert sorted(len(job.keys) for job in blocks.jobs) == sorted([len(expected), len(keys)])
        go.set()
        some = futures[1].result(WAIT)
        futures[2].result(WAIT)
    assert some.report.tokens_reused == int(kept.sum())
    assert all(job.cancelled for job in blocks.jobs)


def test_what_is_fetched_for_it_comes_up_from_nvme_and_the_rest_stays(tmp_path: Path) -> None:
    model = sharp(llama(num_hidden_layers=4))
    with store_of("nvme", tmp_path) as store:
        blocks = namespace(store, model, weights=b"tests")
        with PrefillEngine(model, blocks, chunk_tokens=CHUNK, importance=True) as engine:
            assert engine.flush(engine.run(PROMPT))
            keys = blocks.chain(PROMPT)
            wanted = needed(engine, keys, tokens=len(PROMPT), retain=FEW)
            assert 0 < len(wanted) < CACHED // BLOCK
    with (
        store_of("nvme", tmp_path) as store,
        PrefillEngine(model, blocks_of(store, model), chunk_tokens=CHUNK) as engine,
    ):
        assert needed(engine, keys, tokens=len(PROMPT), retain=FEW) == wanted
        engine._ahead.add(0, keys, lambda keys: needed(engine, keys, tokens=len(PROMPT), retain=FEW))
        engine._ahead.close()  # it has looked it up
        assert engine.blocks.prefetch(wanted).wait(WAIT)  # type: ignore[attr-defined]
        tiers = [engine.blocks.match([key]).tiers[0] for key in keys]
        assert {key for key, tier in zip(keys, tiers, strict=True) if tier == "dram"} == set(wanted)
        engine._ahead.take(0)
