"""The prefill loop over an HBM tier on the model's device, for which the host's own stands in: blocks are handed over there."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier import Dram, Hbm, Nvme, Store
from kvtier.errors import StorageError
from kvtier.integrations.reference import DictNamespace
from kvtier.prefill import Prefill, PrefillEngine, layout_of, namespace
from kvtier.prefill.ahead import Lookahead
from kvtier.prefill.attended import Attended, most_attended
from kvtier.prefill.loading import is_device_of
from kvtier.tiers import Copying, Delivery, HostBackend
from kvtier.tiers.cuda import missing
from test_prefill import CONFIGS, build, llama
from test_prefill_engine import BLOCK, CACHED, CHUNK, PROMPT, WAIT, after_layers, same
from test_prefill_queue import Recording, others
from test_retain import sharp

SIZE = 8 << 20
MODELS = [("cpu", "llama", torch.float32)]
"""Where models compute, and which: `test_prefill_matrix` has all of them on the host."""
if not missing() and torch.cuda.is_available():  # `scripts/gpu_check.sh`; where no GPU is, its tests do not exist
    MODELS += [("cuda", name, dtype) for name in CONFIGS for dtype in (torch.float32, torch.bfloat16)]


class Device(HostBackend):
    """Counts what is handed over out of its pool, and fails if the test says so."""

    def __init__(self) -> None:
        super().__init__(SIZE)
        self.handed = 0
        self.broken = False

    def deliver(self, deliveries: Sequence[Delivery], stream: Any = None) -> Copying:
        if self.broken:
            raise StorageError("the device is broken")
        pool = self.view(0, SIZE).ctypes.data
        self.handed += sum(d.target.nbytes for d in deliveries if pool <= d.source.ctypes.data < pool + SIZE)
        return super().deliver(deliveries, stream)


@pytest.fixture(scope="module")
def model() -> Any:
    return build(llama())


@contextmanager
def over(model: Any, device: HostBackend, up: int | None = None, **options: Any) -> Iterator[tuple[Any, Prefill]]:
    """A namespace with the prompt's blocks, ``up`` of them in HBM, and the cold run."""
    with Store(Hbm(SIZE, backend=device), Dram("16MiB")) as store:
        blocks = namespace(store, model, weights=b"tests")
        with PrefillEngine(model, blocks, chunk_tokens=CHUNK, **options) as engine:
            cold = engine.run(PROMPT)
            assert engine.flush(cold)
        assert all(blocks.prefetch(blocks.chain(PROMPT)[:up], to="hbm").result())
        yield blocks, cold


@pytest.mark.parametrize("up", [None, 5], ids=["all", "some"])
def test_blocks_in_hbm_are_handed_over_on_the_device_and_the_others_come_from_memory(
    model: Any, up: int | None
) -> None:
    device = Device()
    with over(model, device, up) as (blocks, cold), PrefillEngine(model, blocks, chunk_tokens=CHUNK) as engine:
        for front in (0, CHUNK):
            device.handed = 0
            warm = engine.run(PROMPT, front=front)
            same(warm, cold)
            token = blocks.layout.bytes_per_token
            there = (CACHED if up is None else up * BLOCK) - front
            expected = {"hbm": there * token, "dram": (CACHED - front - there) * token}
            assert warm.report.bytes == {tier: size for tier, size in expected.items() if size}
            assert device.handed == expected["hbm"]
            assert set(warm.report.load_s) == set(warm.report.bytes)
        measured = engine.meter.measured()
        assert measured is not None
        assert set(measured.rates) == set(warm.report.bytes)
        assert engine.run(PROMPT).report.predicted  # it knows enough to decide


def test_a_device_that_is_not_the_models_is_read_from_below(model: Any) -> None:
    device = Device()
    device.name = "cuda:3"
    with over(model, device) as (blocks, cold), PrefillEngine(model, blocks, chunk_tokens=CHUNK) as engine:
        assert set(blocks.match(blocks.chain(PROMPT)).tiers) == {"hbm"}
        warm = engine.run(PROMPT, front=0)
        same(warm, cold)
        assert device.handed == 0
        assert set(warm.report.bytes) == {"dram"}
        assert engine.run(PROMPT).report.predicted


def test_which_device_a_model_is_on() -> None:
    device = Device()
    assert is_device_of(device, torch.device("cpu"))
    assert not is_device_of(device, torch.device("cuda"))
    assert not is_device_of(None, torch.device("cpu"))
    device.name = "cuda:1"
    assert is_device_of(device, torch.device("cuda:1"))
    assert not is_device_of(device, torch.device("cuda"))
    assert not is_device_of(device, torch.device("cpu"))
    device.close()


def test_what_left_hbm_meanwhile_is_read_from_below_and_counted_there(model: Any) -> None:
    device = Device()
    with over(model, device) as (blocks, cold):

        class Late:
            """Says what was there before the others pushed it out."""

            def __getattr__(self, name: str) -> Any:
                return getattr(blocks, name)

            def match(self, keys: Sequence[bytes]) -> Any:
                found = blocks.match(keys)
                blocks.lease(keys, to="hbm").release()  # takes the copies over
                return found

        with PrefillEngine(model, Late(), chunk_tokens=CHUNK) as engine:
            device.handed = 0
            warm = engine.run(PROMPT, front=0)
        same(warm, cold)
        assert device.handed == 0
        assert warm.report.bytes == {"dram": CACHED * blocks.layout.bytes_per_token}


def test_a_device_that_fails_costs_a_recompute(model: Any) -> None:
    device = Device()
    with over(model, device, 4) as (blocks, cold), PrefillEngine(model, blocks, chunk_tokens=CHUNK) as engine:
        device.broken = True
        warm = engine.run(PROMPT, front=0)
        same(warm, cold)
        assert warm.report.tokens_lost == 4 * BLOCK
        assert set(warm.report.bytes) == {"dram"}
        assert "device" in warm.report.why


