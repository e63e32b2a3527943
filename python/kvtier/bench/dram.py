"""Reads and writes of blocks in memory, beside ``memcpy``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from kvtier import _kvtier
from kvtier.bench.figures import Row, alternate, compared
from kvtier.bench.memory import Bytes, Keys, chunks, huge_buffer, random_buffer, split
from kvtier.bench.plan import SIZES, Plan, label
from kvtier.config import Dram
from kvtier.errors import KvtierError
from kvtier.store import Store

__all__ = ["MemoryBench", "room_for"]

_BOUND = "libc memcpy, 1 thread, huge pages"
_SLACK = 8 << 20  # the index, and what the store keeps free


def room_for(size: int) -> Dram:
    """A tier with room for so many bytes of blocks at the low watermark, and for the index of the smallest blocks."""
    return Dram(int(size / 0.94) + size // 64 + _SLACK)


class MemoryBench:
    """A store in memory, and the caller's buffers: a source and a destination, each as large as the data."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.keys = Keys()
        self.source = random_buffer(plan.region)
        self.target = huge_buffer(plan.region)
        self.store = Store(room_for(plan.region))
        self.store.prefaulted(timeout=120)

    def close(self) -> None:
        """Give the memory back."""
        self.store.close()

    def rows(self) -> Iterator[Row]:
        """All rows, as they are measured."""
        for size in SIZES["dram"]:
            if size <= self.plan.batch:
                yield from self._size(size)

    def _size(self, size: int) -> Iterator[Row]:
        name, batch = label(size), max(1, self.plan.batch // size)
        pairs = alternate(self.plan.pairs, lambda: self._bound(size), lambda: self._bound(size, streaming=True))
        yield self._row(f"dram_streaming_copy_{name}", pairs, "the best copy past the cache, alone and without a check")
        sources, targets = split(self.source, size), split(self.target, size)
        self.store.clear()
        keys = self.keys.take(len(sources))
        self._put(keys, sources, batch)
        how = f"{batch} keys a call; source and destination {self.plan.region >> 20} MiB each, huge pages, cold"
        yield self._row(f"dram_get_{name}", self._get_rates(keys, targets, batch), how)
        if bytes(targets[-1]) != bytes(sources[-1]) or bytes(targets[0]) != bytes(sources[0]):
            raise KvtierError(f"a hit gave other bytes than were put (blocks of {name})")
        if size == SIZES["dram"][0]:
            yield self._row(f"dram_get_{name}_single", self._get_rates(keys, targets, 1), "1 key a call, else the same")
        for _ in range(2):  # until every put evicts
            self._put(self.keys.take(len(sources)), sources, batch)
        yield self._row(f"dram_put_{name}", self._put_rates(sources, targets, batch), how + "; each put evicts")
        if size == SIZES["dram"][0]:
            single = self._put_rates(sources, targets, 1)
            yield self._row(f"dram_put_{name}_single", single, "1 key a call, else the same")
            chained = self._put_rates(sources, targets, batch, chained=True)
            yield self._row(f"dram_put_{name}_chained", chained, f"each call's {batch} keys a chain of parents")

    def _row(self, name: str, pairs: Sequence[tuple[float, float]], note: str) -> Row:
        return compared(name, "GB/s", pairs, _BOUND, note)

    def _bound(self, size: int, *, streaming: bool = False) -> float:
        return self.plan.region / _kvtier.bound_memcpy(self.target, self.source, size, streaming) / 1e9

    def _get_rates(self, keys: Sequence[bytes], targets: Sequence[Bytes], batch: int) -> list[tuple[float, float]]:
        size = targets[0].size
        calls = [(keys[at], targets[at]) for at in chunks(len(keys), batch)]

        def lap() -> float:
            hits = 0
            begun = time.perf_counter()
            for wanted, outs in calls:
                hits += sum(result.tier == "dram" for result in self.store.get_into(wanted, outs))
            taken = time.perf_counter() - begun
            if hits != len(keys):
                raise KvtierError(f"{len(keys) - hits} of {len(keys)} blocks were not in memory")
            return len(keys) * size / taken / 1e9

        lap()
        return alternate(self.plan.pairs, lambda: self._bound(size), lap)

    def _put_rates(
        self, sources: Sequence[Bytes], targets: Sequence[Bytes], batch: int, *, chained: bool = False
    ) -> list[tuple[float, float]]:
        size = targets[0].size

        def lap() -> float:
            return self._put(self.keys.take(len(sources)), sources, batch, chained=chained)

        lap()
        return alternate(self.plan.pairs, lambda: self._bound(size), lap)

    def _put(self, keys: Sequence[bytes], sources: Sequence[Bytes], batch: int, *, chained: bool = False) -> float:
        """GB/s of putting all of it."""
        calls: list[tuple[Sequence[bytes], Sequence[Bytes], Sequence[bytes | None] | None]] = []
        for at in chunks(len(keys), batch):
            wanted = keys[at]
            calls.append((wanted, sources[at], [None, *wanted[:-1]] if chained else None))
        stored = 0
        begun = time.perf_counter()
        if batch == 1:
            for (key,), (data,), _ in calls:
                stored += self.store.put(key, data).stored
        else:
            for wanted, blocks, parents in calls:
                stored += sum(result.stored for result in self.store.put_many(wanted, blocks, parents=parents))
        taken = time.perf_counter() - begun
        if stored != len(keys):
            raise KvtierError(f"{len(keys) - stored} of {len(keys)} blocks were not stored")
        return len(keys) * sources[0].size / taken / 1e9
