"""`kvtier.integrations.transformers.prefill` against models with random weights, over the plain-dict reference."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from kvtier.errors import ClosedError, ConfigError, DeadlineError, FullError, KvtierError, StorageError
from kvtier.integrations.reference import DictNamespace
from kvtier.integrations.transformers import forward, layout_of, namespace, prefill
from kvtier.layout import KVLayout

torch.set_num_threads(1)  # such small models gain nothing from two, and lose much beside other work

CHUNK, BLOCK = 32, 16
PROMPT = [int(t) for t in np.random.default_rng(7).integers(0, 256, 150)]


def llama(**changes: Any) -> Any:
    fields = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    return transformers.LlamaConfig(**(fields | changes))


def mistral() -> Any:
    return transformers.MistralConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=40,
        max_position_embeddings=512,
    )


def deepseek() -> Any:
    return transformers.DeepseekV3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=24,
        q_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        max_position_embeddings=512,
    )


def qwen() -> Any:
    """Norms of queries and keys, and heads of another size than the hidden one gives."""
    return transformers.Qwen3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=512,
    )


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "qwen": qwen,
    "mistral-sliding": mistral,
    "deepseek-mla": deepseek,
}


def build(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return build(llama())


def fresh(model: Any, block_tokens: int = BLOCK) -> DictNamespace:
    return DictNamespace(layout_of(model, block_tokens))


@torch.no_grad()
def unsplit(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=torch.tensor([tokens])).logits
    return logits[:, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_warm_run_is_bit_identical_and_close_to_an_unsplit_one(name: str, dtype: torch.dtype) -> None:
    model = build(CONFIGS[name](), dtype)
    store = fresh(model)
    cold = prefill(model, store, PROMPT, chunk_tokens=CHUNK)
    warm = prefill(model, store, PROMPT, chunk_tokens=CHUNK)
    assert cold.report.tokens_reused == 0
    assert cold.report.decision == "recompute"
    assert cold.report.blocks_stored == len(PROMPT) // BLOCK
    assert warm.report.tokens_reused == 128
    assert warm.report.decision == "load"
    assert warm.report.blocks_stored == 0
    assert torch.equal(warm.logits, cold.logits)
    for mine, other in zip(warm.cache.layers, cold.cache.layers, strict=True):
        assert torch.equal(mine.keys, other.keys)
        assert torch.equal(mine.values, other.values)
        assert mine.get_seq_length() == len(PROMPT)
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(warm.logits, unsplit(model, PROMPT), atol=tolerance, rtol=tolerance)


def test_the_report_adds_up(model: Any) -> None:
    store = fresh(model)
    prefill(model, store, PROMPT, chunk_tokens=CHUNK)
    report = prefill(model, store, PROMPT, chunk_tokens=CHUNK).report
    assert report.tokens == len(PROMPT)
    assert report.tokens_matched == len(PROMPT) // BLOCK * BLOCK
    assert report.bytes == {"dict": report.tokens_reused * store.layout.bytes_per_token}
    assert report.load_s.keys() == {"dict"}
    assert report.tokens_reused + report.tokens_front + report.tokens_lost == report.tokens_matched // CHUNK * CHUNK
    assert report.ttft_s >= report.compute_s + report.stalled_s > 0
    assert report.stalled_share == report.stalled_s / report.ttft_s
    assert str(report.tokens_reused) in report.why


def test_the_last_token_is_always_computed(model: Any) -> None:
    store = fresh(model)
    prompt = PROMPT[: 4 * CHUNK]
    cold = prefill(model, store, prompt, chunk_tokens=CHUNK)
    warm = prefill(model, store, prompt, chunk_tokens=CHUNK)
    assert warm.report.tokens_matched == 4 * CHUNK
    assert warm.report.tokens_reused == 3 * CHUNK
    assert torch.equal(warm.logits, cold.logits)


@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK, CHUNK, CHUNK + 1])
def test_short_prompts(model: Any, tokens: int) -> None:
    store, prompt = fresh(model), PROMPT[:tokens]
    cold = prefill(model, store, prompt, chunk_tokens=CHUNK)
    warm = prefill(model, store, prompt, chunk_tokens=CHUNK)
    assert torch.equal(warm.logits, cold.logits)
    assert warm.report.tokens_reused == (CHUNK if tokens > CHUNK else 0)
    torch.testing.assert_close(cold.logits, unsplit(model, prompt), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shared", [20, CHUNK, 70, 128])
def test_another_prompt_reuses_what_it_shares_and_no_more(model: Any, shared: int) -> None:
    other = PROMPT[:shared] + [(token + 1) % 256 for token in PROMPT[shared:]]
    store = fresh(model)
    prefill(model, store, PROMPT, chunk_tokens=CHUNK)
    warm = prefill(model, store, other, chunk_tokens=CHUNK)
    assert warm.report.tokens_reused == shared // CHUNK * CHUNK
    assert torch.equal(warm.logits, prefill(model, fresh(model), other, chunk_tokens=CHUNK).logits)


def test_the_cache_goes_on_generating_like_the_model_itself(model: Any) -> None:
    store = fresh(model)
    prefill(model, store, PROMPT, chunk_tokens=CHUNK)
    # Room for two more tokens only, so that the cache also has to move.
    warm = prefill(model, store, PROMPT, chunk_tokens=CHUNK, reserve_tokens=2)
    tokens, logits = list(PROMPT), warm.logits
    for _ in range(6):
        tokens.append(int(logits.argmax()))
        logits = forward(model, tokens[-1:], warm.cache)
        torch.testing.assert_close(logits, unsplit(model, tokens), atol=1e-4, rtol=1e-4)


def test_the_cache_can_be_cropped_and_reset(model: Any) -> None:
    cache = prefill(model, fresh(model), PROMPT, chunk_tokens=CHUNK).cache
    cache.crop(-10)
    torch.testing.assert_close(forward(model, PROMPT[-10:], cache), unsplit(model, PROMPT), atol=1e-4, rtol=1e-4)
    cache.reset()
    torch.testing.assert_close(forward(model, PROMPT, cache), unsplit(model, PROMPT), atol=1e-4, rtol=1e-4)


def test_the_cache_can_be_repeated_for_a_batch(model: Any) -> None:
    cache = prefill(model, fresh(model), PROMPT, chunk_tokens=CHUNK).cache
    cache.batch_repeat_interleave(2)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[5], [9]]), **{name: cache}).logits[:, -1]
    for row, token in zip(logits, (5, 9), strict=True):
        torch.testing.assert_close(row[None], unsplit(model, [*PROMPT, token]), atol=1e-4, rtol=1e-4)


@dataclass
class Failing(DictNamespace):
    """Fails for some blocks, from some layer on, as told: raises, or answers a miss after scribbling over the buffer."""

    bad: set[int] = field(default_factory=set)
    layer: int = 0
    error: KvtierError | None = None
    put_error: KvtierError | None = None

    def get_into(
        self,
        keys: Sequence[bytes],
        outs: Sequence[NDArray[np.uint8]],
        *,
        layers: tuple[int, int] | None = None,
        tokens: tuple[int, int] | None = None,
        timeout: float | None = None,
    ) -> Any:
        good = super().get_into(keys, outs, layers=layers, tokens=tokens, timeout=timeout)
        bad = [i for i, key in enumerate(keys) if self.chain(PROMPT).index(key) in self.bad]
        if not bad or (layers and layers[1] <= self.layer):
            return good
        for i in bad:
            outs[i][:] = 0xAB
            good[i] = SimpleNamespace(hit=False, tier=None, reason="checksum mismatch")
        if self.error:
            raise self.error
        return good

    def put_many(self, *args: Any, **kwargs: Any) -> Any:
        if self.put_error:
            raise self.put_error
        return super().put_many(*args, **kwargs)


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("error", [None, StorageError("the disk is gone"), DeadlineError("too late")])
@pytest.mark.parametrize("bad", [{0}, {3}, {2, 3, 7}, set(range(2, 9))])
def test_a_failed_load_is_recomputed_and_nothing_else(
    model: Any, bad: set[int], error: KvtierError | None, layer: int
) -> None:
    cold = prefill(model, good := fresh(model), PROMPT, chunk_tokens=CHUNK)
    store = Failing(good.layout, dict(good.blocks), bad=bad, layer=layer, error=error)
    warm = prefill(model, store, PROMPT, chunk_tokens=CHUNK)
    assert torch.equal(warm.logits, cold.logits)
    # An error says nothing of the other blocks; a miss is a block's own.
    chunks = {block * BLOCK // CHUNK for block in bad if block < 8} if error is None else set(range(4))
    assert warm.report.tokens_lost == CHUNK * len(chunks)
    assert warm.report.tokens_reused == 128 - warm.report.tokens_lost
    assert (str(error) if error else "checksum mismatch") in warm.report.why
    for mine, other in zip(warm.cache.layers, cold.cache.layers, strict=True):
        assert torch.equal(mine.keys, other.keys)
        assert torch.equal(mine.values, other.values)


def test_a_store_that_is_full_fails_no_request(model: Any) -> None:
    cold = prefill(model, fresh(model), PROMPT, chunk_tokens=CHUNK)
    store = Failing(layout_of(model, BLOCK), put_error=FullError("no room"))
    full = prefill(model, store, PROMPT, chunk_tokens=CHUNK)
    assert torch.equal(full.logits, cold.logits)
    assert (full.report.blocks_stored, full.report.blocks_refused) == (0, len(PROMPT) // BLOCK)


def test_a_closed_store_is_an_error(model: Any) -> None:
    store = Failing(layout_of(model, BLOCK), put_error=ClosedError("closed"))
    with pytest.raises(ClosedError):
        prefill(model, store, PROMPT, chunk_tokens=CHUNK)


@pytest.mark.parametrize("tokens", [PROMPT, torch.tensor(PROMPT), torch.tensor([PROMPT]), tuple(PROMPT)])
def test_prompts_of_every_kind(model: Any, tokens: Any) -> None:
    expected = prefill(model, fresh(model), PROMPT, chunk_tokens=CHUNK).logits
    assert torch.equal(prefill(model, fresh(model), tokens, chunk_tokens=CHUNK).logits, expected)


@pytest.mark.parametrize("tokens", [[], torch.zeros(2, 5, dtype=torch.long), torch.zeros(5)])
def test_bad_prompts_are_refused(model: Any, tokens: Any) -> None:
    with pytest.raises(ConfigError, match="input_ids"):
        prefill(model, fresh(model), tokens, chunk_tokens=CHUNK)


@pytest.mark.parametrize("chunk", [0, -16, 2.5])
def test_a_grid_of_no_tokens_is_refused(model: Any, chunk: Any) -> None:
    with pytest.raises(ConfigError, match=f"chunk_tokens={chunk} .*at least 1"):
        prefill(model, fresh(model), PROMPT, chunk_tokens=chunk)


@pytest.mark.parametrize("chunk", [8, 24, 33])
def test_a_grid_that_blocks_do_not_fill_is_refused(model: Any, chunk: int) -> None:
    with pytest.raises(ConfigError, match=f"chunk_tokens={chunk} .*block_tokens=16"):
        prefill(model, fresh(model), PROMPT, chunk_tokens=chunk)


@pytest.mark.parametrize(
    "layout",
    [KVLayout(3, "gqa", 2, 16, dtype="bf16"), KVLayout(3, "gqa", 4, 16, dtype="fp32"), KVLayout.opaque()],
    ids=["dtype", "heads", "opaque"],
)
def test_another_models_layout_is_refused(model: Any, layout: KVLayout) -> None:
    with pytest.raises(ConfigError, match="this model keeps"):
        prefill(model, DictNamespace(layout), PROMPT, chunk_tokens=CHUNK)


def test_a_stores_namespace_is_made_from_the_models_content(model: Any) -> None:
    seen: list[bytes] = []

    class OneStore:
        def namespace(self, identity: Any, layout: KVLayout, codec: str | None, quota: int | None) -> DictNamespace:
            seen.append(identity.to_bytes(layout))
            return DictNamespace(layout)

    prefill(model, OneStore(), PROMPT, chunk_tokens=CHUNK)
    namespace(OneStore(), model)
    changed = build(llama())
    with torch.no_grad():
        changed.lm_head.weight[0, 0] += 1
    namespace(OneStore(), changed)
    namespace(OneStore(), build(llama(rope_parameters={"rope_type": "default", "rope_theta": 5e5})))
    namespace(OneStore(), build(llama(), torch.bfloat16))
    assert seen[0] == seen[1]
    assert len(set(seen)) == 4
