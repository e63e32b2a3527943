"""Several requests in flight, and what is generated behind them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvtier import Dram, Nvme, Store
from kvtier.errors import ClosedError, ConfigError
from kvtier.integrations.reference import DictNamespace
from kvtier.prefill import PrefillEngine, layout_of, namespace
from kvtier.prefill.ahead import Lookahead
from kvtier.prefill.model import cache_argument
from test_prefill import CONFIGS, build, llama, unsplit
from test_prefill_engine import BLOCK, CHUNK, PROMPT, WAIT, after_layers, same


@pytest.fixture(scope="module")
def model() -> Any:
    return build(llama())


def others(count: int) -> list[list[int]]:
    return [[(token + i) % 256 for token in PROMPT] for i in range(1, count + 1)]


@dataclass
class Fetched:
    keys: Sequence[bytes]
    cancelled: bool = False

    def cancel(self) -> bool:
        self.cancelled = True
        return True


@dataclass
class Recording(DictNamespace):
    jobs: list[Fetched] = field(default_factory=list)

    def prefetch(self, keys: Sequence[bytes], **options: Any) -> Any:
        self.jobs.append(Fetched(keys))
        return self.jobs[-1]


def test_what_waits_is_fetched_in_order_and_within_the_budget(model: Any) -> None:
    blocks = Recording(layout_of(model, BLOCK))
    size = blocks.layout.block_bytes
    prompts = [blocks.chain(tokens) for tokens in others(4)]
    for keys in prompts:
        blocks.blocks |= dict.fromkeys(keys, b"")
    each = len(prompts[0])
    ahead = Lookahead(blocks, (2 * each + 3) * size, None)
    for number, keys in enumerate(prompts):
        ahead.add(number, keys)
    assert [job.keys for job in blocks.jobs] == [prompts[0], prompts[1], prompts[2][:3]]
    ahead.take(0)
    assert blocks.jobs[0].cancelled
    assert blocks.jobs[3].keys == prompts[3]
    for number in (1, 2, 3, 3):
        ahead.take(number)
    ahead.add(4, prompts[0] + prompts[1] + prompts[2])  # all of the budget is there again
    assert len(blocks.jobs[-1].keys) == 2 * each + 3


def test_waiting_requests_are_fetched_while_one_runs(model: Any) -> None:
    blocks = Recording(layout_of(model, BLOCK))
    prompts = [PROMPT, *others(3)]
    with PrefillEngine(model, blocks, chunk_tokens=CHUNK) as engine:
        expected = [engine.run(tokens) for tokens in prompts]
        for result in expected:
            engine.flush(result)
        go = threading.Event()
        with after_layers(model, lambda _: go.wait(WAIT) and None):
            futures = [engine.submit(tokens, front=0) for tokens in prompts]
            # The first one is still in the model.
            assert [job.keys for job in blocks.jobs[-3:]] == [blocks.chain(tokens) for tokens in prompts[1:]]
            assert not futures[0].done()
            go.set()
            results = [future.result(WAIT) for future in futures]
    for result, other in zip(results, expected, strict=True):
        same(result, other)
        assert result.report.tokens_reused == 192
    assert all(job.cancelled for job in blocks.jobs)


def test_a_request_that_is_taken_back_gives_its_share_of_the_lookahead_back(model: Any) -> None:
    blocks = Recording(layout_of(model, BLOCK))
    prompts = [PROMPT, *others(2)]
    keys = [blocks.chain(tokens) for tokens in prompts]
    for chain in keys[1:]:
        blocks.blocks |= dict.fromkeys(chain, b"")
    go = threading.Event()
    with PrefillEngine(model, blocks, chunk_tokens=CHUNK) as engine:
        engine._ahead = Lookahead(blocks, len(keys[1]) * blocks.layout.block_bytes, None)
        with after_layers(model, lambda _: go.wait(WAIT) and None):
            futures = [engine.submit(tokens, front=len(tokens)) for tokens in prompts]
            assert [job.keys for job in blocks.jobs] == [keys[1]]
            assert futures[1].cancel()
            assert blocks.jobs[0].cancelled
            assert [job.keys for job in blocks.jobs] == keys[1:]
            go.set()
            futures[2].result(WAIT)


def test_a_store_that_refuses_a_fetch_ahead_refuses_nothing_else(model: Any) -> None:
    class Closing(Recording):
        refuses = ""

        def match(self, keys: Sequence[bytes]) -> Any:
            if self.refuses == "match":
                raise ClosedError("the store is closed")
            return super().match(keys)

        def prefetch(self, keys: Sequence[bytes], **options: Any) -> Any:
            if self.refuses == "prefetch":
                raise ClosedError("the store is closed")
            return super().prefetch(keys, **options)

    blocks = Closing(layout_of(model, BLOCK))
    prompts = [blocks.chain(tokens) for tokens in others(2)]
    for keys in prompts:
        blocks.blocks |= dict.fromkeys(keys, b"")
    ahead = Lookahead(blocks, len(prompts[0]) * blocks.layout.block_bytes, None)
    for blocks.refuses in ("match", "prefetch"):
        ahead.add(0, prompts[0])
        ahead.take(0)
    blocks.refuses = ""
    ahead.add(1, prompts[1])
    assert [job.keys for job in blocks.jobs] == [prompts[1]]  # and all of the budget is there
    ahead.close()


def test_requests_that_were_fetched_ahead_find_their_blocks_in_memory(model: Any, tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    prompts = others(3)
    expected = []
    for fresh in (True, False):
        with Store(Dram("16MiB"), Nvme(tmp_path / "nvme", "64MiB")) as store:
            blocks = namespace(store, model, weights=b"tests")
            with PrefillEngine(model, blocks, chunk_tokens=CHUNK) as engine:
                if fresh:
                    expected = [engine.run(tokens) for tokens in prompts]
                    continue
                ahead = Lookahead(blocks, 1 << 30, None)
                keys = blocks.chain(prompts[0])
                ahead.add(0, keys)
                assert blocks.prefetch(keys).wait(WAIT)  # joins the one that is under way
                ahead.take(0)
                assert set(blocks.match(keys).tiers) == {"dram"}
                results = [future.result(WAIT) for future in [engine.submit(tokens, front=0) for tokens in prompts]]
                assert set(results[0].report.bytes) == {"dram"}
                for result, other in zip(results, expected, strict=True):
                    same(result, other)


@contextmanager
def engine_over(model: Any, place: Path) -> Iterator[PrefillEngine]:
    """An engine over a store that finds what the last one left."""
    with (
        Store(Dram("8MiB"), Nvme(place / "nvme", "64MiB")) as store,
        PrefillEngine(model, namespace(store, model, weights=b"tests"), chunk_tokens=CHUNK) as engine,
    ):
        yield engine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_generated_blocks_are_stored_and_continue_with_the_same_bits(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Turn after turn, KV made by decoding is reused; a dict with the same KV gives the same logits."""
    model = build(CONFIGS[name](), dtype)
    (tmp_path / "nvme").mkdir()
    turns = [[7] * 21, [9] * 30]
    ends = []

    def told(engine: PrefillEngine, tokens: list[int]) -> list[int]:
        """40 tokens more, once all that they left behind is stored: else the next run may compute it first."""
        result = engine.run(tokens)
        more = list(engine.generate(tokens, 40, after=result))
        assert engine.keep([*tokens, *more], result.cache).wait(WAIT)
        return more

    reference = DictNamespace(layout_of(model, BLOCK))
    for kind in ("dict", "store"):
        tokens = PROMPT[:100]
        if kind == "dict":
            with PrefillEngine(model, reference, chunk_tokens=CHUNK) as engine:
                for turn in turns:
                    tokens += [*told(engine, tokens), *turn]
                    engine.keep(tokens, engine.run(tokens, front=0).cache).wait()
                ends.append((tokens, engine.run(tokens, front=0)))
            continue
        for turn in turns:  # a restart between any two turns
            with engine_over(model, tmp_path) as engine:
                tokens += [*told(engine, tokens), *turn]
                engine.keep(tokens, engine.run(tokens, front=0).cache).wait()
        with engine_over(model, tmp_path) as engine:
            ends.append((tokens, engine.run(tokens, front=0)))
    assert ends[0][0] == ends[1][0]
    same(ends[0][1], ends[1][1])
    assert ends[1][1].report.tokens_reused == (len(ends[1][0]) - 1) // CHUNK * CHUNK
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(ends[1][1].logits, unsplit(model, ends[1][0]), atol=tolerance, rtol=tolerance)


