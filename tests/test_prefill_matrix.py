"""Every family of models and both dtypes, over every tier and in every trouble: the bits of the very same KV in a dict. INV 1."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier import Cxl, Dram, Hbm, Nvme, Store, codecs
from kvtier.integrations.reference import DictNamespace
from kvtier.layout import KVLayout
from kvtier.prefill import Prefill, PrefillEngine, layout_of, namespace
from test_prefill import CONFIGS, Failing, build, llama
from test_prefill import PROMPT as SHORT
from test_prefill_engine import BLOCK, CHUNK, PROMPT, WAIT, after_layers, same

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PROMPTS = [PROMPT, [(token + 1) % 256 for token in PROMPT], [*PROMPT[:100], *([9] * 80)]]
WAYS: list[dict[str, Any]] = [{"front": 0, "overlap": False}, {"front": 0}, {"front": CHUNK}]


@pytest.fixture(scope="module", params=[(name, dtype) for name in CONFIGS for dtype in DTYPES], ids="-".join)
def stored(request: pytest.FixtureRequest) -> tuple[Any, DictNamespace]:
    """A model, and the KV of the prompts."""
    name, dtype = request.param
    model = build(CONFIGS[name](), DTYPES[dtype])
    return model, kept(model, PROMPTS)


def kept(model: Any, prompts: list[list[int]]) -> DictNamespace:
    blocks = DictNamespace(layout_of(model, BLOCK))
    with PrefillEngine(model, blocks, chunk_tokens=CHUNK) as engine:
        for prompt in prompts:
            assert engine.flush(engine.run(prompt))
    return blocks


def copied(source: DictNamespace, to: Any, prompt: list[int]) -> list[bytes]:
    """Put a prompt's blocks into another namespace, whose keys are its own."""
    ours, theirs = source.chain(prompt), to.chain(prompt)
    results = to.put_many(theirs, [source.get(key) for key in ours], parents=[None, *theirs[:-1]])
    assert all(result.stored or result.present for result in results)
    return theirs


def runs(model: Any, blocks: Any, ways: list[dict[str, Any]]) -> list[Prefill]:
    with PrefillEngine(model, blocks, chunk_tokens=CHUNK) as engine:
        return [engine.run(PROMPT, **way) for way in ways]


@contextmanager
def over(kind: str, place: Path, model: Any, source: DictNamespace) -> Iterator[Any]:
    """A namespace that has the prompt's blocks in one tier."""
    tiers: dict[str, tuple[Any, ...]] = {
        "hbm": (Hbm("8MiB", backend="host"), Dram("16MiB")),
        "dram": (Dram("16MiB"),),
        "cxl": (Dram("1MiB"), Cxl("32MiB", path=place / "cxl")),
    }
    (place / "cxl").write_bytes(bytes(32 << 20))
    with Store(*tiers[kind], policy="lru-leaf") as store:
        blocks = namespace(store, model, weights=b"tests")
        keys = copied(source, blocks, PROMPT)
        if kind == "hbm":
            assert all(result.hit for result in blocks.prefetch(keys, to="hbm").result())
        for number in range(40 if kind == "cxl" else 0):  # push them down with others
            store.put(number.to_bytes(32, "little"), bytes(64 << 10))
        yield blocks


@pytest.mark.parametrize("kind", ["hbm", "dram", "cxl"])
def test_every_tier_in_memory(stored: tuple[Any, DictNamespace], kind: str, tmp_path: Path) -> None:
    model, source = stored
    with over(kind, tmp_path, model, source) as blocks:
        for result, other in zip(runs(model, blocks, WAYS), runs(model, source, WAYS), strict=True):
            same(result, other)
            assert result.report.tokens_reused == other.report.tokens_reused
            assert set(result.report.bytes) <= ({kind} if kind == "hbm" else {"dram", "cxl"})
            assert kind == "dram" or kind in result.report.bytes


def test_several_requests_after_a_restart(stored: tuple[Any, DictNamespace], tmp_path: Path) -> None:
    model, source = stored
    with PrefillEngine(model, source, chunk_tokens=CHUNK) as engine:
        expected = [future.result(WAIT) for future in [engine.submit(prompt, front=0) for prompt in PROMPTS]]
    tiers = Dram("8MiB"), Nvme(tmp_path, "64MiB")
    with Store(*tiers) as store:
        for prompt in PROMPTS:
            copied(source, namespace(store, model, weights=b"tests"), prompt)
    with (
        Store(*tiers) as store,
        PrefillEngine(model, namespace(store, model, weights=b"tests"), chunk_tokens=CHUNK) as engine,
    ):
        results = [future.result(WAIT) for future in [engine.submit(prompt, front=0) for prompt in PROMPTS]]
    for result, other in zip(results, expected, strict=True):
        same(result, other)
        assert result.report.tokens_reused == other.report.tokens_reused > 0


