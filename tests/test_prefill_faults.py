"""Prefills beside each other in every trouble at once: whatever fails, is late, is taken away or given up, the bits are those of a dict."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier import Dram, Hbm, Nvme, Store
from kvtier.errors import ClosedError, CorruptError, DeadlineError, FullError, StorageError
from kvtier.integrations.reference import DictNamespace
from kvtier.prefill import Prefill, PrefillEngine, layout_of, namespace
from kvtier.tiers import Copying, HostBackend
from test_prefill import CONFIGS, build
from test_prefill_engine import BLOCK, CHUNK, WAIT

FAULTS = (StorageError, DeadlineError, FullError, CorruptError)
POOL = 1 << 20
WORKERS, TURNS = 2, 5


def prompts(seed: int) -> list[list[int]]:
    """Some share whole chunks, none a part of one: blocks of a shorter chunk have bits of their own."""
    chance = random.Random(seed)
    shared = [chance.randrange(256) for _ in range(6 * CHUNK)]
    return [
        shared[: whole * CHUNK] + [chance.randrange(256) for _ in range(chance.randint(1, 70))]
        for whole in (0, 2, 4, 6, 6)
    ]


class Unsteady:
    """A namespace that fails now and then, is slow, or loses a block while it is read."""

    troubles = 0

    def __init__(self, blocks: Any, chance: random.Random, rate: float) -> None:
        self.blocks, self.chance, self.rate = blocks, chance, rate

    def __getattr__(self, name: str) -> Any:
        return getattr(self.blocks, name)

    def beside(self, name: str) -> Unsteady:
        return Unsteady(self.blocks.beside(name), self.chance, self.rate)

    def trouble(self) -> None:
        if self.chance.random() < self.rate:
            self.troubles += 1
            raise self.chance.choice(FAULTS)("in a test")

    def get_into(self, keys: Sequence[bytes], *args: Any, **options: Any) -> Any:
        self.trouble()
        if keys and self.chance.random() < self.rate:
            self.blocks.remove([self.chance.choice(keys)])
        return self.blocks.get_into(keys, *args, **options)

    def put_many(self, *args: Any, **options: Any) -> Any:
        self.trouble()
        return self.blocks.put_many(*args, **options)

    def contains(self, keys: Sequence[bytes]) -> Any:
        self.trouble()
        return self.blocks.contains(keys)

    def prefetch(self, *args: Any, **options: Any) -> Any:
        self.trouble()
        return self.blocks.prefetch(*args, **options)


class Shaky(HostBackend):
    """A device that refuses copies, and on which some come late: after their reader gave up."""

    def __init__(self, chance: random.Random, rate: float) -> None:
        super().__init__(POOL)
        self.chance, self.rate = chance, rate

    def trouble(self) -> None:
        if self.chance.random() < self.rate:
            raise StorageError("the device is broken")

    def copy_in(self, copies: Any, *, after: Copying | None = None) -> Copying:
        self.trouble()
        return super().copy_in(copies, after=after)

    def deliver(self, deliveries: Any, stream: Any = None) -> Copying:
        self.trouble()
        seconds = self.chance.random() * 0.03 if self.chance.random() < self.rate else 0.0

        class Late:
            def wait(self, timeout: float | None = None) -> bool:
                time.sleep(seconds)
                return True

        if seconds:
            behind: Any = Late()
            super().copy_in([], after=behind)
        return super().deliver(deliveries, stream)


class Expected:
    """What a dict gives: logits, KV, and what is generated."""

    def __init__(self, model: Any, tokens: list[int]) -> None:
        self.tokens = tokens
        with PrefillEngine(model, DictNamespace(layout_of(model, BLOCK)), chunk_tokens=CHUNK) as engine:
            result = engine.run(tokens)
            self.logits = result.logits
            self.kept = [(la.keys.clone(), la.values.clone()) for la in result.cache.layers]
            self.more = list(engine.generate(tokens, 2 * BLOCK, after=result))

    def check(self, result: Prefill) -> None:
        assert torch.equal(result.logits, self.logits)
        for layer, (keys, values) in zip(result.cache.layers, self.kept, strict=True):
            assert torch.equal(layer.keys, keys)
            assert torch.equal(layer.values, values)
        report, length = result.report, len(self.tokens)
        usable = min(report.tokens_matched, length - 1) // CHUNK * CHUNK
        assert report.tokens_reused + report.tokens_front + report.tokens_lost == usable


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_the_bits_are_those_of_a_dict(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    name, dtype = list(CONFIGS)[seed % 4], (torch.float32, torch.bfloat16)[seed // 4]
    model = build(CONFIGS[name](), dtype)
    all_expected = [Expected(model, tokens) for tokens in prompts(seed)]
    failures: list[BaseException] = []
    ending = threading.Event()

    def one(engine: PrefillEngine, mine: random.Random) -> None:
        expected = mine.choice(all_expected)
        ways: dict[str, Any] = {"front": mine.choice([None, 0, 0, CHUNK, 1000]), "overlap": mine.random() < 0.8}
        what = mine.choice(["run", "run", "submit", "generate", "retain"])
        if what == "run":
            expected.check(engine.run(expected.tokens, **ways))
        elif what == "submit":
            some = [mine.choice(all_expected) for _ in range(4)]
            futures = [engine.submit(each.tokens, **ways) for each in some]
            futures[mine.randrange(4)].cancel()
            for each, future in zip(some, futures, strict=True):
                try:
                    each.check(future.result(WAIT))
                except CancelledError:
                    assert future.cancelled()
        elif what == "generate":
            assert list(engine.generate(expected.tokens, 2 * BLOCK)) == expected.more
        else:
            assert engine.run(expected.tokens, retain=0.5, **ways).logits.isfinite().all()

    def work(engines: Sequence[PrefillEngine], number: int) -> None:
        mine = random.Random(seed * WORKERS + number)
        try:
            for _ in range(TURNS):
                one(mine.choice(engines), mine)
        except ClosedError as error:
            if not ending.is_set():
                failures.append(error)
        except BaseException as error:
            failures.append(error)

    for turn in range(2):  # and a restart
        device = Shaky(chance, 0.1)
        tiers = Hbm(POOL, backend=device), Dram("4MiB"), Nvme(tmp_path, "32MiB", emulate_gbs=0.02)
        with Store(*tiers) as store:
            engines = [
                PrefillEngine(
                    model,
                    Unsteady(namespace(store, model, codec=codec, weights=b"tests"), chance, 0.1),
                    chunk_tokens=CHUNK,
                    timeout=timeout,
                    importance=True,
                    backlog="1MiB",
                )
                for codec, timeout in ((None, 30.0), ("zstd", 0.01))
            ]
            threads = [threading.Thread(target=work, args=(engines, number)) for number in range(WORKERS)]
            for thread in threads:
                thread.start()
            if turn and seed % 2:  # the store is closed under them
                ending.set()
                store.close()
            for thread in threads:
                thread.join(WAIT)
                assert not thread.is_alive()
            for engine in engines:
                engine.close()
        assert turn or any(engine.blocks.troubles for engine in engines)  # type: ignore[attr-defined]
    if failures:
        raise failures[0]