def test_stopping_ends_it_and_keeps_what_there_is(model: Any) -> None:
    blocks = DictNamespace(layout_of(model, BLOCK))
    with PrefillEngine(model, blocks, chunk_tokens=CHUNK) as engine:
        all_of_them = list(engine.generate(PROMPT, 40))
        assert len(all_of_them) == 40
        stop = next(token for token in all_of_them[20:] if token not in all_of_them[:20])
        assert list(engine.generate(PROMPT, 40, stop={stop})) == all_of_them[: all_of_them.index(stop)]
        assert list(engine.generate(PROMPT, 3, pick=lambda logits: int(logits.argmin()))) != all_of_them[:3]
        some = engine.generate(PROMPT[::-1], 40)
        first = [next(some) for _ in range(20)]
        some.close()
    assert all(blocks.contains(blocks.chain(PROMPT + all_of_them)))
    assert all(blocks.contains(blocks.chain((PROMPT[::-1] + first)[:-1])))


def test_the_cache_goes_into_generate_of_transformers(model: Any) -> None:
    blocks = DictNamespace(layout_of(model, BLOCK))
    with PrefillEngine(model, blocks, chunk_tokens=CHUNK) as engine:
        ours = list(engine.generate(PROMPT, 12))
        result = engine.run(PROMPT)
        cache = result.cache
        cache.crop(-1)  # generate() computes the last token itself
        options: dict[str, Any] = {cache_argument(model): cache}
        ids = model.generate(
            torch.tensor([PROMPT]),
            generation_config=transformers.GenerationConfig(max_new_tokens=12, do_sample=False),
            **options,
        )
        tokens = ids[0].tolist()
        assert tokens == PROMPT + ours
        assert engine.flush(result)  # and what came before it: nothing is stored any more
        blocks.blocks.clear()
        kept = engine.keep(tokens, cache)
        assert kept.wait(WAIT)
        assert kept.blocks_stored == (len(tokens) - 1) // BLOCK


