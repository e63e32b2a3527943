"""Several prompts in one pass of the model: the bits of the same batch over the very same KV in a dict. INV 1."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvtier import Dram, Hbm, Nvme, Store
from kvtier.errors import ClosedError, ConfigError, StorageError
from kvtier.integrations.reference import DictNamespace
from kvtier.prefill import Prefill, PrefillEngine, layout_of, namespace
from kvtier.prefill.prompt import check_positions
from kvtier.prefill.registry import attending, packs
from test_prefill import build, llama, unsplit
from test_prefill_engine import BLOCK, CHUNK, PROMPT, WAIT, Held, same
from test_prefill_matrix import PROMPTS, WAYS, copied, kept, stored
from test_retain import sharp

__all__ = ["stored"]

BATCH = [PROMPT, [*PROMPTS[1][:150], 4], PROMPTS[2], [5] * 9, [PROMPT[0]]]
"""210, 151, 180, 9 and 1 tokens, of which 192, 128, 160, 0 and 0 are stored; two begin with the same tokens."""
CACHED = [192, 128, 160, 0, 0]


@pytest.fixture(scope="module")
def model() -> Any:
    return build(llama())


def batch(model: Any, blocks: Any, prompts: Sequence[list[int]] = BATCH, **options: Any) -> list[Prefill]:
    with PrefillEngine(model, blocks, chunk_tokens=CHUNK) as engine:
        return engine.run_batch(prompts, **options)


@pytest.mark.parametrize("kind", ["hbm", "dram", "nvme"])
def test_a_batch_gives_the_bits_of_a_dict(stored: tuple[Any, DictNamespace], kind: str, tmp_path: Path) -> None:
    model, source = stored
    dtype = model.dtype
    tiers = {
        "hbm": (Hbm("8MiB", backend="host"), Dram("16MiB")),
        "dram": (Dram("16MiB"),),
        "nvme": (Dram("8MiB"), Nvme(tmp_path, "64MiB")),
    }[kind]
    if kind == "nvme":
        with Store(*tiers) as store:
            for prompt in PROMPTS:
                copied(source, namespace(store, model, weights=b"tests"), prompt)
    for way in WAYS:
        with Store(*tiers) as store:
            blocks = namespace(store, model, weights=b"tests")
            for prompt in PROMPTS if kind != "nvme" else ():
                keys = copied(source, blocks, prompt)
                assert kind != "hbm" or all(blocks.prefetch(keys, to="hbm").result())
            results = batch(model, blocks, **way)
        # What was computed in the dict's batch must not be there for the next one.
        expected = batch(model, DictNamespace(source.layout, dict(source.blocks)), **way)
        for result, other, cached in zip(results, expected, CACHED, strict=True):
            same(result, other)
            assert result.report.tokens_reused == max(cached - way["front"], 0)
            assert set(result.report.bytes) == ({kind} if cached else set())
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    with PrefillEngine(model, source, chunk_tokens=CHUNK) as engine:
        for result, prompt in zip(results, BATCH, strict=True):
            alone = engine.run(prompt, front=0).logits
            torch.testing.assert_close(result.logits, alone, atol=tolerance, rtol=tolerance)


def test_what_is_next_of_each_goes_through_the_model_together(model: Any) -> None:
    source, rows = kept(model, PROMPTS), []
    hook = model.model.layers[1].register_forward_hook(lambda _, given, out: rows.append(given[0].shape[1]))
    try:
        results = batch(model, source, front=CHUNK)
    finally:
        hook.remove()
    # A chunk of front each; the new tokens of all; nobody has a second chunk of them.
    assert rows == [3 * CHUNK, 18 + 23 + 20 + 9 + 1]
    assert [result.logits.shape for result in results] == [(1, 256)] * 5
    for result in results:
        assert "computed with 4 more" in result.report.why
        assert not result.report.predicted
        assert 0 < result.report.measured["new_s"] <= result.report.ttft_s


def test_new_tokens_of_several_chunks_and_no_stored_ones(model: Any) -> None:
    blocks, rows = DictNamespace(layout_of(model, BLOCK)), []
    hook = model.model.layers[0].register_forward_hook(lambda _, given, out: rows.append(given[0].shape[1]))
    try:
        with PrefillEngine(model, blocks, chunk_tokens=CHUNK) as engine:
            results = engine.run_batch(BATCH)
            assert all(engine.flush(result, WAIT) for result in results)
            assert engine.run_batch([]) == []
    finally:
        hook.remove()
    assert sum(rows) == sum(map(len, BATCH))
    assert len(rows) == 7
    assert all(all(blocks.contains(blocks.chain(prompt))) for prompt in BATCH)
    assert [result.report.decision for result in results] == ["recompute"] * 5


def test_a_load_that_fails_costs_its_own_request_alone(model: Any) -> None:
    """One block is gone, and a device fails in the middle of another request: what they share with none is computed again."""
    good = kept(model, PROMPTS)
    expected = batch(model, DictNamespace(good.layout, dict(good.blocks)), front=0)
    gone, broken = good.chain(PROMPTS[2])[8], good.chain(PROMPTS[1])[5]

    class Failing(DictNamespace):
        def match(self, keys: Sequence[bytes]) -> Any:
            return good.match(keys)

        def get_into(self, keys: Sequence[bytes], *args: Any, **options: Any) -> Any:
            if broken in keys and options["layers"][0] == 1:
                raise StorageError("the drive failed")
            return super().get_into(keys, *args, **options)

    results = batch(model, Failing(good.layout, {k: v for k, v in good.blocks.items() if k != gone}), front=0)
    for result, other in zip(results, expected, strict=True):
        same(result, other)
    assert [result.report.tokens_lost for result in results] == [0, 128, CHUNK, 0, 0]
    assert "the drive failed" in results[1].report.why
    assert "failed" not in results[0].report.why


def test_the_loads_of_a_batch_take_turns_layer_by_layer(model: Any) -> None:
    source = kept(model, PROMPTS)
    computed = [threading.Event() for _ in range(3)]

    def gate(layers: tuple[int, int]) -> None:
        # Layer n of nobody arrives before layer n - 1 of all was computed: whoever loads one request first never ends.
        if layers[0]:
            assert computed[layers[0] - 1].wait(WAIT)

    held = Held(source.layout, dict(source.blocks), gate=gate)
    hooks = [
        layer.register_forward_hook(lambda *_, number=number: computed[number].set())
        for number, layer in enumerate(model.model.layers)
    ]
    try:
        results = batch(model, held, front=0)
    finally:
        for hook in hooks:
            hook.remove()
    assert held.loaded == [(0, 1)] * 3 + [(1, 2)] * 3 + [(2, 3)] * 3
    for result, other in zip(results, batch(model, source, front=0), strict=True):
        same(result, other)


def test_tokens_left_out_and_attention_are_those_of_each_request() -> None:
    model = sharp(llama())
    blocks = DictNamespace(layout_of(model, BLOCK))
    prompts = [*PROMPTS, [5] * 40]
    with PrefillEngine(model, blocks, chunk_tokens=CHUNK, importance=True) as engine:
        alone = [engine.run(prompt) for prompt in prompts]
        assert all(engine.flush(result) for result in alone)
    with PrefillEngine(model, DictNamespace(blocks.layout), chunk_tokens=CHUNK, importance=True) as engine:
        together = engine.run_batch(prompts)
    for one, other in zip(alone[:2], together[:2], strict=True):  # the third found blocks of the first
        torch.testing.assert_close(one.report.importance, other.report.importance, atol=1e-4, rtol=1e-2)
    with PrefillEngine(model, blocks, chunk_tokens=CHUNK) as engine:
        alone = [engine.run(prompt, front=0, retain=0.3) for prompt in prompts]
    for one, other in zip(alone, batch(model, blocks, prompts, front=0, retain=0.3), strict=True):
        assert one.report.tokens_left_out == other.report.tokens_left_out
        torch.testing.assert_close(one.logits, other.logits, atol=1e-3, rtol=1e-3)
    assert alone[0].report.tokens_left_out > 0


def test_a_model_that_attends_by_itself_computes_them_one_by_one(model: Any) -> None:
    source = kept(model, PROMPTS)
    eager = type(model)._from_config(copy.deepcopy(model.config), attn_implementation="eager").eval()
    eager.load_state_dict(model.state_dict())
    assert packs(model)
    assert not packs(eager)
    with PrefillEngine(eager, source, chunk_tokens=CHUNK) as engine:
        for result, prompt in zip(engine.run_batch(BATCH, front=CHUNK), BATCH, strict=True):
            same(result, engine.run(prompt, front=CHUNK))


def test_a_model_with_attention_of_its_own_is_left_alone() -> None:
    """Falcon takes its code by the name of an attention that is in the registry, and does not call that."""
    falcon = build(
        transformers.FalconConfig(
            vocab_size=256,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            new_decoder_architecture=True,
            num_kv_heads=2,
        )
    )
    assert not packs(falcon)
    source = kept(falcon, PROMPTS)
    with PrefillEngine(falcon, source, chunk_tokens=CHUNK, importance=True) as engine:
        for result, prompt in zip(engine.run_batch(BATCH, front=CHUNK), BATCH, strict=True):
            same(result, engine.run(prompt, front=CHUNK))


def test_a_model_stays_watched_until_the_last_one_leaves(model: Any) -> None:
    base = model.config._attn_implementation
    with attending(model, []):
        first, second = attending(model, []), attending(model, [])
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert model.config._attn_implementation != base
        second.__exit__(None, None, None)
        assert model.config._attn_implementation != base
    assert model.config._attn_implementation == base


def test_each_goes_on_by_itself(model: Any) -> None:
    source = kept(model, PROMPTS)
    with PrefillEngine(model, source, chunk_tokens=CHUNK) as engine:
        results = engine.run_batch(BATCH, front=0)
        for result, prompt in zip(results, BATCH, strict=True):
            assert list(engine.generate(prompt, 20, after=result)) == list(engine.generate(prompt, 20))


def test_a_model_with_learned_positions_is_given_no_more_tokens_than_it_has() -> None:
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=256, n_positions=64)
    gpt2 = build(config)
    with PrefillEngine(gpt2, DictNamespace(layout_of(gpt2, BLOCK)), chunk_tokens=CHUNK) as engine:
        for call in (engine.run, lambda prompt: engine.run_batch([prompt])):
            with pytest.raises(ConfigError, match="64 positions"):
                call([1] * 65)
        tokens = engine.generate([1] * 62, 8)
        assert len([next(tokens), next(tokens), next(tokens)]) == 3
        with pytest.raises(ConfigError, match="64 positions"):
            next(tokens)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_model_whose_keys_change_with_the_length_is_given_no_more_tokens_than_have_the_same(kind: str) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        rope |= {"original_max_position_embeddings": 64, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    config = llama(max_position_embeddings=64 if kind == "dynamic" else 512, rope_parameters=rope)
    model = build(config)
    with PrefillEngine(model, DictNamespace(layout_of(model, BLOCK)), chunk_tokens=CHUNK) as engine:
        cold = engine.run(PROMPT[:64])
        torch.testing.assert_close(cold.logits, unsplit(model, PROMPT[:64]), atol=1e-4, rtol=1e-4)
        engine.flush(cold)
        same(engine.run(PROMPT[:64], front=0), cold)
        with pytest.raises(ConfigError, match="more than 64"):
            engine.run(PROMPT[:65])
        with pytest.raises(ConfigError, match="more than 64"):
            engine.step(1, cold.cache)
    check_positions(build(llama()), 1 << 20)  # of another model no more is asked


def test_a_batch_with_a_bad_prompt_computes_nothing(model: Any) -> None:
    blocks = DictNamespace(layout_of(model, BLOCK))
    with PrefillEngine(model, blocks, chunk_tokens=CHUNK) as engine:
        for bad in ("some text", {"input_ids": [1]}, [PROMPT, []], [PROMPT, [256]], [1, 2, 3], None):
            with pytest.raises(ConfigError):
                engine.run_batch(bad)  # type: ignore[arg-type]
    assert not blocks.blocks
    with pytest.raises(ClosedError):
        engine.run_batch([PROMPT])
    with pytest.raises(ClosedError):
        engine.run_batch([])