def test_blocks_with_the_most_attended_tokens_are_handed_over() -> None:
    model, device = sharp(llama()), Device()
    with over(model, device, importance=True) as (blocks, _):
        reference = DictNamespace(layout_of(model, BLOCK))
        with PrefillEngine(model, reference, chunk_tokens=CHUNK, importance=True) as engine:
            engine.flush(engine.run(PROMPT))
        with PrefillEngine(model, reference, chunk_tokens=CHUNK) as engine:
            expected = engine.run(PROMPT, front=0, retain=0.3)
        kept = most_attended(Attended(blocks).read(blocks.chain(PROMPT)[: CACHED // BLOCK]), 0.3)
        with PrefillEngine(model, blocks, chunk_tokens=CHUNK) as engine:
            device.handed = 0
            some = engine.run(PROMPT, front=0, retain=0.3)
        same(some, expected)
        # Blocks with a kept token are handed over whole: a copy of each range would cost more than its bytes.
        read = int(kept.view(-1, BLOCK).any(1).sum()) * blocks.layout.block_bytes
        assert some.report.bytes == {"hbm": read}
        assert some.report.tokens_reused == int(kept.sum())
        assert device.handed == read


def test_the_lookahead_fills_hbm_first_and_memory_with_what_does_not_fit(model: Any) -> None:
    class Placed(Recording):
        def prefetch(self, keys: Sequence[bytes], **options: Any) -> Any:
            goals.append((options["to"], list(keys)))
            return super().prefetch(keys, **options)

    goals: list[tuple[str, list[bytes]]] = []
    blocks = Placed(layout_of(model, BLOCK))
    size = blocks.layout.block_bytes
    first, second, third = (blocks.chain(tokens) for tokens in others(3))
    for keys in (first, second, third):
        blocks.blocks |= dict.fromkeys(keys, b"")
    each = len(first)
    ahead = Lookahead(blocks, (2 * each + 2) * size, None, (each + 3) * size)
    for number, keys in enumerate((first, second, third)):
        ahead.add(number, keys)
    assert goals == [("hbm", first), ("hbm", second[:3]), ("dram", second[3:]), ("dram", third[:2])]
    for number in (0, 1, 2):
        ahead.take(number)
    assert all(job.cancelled for job in blocks.jobs)
    goals.clear()
    ahead.add(3, first + second + third)
    assert [(to, len(keys)) for to, keys in goals] == [("hbm", each + 3), ("dram", each - 1)]


def test_waiting_requests_find_their_blocks_in_hbm(model: Any, tmp_path: Path) -> None:
    """From NVMe, after a restart, while the one before them is in the model."""
    prompts = [PROMPT, *others(2)]
    expected: list[Prefill] = []
    go = threading.Event()
    for fresh in (True, False):
        with (
            Store(Hbm(SIZE, backend="host"), Dram("16MiB"), Nvme(tmp_path, "64MiB")) as store,
            PrefillEngine(model, namespace(store, model, weights=b"tests"), chunk_tokens=CHUNK) as engine,
        ):
            if fresh:
                expected = [engine.run(tokens) for tokens in prompts]
                continue
            keys = [engine.blocks.chain(tokens) for tokens in prompts]
            with after_layers(model, lambda _: go.wait(WAIT) and None):
                futures = [engine.submit(tokens, front=0) for tokens in prompts]
                for chain in keys[1:]:  # joins the one that is under way
                    assert all(engine.blocks.prefetch(chain, to="hbm").result())  # type: ignore[attr-defined]
                go.set()
                results = [future.result(WAIT) for future in futures]
            assert [set(result.report.bytes) for result in results[1:]] == [{"hbm"}, {"hbm"}]
    for result, other in zip(results, expected, strict=True):
        same(result, other)


@pytest.mark.parametrize(("where", "name", "dtype"), MODELS)
def test_every_way_on_the_models_device_gives_the_bits_of_the_cold_run(
    where: str, name: str, dtype: torch.dtype
) -> None:
    net = build(CONFIGS[name](), dtype).to(where)
    with Store(Hbm(SIZE, backend="host" if where == "cpu" else "cuda"), Dram("16MiB")) as store:
        blocks = namespace(store, net, weights=b"tests")
        with PrefillEngine(net, blocks, chunk_tokens=CHUNK, importance=True) as engine:
            cold = engine.run(PROMPT)
            assert engine.flush(cold)
            for tier in ("dram", "hbm"):
                assert all(blocks.prefetch(blocks.chain(PROMPT), to=tier).result())
                for way in ({"front": 0}, {"front": CHUNK}, {"front": 0, "overlap": False}):
                    warm = engine.run(PROMPT, **way)
                    same(warm, cold)
                    assert set(warm.report.bytes) == {tier}
                    assert engine.flush(warm)  # of what it counted, too
                pair = [PROMPT, PROMPT[:CACHED]]
                for one, other in zip(engine.run_batch(pair, front=0), engine.run_batch(pair, front=0), strict=True):
                    same(one, other)
                    assert engine.flush(one)
                    assert engine.flush(other)
                assert engine.run(PROMPT, front=0, retain=0.5).report.tokens_left_out == CACHED // 2
            told = list(engine.generate(PROMPT, 2 * BLOCK))
            assert engine.flush(engine.run([*PROMPT, *told]))
            assert list(engine.generate(PROMPT, 2 * BLOCK)) == told
            assert cold.report.importance is not None
            assert cold.report.importance.device.type == "cpu"