def test_a_load_that_fails_midway(stored: tuple[Any, DictNamespace]) -> None:
    model, _ = stored
    good = kept(model, [SHORT])
    failing = Failing(good.layout, good.blocks, bad={2, 3, 7}, layer=1)
    with PrefillEngine(model, good, chunk_tokens=CHUNK) as engine:
        expected = engine.run(SHORT, front=0)
    for front in (0, CHUNK):
        with PrefillEngine(model, failing, chunk_tokens=CHUNK) as engine:
            result = engine.run(SHORT, front=front)
        same(result, expected)
        assert result.report.tokens_lost == 2 * CHUNK


@pytest.mark.parametrize("codec", codecs.NAMES)
def test_what_a_codec_gives_back_is_computed_with_like_anything_else(codec: str, tmp_path: Path) -> None:
    """After a restart every block is decoded on its way up; the same decoded bytes in a dict give the same bits."""
    model = build(llama())
    tiers = Dram("8MiB"), Nvme(tmp_path, "64MiB")
    layout: KVLayout = layout_of(model, BLOCK)

    def engine_over(store: Store) -> PrefillEngine:
        return PrefillEngine(model, store.namespace(b"tests", layout, codec=codec), chunk_tokens=CHUNK)

    with Store(*tiers) as store, engine_over(store) as engine:
        cold = engine.run(PROMPT)
        engine.flush(cold)
    decoded = DictNamespace(layout)
    with Store(*tiers) as store:
        blocks = store.namespace(b"tests", layout, codec=codec)
        for mine, theirs in zip(decoded.chain(PROMPT), blocks.chain(PROMPT), strict=True):
            block = blocks.get(theirs)
            assert block is not None
            decoded.blocks[mine] = block.tobytes()
    expected = runs(model, decoded, WAYS)
    for way, other in zip(WAYS, expected, strict=True):
        with Store(*tiers) as store, engine_over(store) as engine:
            result = engine.run(PROMPT, **way)
        same(result, other)
        assert set(result.report.bytes) == {"nvme"}
        exact, told = (torch.log_softmax(logits.double(), -1) for logits in (cold.logits, result.logits))
        divergence = float((exact.exp() * (exact - told)).sum())
        assert divergence == 0 if codec not in codecs.LOSSY else 0 < divergence < 1e-3


def test_a_layer_is_decoded_once_the_one_before_it_was_computed(tmp_path: Path) -> None:
    """So what is decoded on its way up waits for nothing but its own layer, and neither does the model."""
    model, block = build(llama()), 128  # segments of a layer each
    prompt, tiers = (PROMPT * 3)[: 3 * block + 18], (Dram("8MiB"), Nvme(tmp_path, "64MiB"))
    computed = [threading.Event() for _ in range(3)]

    class Gated:
        """Layer n is read and decoded when layer n - 1 has been computed."""

        def __init__(self, blocks: Any) -> None:
            self.blocks = blocks

        def __getattr__(self, name: str) -> Any:
            return getattr(self.blocks, name)

        def get_into(self, keys: Sequence[bytes], outs: Any, *, layers: tuple[int, int], **options: Any) -> Any:
            assert not layers[0] or computed[layers[0] - 1].wait(WAIT)
            return self.blocks.get_into(keys, outs, layers=layers, **options)

    results = []
    for wrap in (lambda blocks: blocks, lambda blocks: blocks, Gated):
        with Store(*tiers) as store:
            blocks = wrap(namespace(store, model, block_tokens=block, codec="int8", weights=b"tests"))
            with (
                PrefillEngine(model, blocks, chunk_tokens=block) as engine,
                after_layers(model, lambda number: computed[number].set()),
            ):
                for event in computed:
                    event.clear()
                results.append(engine.run(prompt, front=0))
    _, serial, overlapped = results
    same(overlapped, serial)
    assert overlapped.report.bytes == {"nvme": 3 * block * layout_of(model).bytes_per_token}
    assert not torch.equal(serial.logits, results[0].logits)  # what is lossy lost something
