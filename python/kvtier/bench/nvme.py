"""Reads and writes of blocks on NVMe, beside a bare io_uring loop on a file of the same kind."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvtier import _kvtier
from kvtier.bench.figures import Pair, Row, alternate, compared
from kvtier.bench.memory import Keys, chunks, huge_buffer, random_buffer, split
from kvtier.bench.plan import SIZES, Plan, label
from kvtier.config import Dram, Nvme
from kvtier.errors import KvtierError
from kvtier.store import Store

__all__ = ["DiskBench"]

_GIB = 1 << 30
_FLIGHTS = (2 << 20, 8 << 20, 16 << 20)  # bytes in flight that the bare loop is tried with
_WAIT = 120.0
_SETTLED_S = 0.02

Sample = tuple[float, float]
"""GB/s, and CPU seconds a GiB."""


class DiskBench:
    """A store whose data is much larger than its memory, and a bare file: both written once from end to end."""

    def __init__(self, plan: Plan, directory: Path) -> None:
        self.plan = plan
        self.keys = Keys()
        self.source = random_buffer(plan.lap)
        self.target = huge_buffer(plan.lap)
        self.bare = _kvtier.BareDisk(directory / "bare", plan.file)
        # What is written is never asked for again: only a policy that goes by age keeps the newest.
        self.store = Store(Dram(plan.front), Nvme(directory / "store", plan.file), policy="lru-leaf")
        self.store.prefaulted(timeout=_WAIT)
        self.room = int(self.store.stats()["tiers"]["nvme"]["capacity_bytes"] * 0.97)
        self.at = 0
        self.bare_at = 0

    def close(self) -> None:
        """End the store."""
        self.store.close(timeout=_WAIT)

    def rows(self) -> Iterator[Row]:
        """All rows, as they are measured."""
        yield self._first_lap()
        for size in SIZES["nvme"]:
            if size * 4 <= self.plan.lap:
                yield from self._size(size)

    def _first_lap(self) -> Row:
        begun = time.perf_counter()
        count = len(self.fill(1 << 20))
        value = count * (1 << 20) / (time.perf_counter() - begun) / 1e9
        bound = (self.plan.file >> 20 << 20) / self.bare.prepare_s / 1e9
        note = "fresh file space, one sample each; all other rows are of space that was written before"
        return Row(
            "nvme_write_first_lap", value, "GB/s", bound, "bare io_uring, first lap", value / bound, None, 1, note
        )

    def _size(self, size: int) -> Iterator[Row]:
        name = label(size)
        keys = self.fill(size)
        yield from self._reads(f"nvme_read_{name}", keys, size, self.plan.lap)
        if size == 1 << 20:
            pairs, depth = self._pairs(size, lambda: self.read(keys, size, self.plan.batch), write=False)
            yield self._rate(
                "nvme_read_1m_calls", pairs, depth, f"calls of {self.plan.batch >> 20} MiB: each begins anew"
            )
        if size == SIZES["nvme"][0]:
            yield from self._singles(keys, size)
        yield from self._writes(f"nvme_write_{name}", size)
        if size == 1 << 20:
            yield self._flushes(f"nvme_flush_{name}", size)

    # What is put there

    def fill(self, size: int) -> list[bytes]:
        """Keys of blocks that are all on NVMe, and fill it."""
        self.store.clear()
        self.store.flush(timeout=_WAIT)
        keys = self.keys.take(self.room // (size + (4096 if size % 4096 else 0)))
        self.put(keys, size)
        self.store.flush(timeout=_WAIT)
        if not all(self.store.contains(keys)):
            raise KvtierError("blocks that fit the NVMe tier did not stay there")
        self.at = 0
        return keys

    def put(self, keys: Sequence[bytes], size: int) -> None:
        """Put blocks of ``size`` bytes under these keys. Blocks."""
        sources = split(self.source, size)
        for at in chunks(len(keys), max(1, min(self.plan.batch // size, len(sources)))):
            wanted = keys[at]
            first = at.start % len(sources)
            blocks = [sources[(first + i) % len(sources)] for i in range(len(wanted))]
            lost = [result for result in self.store.put_many(wanted, blocks, timeout=_WAIT) if not result.stored]
            if lost:
                raise KvtierError(f"{len(lost)} of {len(wanted)} blocks were not stored: {lost[0]}")

    def turn(self, keys: Sequence[bytes], count: int) -> list[bytes]:
        """The next ``count`` keys that are on NVMe only, round and round: what was read last is furthest away."""
        taken: list[bytes] = []
        for _ in range(len(keys)):
            key = keys[self.at]
            self.at = (self.at + 1) % len(keys)
            # A block that was busy when it should have left memory may have stayed there.
            if list(self.store.match([key]).tiers) == ["nvme"]:
                taken.append(key)
                if len(taken) == count:
                    return taken
        raise KvtierError(f"{len(taken)} of {len(keys)} blocks are on NVMe only; {count} are needed")

    # Reads

    def _reads(self, name: str, keys: Sequence[bytes], size: int, call: int) -> Iterator[Row]:
        pairs, depth = self._pairs(size, lambda: self.read(keys, size, call), write=False)
        where = (
            f"one call a lap of {call >> 20} MiB into huge pages, through a DRAM tier of {self.plan.front >> 20} MiB"
        )
        yield self._rate(name, pairs, depth, where)
        yield self._cpu(name, pairs)

    def read(self, keys: Sequence[bytes], size: int, call: int) -> Sample:
        """One lap of reads of blocks that are on NVMe only, ``call`` bytes a call. Blocks."""
        targets = split(self.target, size)[: len(keys)]
        wanted = self.turn(keys, len(targets))
        calls = [(wanted[at], targets[at]) for at in chunks(len(wanted), call // size)]
        before, hits = self.count("read_bytes"), 0
        begun, cpu = time.perf_counter(), time.process_time()
        for some, outs in calls:
            hits += sum(map(bool, self.store.get_into(some, outs, timeout=_WAIT)))
        taken, cpu = time.perf_counter() - begun, time.process_time() - cpu
        self._were_cold(before, hits, len(wanted), size)
        return _sample(len(wanted) * size, taken, cpu)

    def count(self, counter: str) -> int:
        """A counter of the NVMe tier."""
        return int(self.store.stats()["tiers"]["nvme"][counter])

    def _were_cold(self, before: int, hits: int, count: int, size: int) -> None:
        """Whether ``count`` blocks were hits, and were read from the device."""
        moved = self.count("read_bytes") - before
        if hits != count or moved < count * size:
            raise KvtierError(
                f"{hits} of {count} reads of {label(size)} were hits, with {moved} bytes from the device: not all were cold"
            )

    def _singles(self, keys: Sequence[bytes], size: int) -> Iterator[Row]:
        targets = split(self.target, size)
        each = max(8, 256 // self.plan.pairs)
        every_bound: list[float] = []
        every_value: list[float] = []

        def bound() -> float:
            times = self.bare.latencies(size, self._offset(each * size), each)
            every_bound.extend(times)
            return statistics.median(times)

        def value() -> float:
            times, hits = [], 0
            before = self.count("read_bytes")
            for key, out in zip(self.turn(keys, each), targets, strict=False):
                begun = time.perf_counter()
                (result,) = self.store.get_into([key], [out])
                times.append(time.perf_counter() - begun)
                hits += result.hit
            self._were_cold(before, hits, len(times), size)
            every_value.extend(times)
            return statistics.median(times)

        value()
        every_value.clear()
        pairs = alternate(self.plan.pairs, bound, value)
        yield compared(
            f"nvme_read_{label(size)}_single", "s", pairs, "bare io_uring, depth 1", f"p50 of {each} reads a pair"
        )
        late = [_p99(every_bound), _p99(every_value)]
        yield Row(
            f"nvme_read_{label(size)}_single_p99",
            late[1],
            "s",
            late[0],
            "bare io_uring, depth 1",
            late[1] / late[0],
            None,
            len(every_value),
        )

    # Writes

    def _writes(self, name: str, size: int) -> Iterator[Row]:
        self.write(size)
        pairs, depth = self._pairs(size, lambda: self.write(size), write=True)
        how = (
            "steady puts of fresh keys; memory is full of blocks that are only there, NVMe is full too, each put evicts"
        )
        yield self._rate(name, pairs, depth, how)
        yield self._cpu(name, pairs)

    def write(self, size: int) -> Sample:
        """One lap of puts: bytes that reached NVMe, from the first put to the last write that they caused. Blocks."""
        keys = self.keys.take(self.plan.lap // size)
        before, _, _ = self._settle()
        begun, cpu = time.perf_counter(), time.process_time()
        self.put(keys, size)
        after, ended, spent = self._settle()
        return _sample(after - before, ended - begun, spent - cpu)

    def _settle(self) -> tuple[int, float, float]:
        """Bytes written to NVMe so far, once no more are; when the last were seen to be, and the CPU time then."""
        seen, at, cpu = -1, 0.0, 0.0
        while True:
            written = self.count("write_bytes")
            now = time.perf_counter()
            if written != seen:
                seen, at, cpu = written, now, time.process_time()
            elif now - at > _SETTLED_S:
                return seen, at, cpu
            time.sleep(0.0005)

    def _flushes(self, name: str, size: int) -> Row:
        count = self.plan.front // 2 // size

        def flush() -> Sample:
            self.store.flush(timeout=_WAIT)
            before, _, _ = self._settle()
            self.put(self.keys.take(count), size)
            early, _, _ = self._settle()
            begun, cpu = time.perf_counter(), time.process_time()
            self.store.flush(timeout=_WAIT)
            taken, cpu = time.perf_counter() - begun, time.process_time() - cpu
            left = count * size - (early - before)
            if left < size:
                raise KvtierError("the blocks were written before the flush")
            return _sample(left, taken, cpu)

        flush()
        pairs, depth = self._pairs(size, flush, write=True, count=count, sync=True)
        return self._rate(name, pairs, depth, f"{count} blocks in memory only, then flush(); both end durable")

    # The bare loop

    def _offset(self, size: int) -> int:
        """Where the bare loop goes on; it goes round and round as well."""
        at = self.bare_at
        self.bare_at = (at + size) % self.plan.file
        return at

    def loop(self, size: int, depth: int, count: int, write: bool, sync: bool) -> Sample:
        """One run of the bare loop. Blocks.

        To or from as much memory as it moves, as the store does: a few buffers would stay in the processor's cache.
        """
        taken, cpu, _ = self.bare.run(write, size, depth, self._offset(count * size), count, sync, count * size)
        return _sample(count * size, taken, cpu)

    def _pairs(
        self, size: int, value: Callable[[], Sample], *, write: bool, count: int = 0, sync: bool = False
    ) -> tuple[list[tuple[Sample, Sample]], int]:
        """Pairs of samples, of the bare loop at its best depth and of the store; and that depth."""
        count = count or self.plan.lap // size
        depths = sorted({min(256, max(1, flight // size)) for flight in _FLIGHTS})
        tried = {depth: max(self.loop(size, depth, count, write, sync)[0] for _ in range(2)) for depth in depths}
        depth = max(tried, key=lambda depth: tried[depth])
        value()
        bounds: list[Sample] = []
        values: list[Sample] = []

        def bound_rate() -> float:
            bounds.append(self.loop(size, depth, count, write, sync))
            return bounds[-1][0]

        def value_rate() -> float:
            values.append(value())
            return values[-1][0]

        alternate(self.plan.pairs, bound_rate, value_rate)
        return list(zip(bounds, values, strict=True)), depth

    def _rate(self, name: str, pairs: Sequence[tuple[Sample, Sample]], depth: int, note: str) -> Row:
        rates: list[Pair] = [(bound[0], value[0]) for bound, value in pairs]
        return compared(name, "GB/s", rates, f"bare io_uring, depth {depth}", note)

    def _cpu(self, name: str, pairs: Sequence[tuple[Sample, Sample]]) -> Row:
        costs: list[Pair] = [(bound[1], value[1]) for bound, value in pairs]
        return compared(
            f"{name}_cpu_s_per_gib", "s/GiB", costs, "bare io_uring", "all threads: I/O, verifying, copying, journal"
        )


def _sample(size: int, taken: float, cpu: float) -> Sample:
    return size / taken / 1e9, cpu / (size / _GIB) if size else 0.0


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]