def test_a_cache_that_is_no_whole_sequence_is_refused(model: Any) -> None:
    with PrefillEngine(model, DictNamespace(layout_of(model, BLOCK)), chunk_tokens=CHUNK) as engine:
        cache = engine.run(PROMPT).cache
        cache.batch_repeat_interleave(2)
        with pytest.raises(ConfigError, match="one whole sequence"):
            engine.keep(PROMPT, cache)
        with pytest.raises(ConfigError, match="one whole sequence"):
            engine.keep(PROMPT, transformers.DynamicCache())


def test_a_cache_of_other_tokens_is_not_generated_behind(model: Any) -> None:
    blocks = DictNamespace(layout_of(model, BLOCK))
    with PrefillEngine(model, blocks, chunk_tokens=CHUNK) as engine:
        result = engine.run(PROMPT)
        engine.flush(result)
        with pytest.raises(ConfigError, match="the prompt has 50"):
            next(engine.generate(PROMPT[:50], 20, after=result))
        assert len(list(engine.generate(PROMPT, 20, after=result))) == 20
        with pytest.raises(ConfigError, match="nothing was generated"):
            next(engine.generate(PROMPT, 20, after=result, pick=lambda _: 3))
        with pytest.raises(ConfigError, match="max_new_tokens"):
            next(engine.generate(PROMPT, -1))


@pytest.mark.parametrize("verb", ["run", "run_batch", "submit"])
def test_what_is_asked_for_while_the_engine_is_closed_is_refused(model: Any, verb: str) -> None:
    class Closing(DictNamespace):
        """Somebody closes the engine while a prompt's keys are made."""

        def chain(self, token_ids: Sequence[int], extras: None = None) -> list[bytes]:
            engine.close()
            return super().chain(token_ids, extras)

    engine = PrefillEngine(model, Closing(layout_of(model, BLOCK)), chunk_tokens=CHUNK)
    with pytest.raises(ClosedError, match="the engine is closed"):
        getattr(engine, verb)([PROMPT] if verb == "run_batch" else PROMPT)
