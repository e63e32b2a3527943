"""Attention mass, sampled during a prefill, against all of it."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from kvtier import Dram, Store
from kvtier.integrations.reference import DictNamespace
from kvtier.prefill import PrefillEngine, layout_of, namespace
from kvtier.prefill.importance import SINKS, AttentionMass, block_scores
from kvtier.prefill.registry import Member, attending
from test_prefill import CONFIGS, build, llama
from test_prefill_engine import BLOCK, CHUNK, PROMPT, same


@torch.no_grad()
def full(model: Any, tokens: list[int]) -> torch.Tensor:
    """The mean weight that each token gets from the queries that see it, over heads and layers, by ``output_attentions``."""
    config = copy.deepcopy(model.config)  # which it changes
    eager = type(model)._from_config(config, attn_implementation="eager").to(model.dtype).eval()
    eager.load_state_dict(model.state_dict())
    weights = torch.stack(eager(input_ids=torch.tensor([tokens]), output_attentions=True).attentions)[:, 0]
    seen = (weights > 0).any(1).sum((0, 1))  # queries of all layers that see it
    mass: torch.Tensor = weights.mean(1).sum((0, 1)) / seen
    return mass


def rank_correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    ranks = [torch.argsort(torch.argsort(values)).numpy() for values in (one, other)]
    return float(np.corrcoef(*ranks)[0, 1])


@pytest.mark.parametrize("name", CONFIGS)
def test_with_every_query_it_is_the_attention_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(CONFIGS[name]())
    monkeypatch.setattr("kvtier.prefill.request.AttentionMass", lambda tokens, **_: AttentionMass(tokens, None))
    with PrefillEngine(model, DictNamespace(layout_of(model, BLOCK)), chunk_tokens=CHUNK, importance=True) as engine:
        found = engine.run(PROMPT).report.importance
    torch.testing.assert_close(found, full(model, PROMPT), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("name", [name for name in CONFIGS if "sliding" not in name])
def test_sampling_ranks_tokens_as_all_queries_do(name: str) -> None:
    model = build(CONFIGS[name]())
    with torch.no_grad():  # as sharp as a trained model's, or all tokens would weigh the same
        for parameter_name, parameter in model.named_parameters():
            if any(part in parameter_name for part in ("q_proj", "k_proj", "q_b_proj", "kv_b_proj")):
                parameter.mul_(6)
    with PrefillEngine(model, DictNamespace(layout_of(model, BLOCK)), chunk_tokens=CHUNK, importance=True) as engine:
        found = engine.run(PROMPT).report.importance
    assert found is not None
    assert rank_correlation(found, full(model, PROMPT)) >= 0.9


@pytest.mark.parametrize("window", [None, 100], ids=["full", "sliding"])
def test_each_layer_looks_elsewhere(window: int | None) -> None:
    """Layers that attend alike, as a trained model's do, tell more where each of them looks at other queries."""
    layers, heads, groups, chunk, width, tokens = 30, 2, 3, 64, 16, 256
    random = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    shared = normal(1, heads * groups, tokens, width), normal(1, heads, tokens, width)
    sampled, same_everywhere, every = (AttentionMass(tokens, queries) for queries in (16, 16, None))
    for layer in range(layers):
        query, key = (tensor + 0.5 * normal(*tensor.shape) for tensor in shared)
        for start in range(0, tokens, chunk):
            part = query[:, :, start : start + chunk], key[:, :, : start + chunk], None, width**-0.5, window
            sampled.look(layer, *part)
            same_everywhere.look(0, *part)
            every.look(layer, *part)
    best, worse = (1 - rank_correlation(mass.scores(), every.scores()) for mass in (sampled, same_everywhere))
    assert best <= 0.1
    assert worse >= 2 * best


def test_looking_changes_no_bit_and_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(llama())
    implementation = model.config._attn_implementation
    with PrefillEngine(model, DictNamespace(layout_of(model, BLOCK)), chunk_tokens=CHUNK) as engine:
        plain = engine.run(PROMPT)
    with PrefillEngine(model, DictNamespace(layout_of(model, BLOCK)), chunk_tokens=CHUNK, importance=True) as engine:
        watched = engine.run(PROMPT)
        engine.flush(watched)
        warm = engine.run(PROMPT, front=0)
    same(plain, watched)
    same(plain, warm)
    assert plain.report.importance is None
    assert warm.report.importance is not None
    assert model.config._attn_implementation == implementation

    def broken(*args: Any, **options: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(model.model.layers[1].mlp, "forward", broken)
    with pytest.raises(RuntimeError, match="broken"), attending(model, [Member(look=AttentionMass(8).look)]):
        model(input_ids=torch.tensor([[1, 2]]))
    assert model.config._attn_implementation == implementation


def test_a_model_that_is_watched_already_is_counted_once() -> None:
    model, ids = build(llama()), torch.tensor([PROMPT])
    alone, within = AttentionMass(len(PROMPT)), AttentionMass(len(PROMPT))
    with attending(model, [Member(look=alone.look)]):
        model(input_ids=ids)
    with attending(model, [Member(look=AttentionMass(len(PROMPT)).look)]), attending(model, [Member(look=within.look)]):
        model(input_ids=ids)
    assert torch.equal(within.seen, alone.seen)
    assert torch.equal(within.mass, alone.mass)


def test_blocks_get_their_scores_and_sinks_the_highest() -> None:
    model = build(llama())
    blocks = DictNamespace(layout_of(model, BLOCK))
    with PrefillEngine(model, blocks, chunk_tokens=CHUNK, importance=True) as engine:
        result = engine.run(PROMPT)
        engine.flush(result)
        scores = result.report.importance
        assert result.report.blocks_stored == len(blocks.blocks)
        assert sum(event.bytes for event in result.report.stored.events) == sum(map(len, blocks.blocks.values()))
    assert scores is not None
    keys = blocks.chain(PROMPT)
    assert set(blocks.importance) == set(keys)
    given = [blocks.importance[key] for key in keys]
    means = scores[: len(keys) * BLOCK].view(-1, BLOCK).mean(1).tolist()
    assert given[1:] == pytest.approx(means[1:])
    assert given[0] == max(given)
    with (
        Store(Dram("16MiB")) as store,
        PrefillEngine(model, namespace(store, model, weights=b"tests"), chunk_tokens=CHUNK, importance=True) as engine,
    ):
        assert engine.flush(engine.run(PROMPT))  # a store takes them too


def test_small_blocks_with_sinks_are_all_protected() -> None:
    assert block_scores(torch.tensor([0.0, 1, 0, 0, 5, 5, 2, 2]), 0, 4, 2) == [5, 5, 5, 2]
    assert block_scores(torch.tensor([0.0, 1, 0, 0, 5, 5, 2, 2]), 2, 2, 2) == [5, 2]
    assert SINKS == 4


def test_attention_outside_of_the_registry_is_left_alone() -> None:
    model = build(llama())
    model.config._attn_implementation = "eager"
    mass = AttentionMass(16)
    with attending(model, [Member(look=mass.look)]), torch.no_grad():
        model(input_ids=torch.tensor([[1, 2, 3]]))
    assert not mass.seen.any()
    assert isinstance(model, transformers.PreTrainedModel)
