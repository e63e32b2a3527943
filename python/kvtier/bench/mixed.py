"""Reads beside writes, and an event loop beside reads: what one part of a store costs another."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

from kvtier import _kvtier
from kvtier.bench.figures import Pair, Row, alternate, compared, measured
from kvtier.bench.memory import Bytes, Keys, chunks, huge_buffer, split
from kvtier.bench.nvme import DiskBench
from kvtier.bench.plan import Plan
from kvtier.bench.threads import Transfers
from kvtier.config import Dram
from kvtier.errors import KvtierError
from kvtier.store import Store

__all__ = ["event_loop", "reads_beside_writes", "writes_beside_copies"]

_MIB = 1 << 20
_IN_FLIGHT = 32 * _MIB  # what the store has on its way to NVMe at most
_TICK_S = 0.001


def reads_beside_writes(bench: DiskBench) -> Iterator[Row]:
    """``nvme_read_1m_beside_writes`` and ``nvme_read_1m_behind_writes``, while a thread puts fresh blocks all the time."""
    plan = bench.plan
    count = plan.lap // (4 * _MIB)
    keys: list[bytes] = []

    def put() -> bool:
        fresh = bench.keys.take(4)
        bench.put(fresh, _MIB)
        keys.extend(fresh)
        return True

    puts = Transfers(put)
    pairs: list[Pair] = []
    lates: list[float] = []
    waits: list[float] = []
    for _ in range(plan.pairs):
        keys[:] = bench.fill(_MIB)
        alone = bench.read(keys[:count], _MIB, plan.lap)[0]
        written, begun = bench.count("write_bytes"), time.perf_counter()
        with puts:
            while bench.count("write_bytes") < written + plan.front // 4:  # until the writes are steady
                time.sleep(0.0005)
            pairs.append((alone, bench.read(_newest(bench.store, keys, count), _MIB, plan.lap)[0]))
            lates.append(max(_singles(bench, _newest(bench.store, keys, 8))))
        rate = (bench.count("write_bytes") - written) / (time.perf_counter() - begun)
        waits.append(_IN_FLIGHT / rate + statistics.median(bench.bare.latencies(_MIB, 0, 8)))
    note = f"cold reads through DRAM, {count} blocks a call, while a thread puts blocks of 1 MiB that evict"
    yield compared("nvme_read_1m_beside_writes", "GB/s", pairs, "the same reads without the puts", note)
    yield compared(
        "nvme_read_1m_behind_writes",
        "s",
        list(zip(waits, lates, strict=True)),
        "writing what may be in flight, and one bare read",
        "the longest of 8 cold reads of one block beside the same puts",
    )


def writes_beside_copies(bench: DiskBench) -> Iterator[Row]:
    """``nvme_write_1m_beside_copies``: steady writes, and the bare loop beside what any store does for them.

    Whoever puts copies each block, and the mover reads it once more to verify it; here two threads copy as fast as the
    store writes, while the loop does. Where cores and memory are shared with the device, that is its bound.
    """
    bench.fill(_MIB)
    bench.write(_MIB)  # fills memory with blocks that are only there
    rate = statistics.median(bench.write(_MIB)[0] for _ in range(3)) * 1e9
    copies = [Transfers(_copying(rate)) for _ in range(2)]
    depth, count = 16, bench.plan.lap // _MIB

    def bound() -> float:
        with copies[0], copies[1]:
            return bench.loop(_MIB, depth, count, True, False)[0]

    pairs = alternate(bench.plan.pairs, bound, lambda: bench.write(_MIB)[0])
    name = f"bare io_uring, depth {depth}, beside two threads that copy at {rate / 1e9:.1f} GB/s"
    yield compared("nvme_write_1m_beside_copies", "GB/s", pairs, name)


def _copying(rate: float) -> Callable[[], bool]:
    """Copies 1 MiB after another, ``rate`` bytes a second."""
    sources, targets = (itertools.cycle(split(huge_buffer(128 * _MIB), _MIB)) for _ in range(2))
    due = 0.0

    def copy() -> bool:
        nonlocal due
        due = max(due, time.perf_counter() - _TICK_S) + _MIB / rate
        _kvtier.bound_memcpy(next(targets), next(sources), _MIB)
        time.sleep(max(0.0, due - time.perf_counter()))
        return True

    return copy


def _newest(store: Store, keys: Sequence[bytes], count: int) -> list[bytes]:
    """Of the blocks that are on NVMe only, those that will stay longest."""
    taken: list[bytes] = []
    for key in reversed(keys):
        if len(taken) == count:
            break
        if list(store.match([key]).tiers) == ["nvme"]:
            taken.append(key)
    return taken


def _singles(bench: DiskBench, keys: Sequence[bytes]) -> list[float]:
    times = []
    for key, out in zip(keys, split(bench.target, _MIB), strict=False):
        begun = time.perf_counter()
        (result,) = bench.store.get_into([key], [out])
        times.append(time.perf_counter() - begun)
        if not result.hit:
            raise KvtierError(f"a block on NVMe was not read: {result}")
    return times


def event_loop(plan: Plan) -> Iterator[Row]:
    """``asyncio_tick``: how late a timer of an event loop is at worst while the loop awaits reads at full rate."""
    count = plan.batch // _MIB
    with Store(Dram(int(plan.region * 1.1) + (8 << 20))) as store:
        store.prefaulted(timeout=120)
        keys = Keys().take(plan.region // _MIB)
        source, target = huge_buffer(plan.batch), huge_buffer(plan.batch)
        for at in chunks(len(keys), count):
            store.put_many(keys[at], split(source, _MIB)[: at.stop - at.start])
        lates = asyncio.run(_ticks(store, keys, split(target, _MIB), plan))
    note = (
        f"the latest tick of a {1e3 * _TICK_S:g} ms timer in {plan.spin_s:g} s, beside aget_into of {count} MiB a call"
    )
    yield measured("asyncio_tick", "s", lates, 5e-3, note)


async def _ticks(store: Store, keys: list[bytes], outs: list[Bytes], plan: Plan) -> list[float]:
    done = False

    async def read() -> None:
        while not done:
            for at in chunks(len(keys), len(outs)):
                await store.aget_into(keys[at], outs[: at.stop - at.start])

    reader = asyncio.create_task(read())
    lates = []
    for _ in range(plan.pairs):
        worst, until = 0.0, time.perf_counter() + plan.spin_s
        while (now := time.perf_counter()) < until:
            await asyncio.sleep(_TICK_S)
            worst = max(worst, time.perf_counter() - now - _TICK_S)
        lates.append(worst)
    done = True
    await reader
    return lates
