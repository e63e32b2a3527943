"""What the store costs whoever shares the process: a computing thread beside transfers, and an idle store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvtier import _kvtier
from kvtier.bench.figures import Pair, Row, compared, measured
from kvtier.bench.memory import Keys, huge_buffer, split
from kvtier.bench.plan import Plan
from kvtier.config import Dram, Nvme
from kvtier.errors import KvtierError
from kvtier.store import Store

__all__ = ["idle", "victim"]


def _spin(seconds: float) -> float:
    """Steps a second of a loop that only computes, in Python."""
    number, steps = 1, 0
    begun = time.perf_counter()
    while True:
        for _ in range(500):
            number = (number * 1103515245 + 12345) & 0x7FFFFFFF
        steps += 500
        taken = time.perf_counter() - begun
        if taken >= seconds:
            return steps / taken


def victim(plan: Plan) -> Iterator[Row]:
    """``victim_share``: what a computing thread keeps beside reads from memory, and what the reads keep beside it.

    The bound is what it keeps beside a thread that only copies memory: where cores, caches or the machine are shared,
    that is less than all.
    """
    for size, suffix in ((1 << 20, ""), (64 << 10, "_64k")):
        if size <= plan.region:
            yield from _victim(plan, size, suffix)


def _victim(plan: Plan, size: int, suffix: str) -> Iterator[Row]:
    count = plan.region // size
    source, target = huge_buffer(plan.region), huge_buffer(plan.region)
    keys, outs = Keys().take(count), split(target, size)
    shares: list[Pair] = []
    kept: list[Pair] = []
    with Store(Dram(int(plan.region * 1.1) + (8 << 20))) as store:
        store.prefaulted(timeout=120)
        store.put_many(keys, split(source, size))
        copies = Transfers(lambda: _kvtier.bound_memcpy(target, source, size) > 0)
        reads = Transfers(lambda: all(result.tier == "dram" for result in store.get_into(keys, outs)))
        for _ in range(plan.pairs):
            alone = _spin(plan.spin_s)
            beside = []
            for transfers in (copies, reads):
                with transfers:
                    time.sleep(plan.spin_s / 2)
                lonely = transfers.rate
                with transfers:
                    beside.append(_spin(plan.spin_s) / alone)
                beside.append(transfers.rate / lonely)
            shares.append((beside[0], beside[2]))
            kept.append((beside[1], beside[3]))
    how = f"get_into of {count} blocks of {size >> 10} KiB a call on another thread"
    bound = "beside a thread of memcpy"
    yield compared(f"victim_share{suffix}", "1", shares, bound, f"share of its own speed; {how}")
    yield compared(f"victim_transfer_share{suffix}", "1", kept, bound, "what these transfers keep of their own speed")


class Transfers:
    """Calls over and over on a thread, between entering and leaving.

    Attributes:
        rate: calls a second of the last stretch.
    """

    def __init__(self, call: Callable[[], bool]) -> None:
        self._call = call
        self._stop = threading.Event()
        self._thread = threading.Thread()
        self._failed = False
        self.rate = 0.0

    def _run(self) -> None:
        calls = 0
        begun = time.perf_counter()
        while not self._stop.is_set():
            self._failed |= not self._call()
            calls += 1
        self.rate = calls / (time.perf_counter() - begun)

    def __enter__(self) -> None:
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="bench-transfers")
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._failed:
            raise KvtierError("a resident block was not read")


def idle(plan: Plan, directory: Path) -> Iterator[Row]:
    """``idle_cpu_share``: CPU of this process while a store with an NVMe tier has nothing to do."""
    data = huge_buffer(1 << 20)
    with Store(Dram(16 << 20), Nvme(directory / "idle", 64 << 20)) as store:
        store.prefaulted(timeout=60)
        store.put_many(Keys().take(24), [data] * 24)
        store.flush()
        time.sleep(min(0.5, plan.idle_s))
        shares = []
        for _ in range(3):
            begun, cpu = time.perf_counter(), time.process_time()
            time.sleep(plan.idle_s)
            shares.append((time.process_time() - cpu) / (time.perf_counter() - begun))
    note = f"looks of {plan.idle_s:g} s at a store with blocks in memory and on NVMe, all threads of the process"
    yield measured("idle_cpu_share", "1", shares, 0.0, note)
