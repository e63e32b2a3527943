#!/usr/bin/env python
"""The table of other stores in docs/BENCHMARKS.md: 64 KiB blocks in memory, each store in turns with kvtier.

    scripts/peers.py [--pairs N] [--mib N] [NAME]...        NAME: of a peer, such as lmdb; all that are installed if not given

A peer is measured where its package can be imported (and its server found), else named as absent: none is a requirement of kvtier.
Sources and destinations are the caller's, on huge pages, and larger than the processor's cache; each peer's memory is as it
allocates it. One thread calls. Where a peer has no call that reads into the caller's buffer, what it lends is copied there.
"""

# ruff: noqa: D102 - what the methods of a peer are for is said once, in `Peer`
from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.metadata
import itertools
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from kvtier import Store, __version__, _kvtier
from kvtier.bench.dram import room_for
from kvtier.bench.figures import Pair, alternate, compared
from kvtier.bench.memory import Bytes, chunks, huge_buffer, random_buffer, split

BLOCK = 64 << 10
BATCH = (32 << 20) // BLOCK
READY_S = 20.0
"""How long a server may take to answer."""


class Peer(ABC):
    """A store of ``count`` blocks: its calls for one block, and for many where it has them. Keys and views are as it wants them."""

    name: ClassVar[str]
    batched: ClassVar[bool] = True

    def __init__(self, source: Bytes, target: Bytes, stack: contextlib.ExitStack) -> None:
        self.source, self.target, self.stack = source, target, stack
        self.sources, self.targets = self.views(source), self.views(target)
        self.count = len(self.sources)
        self._numbers = itertools.count()

    @property
    def title(self) -> str:
        """The name, and the version where it has one."""
        return f"{self.name} {_version(self.name)}"

    def views(self, buffer: Bytes) -> Sequence[Any]:
        """The blocks of a buffer of the caller."""
        return split(buffer, BLOCK)

    def key(self, number: int) -> Any:
        """A key; numbers are never given twice."""
        return number.to_bytes(32, "little")

    def keys(self) -> list[Any]:
        """A new one for each block."""
        return [self.key(number) for number in itertools.islice(self._numbers, self.count)]

    def room(self) -> None:
        """Before each lap of puts, and not timed: for a store that does not make room on its own."""
        return

    @abstractmethod
    def get(self, key: Any, out: Any) -> None:
        """One block into the caller's buffer."""

    @abstractmethod
    def put(self, key: Any, data: Any) -> None:
        """One block out of the caller's buffer."""

    def get_many(self, keys: Sequence[Any], outs: Sequence[Any]) -> None:
        """As :meth:`get`."""
        raise NotImplementedError

    def put_many(self, keys: Sequence[Any], blocks: Sequence[Any]) -> None:
        """As :meth:`put`."""
        raise NotImplementedError


class Kvtier(Peer):
    """With its defaults: every read verifies, and every put evicts."""

    name = "kvtier"

    def __init__(self, source: Bytes, target: Bytes, stack: contextlib.ExitStack) -> None:
        super().__init__(source, target, stack)
        self.store = stack.enter_context(Store(room_for(source.size)))
        self.store.prefaulted(timeout=120)

    def get(self, key: bytes, out: Bytes) -> None:
        self.store.get_into([key], [out])

    def put(self, key: bytes, data: Bytes) -> None:
        _check(self.store.put(key, data).stored, self.name)

    def get_many(self, keys: Sequence[bytes], outs: Sequence[Bytes]) -> None:
        self.store.get_into(keys, outs)

    def put_many(self, keys: Sequence[bytes], blocks: Sequence[Bytes]) -> None:
        _check(all(result.stored for result in self.store.put_many(keys, blocks)), self.name)


class Floor(Peer):
    """One array on huge pages, and numpy's copy: no index, no eviction, nothing but the bytes."""

    name = "arena"
    batched = False

    def __init__(self, source: Bytes, target: Bytes, stack: contextlib.ExitStack) -> None:
        super().__init__(source, target, stack)
        self.slots = split(huge_buffer(source.size), BLOCK)

    @property
    def title(self) -> str:
        return "arena + numpy copy"

    def key(self, number: int) -> int:
        return number % self.count

    def get(self, key: int, out: Bytes) -> None:
        np.copyto(out, self.slots[key])

    def put(self, key: int, data: Bytes) -> None:
        np.copyto(self.slots[key], data)


class Lmcache(Peer):
    """Its ``LocalCPUBackend``, which lends tensors; LRU."""

    name = "lmcache"

    def __init__(self, source: Bytes, target: Bytes, stack: contextlib.ExitStack) -> None:
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
        self.torch: Any = importlib.import_module("torch")
        self.torch.set_num_threads(1)
        v1 = "lmcache.v1"
        config = importlib.import_module(f"{v1}.config").LMCacheEngineConfig.from_defaults(local_cpu=True)
        mixed = importlib.import_module(f"{v1}.memory_allocators.mixed_memory_allocator").MixedMemoryAllocator
        backend = importlib.import_module(f"{v1}.storage_backend.local_cpu_backend").LocalCPUBackend
        self.engine_key = importlib.import_module("lmcache.utils").CacheEngineKey
        super().__init__(source, target, stack)
        allocator = mixed(source.size)
        stack.callback(allocator.close)
        self.backend = backend(config, dst_device="cpu", memory_allocator=allocator)
        stack.callback(self.backend.clear)
        self.shape = self.torch.Size([2, 1, 16, BLOCK // 64])

    def views(self, buffer: Bytes) -> Sequence[Any]:
        return [self.torch.from_numpy(part) for part in split(buffer, BLOCK)]

    def key(self, number: int) -> Any:
        return self.engine_key("model", 1, 0, number, self.torch.bfloat16)

    def get(self, key: Any, out: Any) -> None:
        lent = self.backend.get_blocking(key)
        out.copy_(lent.raw_data)
        lent.ref_count_down()

    def put(self, key: Any, data: Any) -> None:
        self.backend.submit_put_task(key, filled := self._filled(data))
        filled.ref_count_down()

    def get_many(self, keys: Sequence[Any], outs: Sequence[Any]) -> None:
        for out, lent in zip(outs, self.backend.batched_get_blocking(keys), strict=True):
            out.copy_(lent.raw_data)
            lent.ref_count_down()

    def put_many(self, keys: Sequence[Any], blocks: Sequence[Any]) -> None:
        filled = [self._filled(data) for data in blocks]
        self.backend.batched_submit_put_task(keys, filled)
        for one in filled:
            one.ref_count_down()

    def _filled(self, data: Any) -> Any:
        room = self.backend.allocate(self.shape, self.torch.bfloat16)
        room.raw_data.copy_(data)
        return room


class Mooncake(Peer):
    """A master beside this process, and its segment in it; emptied before each lap of puts, so none evicts."""

    name = "mooncake"

    def __init__(self, source: Bytes, target: Bytes, stack: contextlib.ExitStack) -> None:
        os.environ.setdefault("MC_STORE_MEMCPY", "1")  # else what lies in this process goes through TCP
        os.environ.setdefault("GLOG_minloglevel", "2")
        package = importlib.import_module("mooncake").__path__[0]
        store = importlib.import_module("mooncake.store").MooncakeDistributedStore
        super().__init__(source, target, stack)
        port, metrics, own = (_free_port() for _ in range(3))
        stack.enter_context(_server(f"{package}/mooncake_master", f"-rpc_port={port}", f"-metrics_port={metrics}"))
        _wait(lambda: socket.create_connection(("127.0.0.1", port)).close())
        self.store = store()
        stack.callback(self.store.close)
        names = (f"127.0.0.1:{own}", "P2PHANDSHAKE", 2 * source.size, 16 << 20, "tcp", "", f"127.0.0.1:{port}")
        if self.store.setup(*names) or any(
            self.store.register_buffer(one.ctypes.data, one.size) for one in (source, target)
        ):
            raise RuntimeError("mooncake's store could not be set up")

    def views(self, buffer: Bytes) -> Sequence[int]:
        return range(buffer.ctypes.data, buffer.ctypes.data + buffer.size, BLOCK)

    def key(self, number: int) -> str:
        return f"{number:032}"

    def room(self) -> None:
        self.store.remove_all(True)

    def get(self, key: str, out: int) -> None:
        self.store.get_into(key, out, BLOCK)

    def put(self, key: str, data: int) -> None:
        _check(self.store.put_from(key, data, BLOCK) == 0, self.name)

    def get_many(self, keys: Sequence[str], outs: Sequence[int]) -> None:
        self.store.batch_get_into(keys, outs, [BLOCK] * len(keys))

    def put_many(self, keys: Sequence[str], blocks: Sequence[int]) -> None:
        _check(not any(self.store.batch_put_from(keys, blocks, [BLOCK] * len(keys))), self.name)


class Lmdb(Peer):
    """A writable map in a file in memory, never synced; a put replaces, a batch is a transaction."""

    name = "lmdb"

    def __init__(self, source: Bytes, target: Bytes, stack: contextlib.ExitStack) -> None:
        lmdb: Any = importlib.import_module("lmdb")
        super().__init__(source, target, stack)
        memory = Path("/dev/shm")
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None))
        self.map = lmdb.open(folder, map_size=4 * source.size + (64 << 20), writemap=True, sync=False, metasync=False)
        stack.callback(self.map.close)

    @property
    def title(self) -> str:
        return f"{super().title}, writemap"

    def views(self, buffer: Bytes) -> Sequence[memoryview]:
        return [part.data for part in split(buffer, BLOCK)]

    def key(self, number: int) -> Any:
        return super().key(number % self.count)

    def get(self, key: bytes, out: memoryview) -> None:
        self.get_many([key], [out])

    def put(self, key: bytes, data: memoryview) -> None:
        self.put_many([key], [data])

    def get_many(self, keys: Sequence[bytes], outs: Sequence[memoryview]) -> None:
        with self.map.begin(buffers=True) as reading:
            for key, out in zip(keys, outs, strict=True):
                out[:] = reading.get(key)

    def put_many(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        with self.map.begin(write=True) as writing:
            for key, data in zip(keys, blocks, strict=True):
                writing.put(key, data)


class Redis(Peer):
    """A server beside this process, one connection over a Unix socket; LRU."""

    name = "redis"

    def __init__(self, source: Bytes, target: Bytes, stack: contextlib.ExitStack) -> None:
        redis: Any = importlib.import_module("redis")
        program = shutil.which("redis-server")
        if program is None:
            raise ImportError("no redis-server")
        super().__init__(source, target, stack)
        path = f"{stack.enter_context(tempfile.TemporaryDirectory())}/socket"
        most = str(source.size * 27 // 20)  # 64 KiB and a header take 80 KiB there
        limits = ("--maxmemory", most, "--maxmemory-policy", "allkeys-lru")
        stack.enter_context(
            _server(program, "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no", *limits)
        )
        self.connection = redis.Redis(unix_socket_path=path)
        stack.callback(self.connection.close)
        _wait(self.connection.ping)

    @property
    def title(self) -> str:
        return f"{self.name} {self.connection.info('server')['redis_version']}, one connection"

    def views(self, buffer: Bytes) -> Sequence[memoryview]:
        return [part.data for part in split(buffer, BLOCK)]

    def get(self, key: bytes, out: memoryview) -> None:
        out[:] = self.connection.get(key)

    def put(self, key: bytes, data: memoryview) -> None:
        self.connection.set(key, data)

    def get_many(self, keys: Sequence[bytes], outs: Sequence[memoryview]) -> None:
        for out, data in zip(outs, self.connection.mget(keys), strict=True):
            out[:] = data

    def put_many(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        self.connection.mset(dict(zip(keys, blocks, strict=True)))


PEERS: tuple[type[Peer], ...] = (Floor, Lmcache, Mooncake, Lmdb, Redis)


def measured(ours: Peer, peer: Peer, count: int) -> Iterator[list[Pair] | None]:
    """GB/s of both in turns: get of one block a call and of a batch, then put; ``None`` where the peer has no such call."""
    batches = (1, BATCH) if peer.batched else (1,)
    kept = {store: _kept(store) for store in (peer, ours)}
    for batch in batches:
        laps = [functools.partial(_get, store, keys, batch) for store, keys in kept.items()]
        for lap in laps:
            lap()
        pairs = alternate(count, *laps)
        for store, lap in zip(kept, laps, strict=True):
            store.target.fill(0)
            lap()
            if not np.array_equal(store.target, store.source):
                raise ValueError(f"{store.name} gave other bytes than were put")
        yield pairs
    if not peer.batched:
        yield None
    for batch in batches:
        laps = [functools.partial(_put, store, batch) for store in kept]
        for lap in laps * 2:  # until every put evicts
            lap()
        yield alternate(count, *laps)
    if not peer.batched:
        yield None


def _check(stored: bool, name: str) -> None:
    if not stored:
        raise ValueError(f"{name} refused a block")


def _kept(store: Peer) -> list[Any]:
    """The keys of all blocks, which are put."""
    keys = store.keys()
    for key, data in zip(keys, store.sources, strict=True):
        store.put(key, data)
    return keys


def _get(store: Peer, keys: Sequence[Any], batch: int) -> float:
    return _timed(store.get if batch == 1 else store.get_many, keys, store.targets, batch)


def _put(store: Peer, batch: int) -> float:
    store.room()
    return _timed(store.put if batch == 1 else store.put_many, store.keys(), store.sources, batch)


def _timed(call: Callable[[Any, Any], None], keys: Sequence[Any], views: Sequence[Any], batch: int) -> float:
    """GB/s of all blocks, ``batch`` a call."""
    pairs = list(
        zip(keys, views, strict=True) if batch == 1 else ((keys[at], views[at]) for at in chunks(len(keys), batch))
    )
    begun = time.perf_counter()
    for wanted, where in pairs:
        call(wanted, where)
    return len(keys) * BLOCK / (time.perf_counter() - begun) / 1e9


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *(peer.name for peer in PEERS)])
    asked = parser.parse_args()
    source, target = random_buffer(asked.mib << 20), huge_buffer(asked.mib << 20)
    print(
        f"| store | get, one a call | get, {BATCH} a call | put, one a call | put, {BATCH} a call |\n|---|---|---|---|---|"
    )
    absent: list[str] = []
    copies: tuple[list[float], list[float]] = ([], [])
    for kind in PEERS:
        if asked.names and kind.name not in asked.names:
            continue
        with contextlib.ExitStack() as stack:
            try:
                peer = kind(source, target, stack)
            except ImportError as error:
                absent.append(f"{kind.name} ({error})")
                continue
            ours = Kvtier(source, target, stack)
            for rates, past in zip(copies, (False, True), strict=True):
                taken = [_kvtier.bound_memcpy(target, source, BLOCK, past) for _ in range(asked.pairs)]
                rates += [source.size / seconds / 1e9 for seconds in taken]
            cells = [_cell(pairs) for pairs in measured(ours, peer, asked.pairs)]
            print(f"| {peer.title} | {' | '.join(cells)} |", flush=True)
    print(f"\nGB/s of kvtier {__version__} / of the store = ratio (spread).")
    if copies[0]:
        plain, streaming = map(statistics.median, copies)
        print(f"Nothing but copies of the same blocks: {plain:.3g} by libc, {streaming:.3g} past the cache.")
    for name in absent:
        print(f"Absent: {name}.")


def _cell(pairs: list[Pair] | None) -> str:
    if pairs is None:
        return "-"
    row = compared("", "GB/s", pairs, "")
    return f"{row.value:.3g} / {row.bound:.3g} = **{row.ratio:.1f}** ({row.spread or 0:.0%})"


def _version(module: str) -> str:
    return importlib.metadata.version(importlib.metadata.packages_distributions()[module][0])


@contextlib.contextmanager
def _server(*command: str) -> Iterator[None]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.terminate()


def _wait(answer: Callable[[], object]) -> None:
    """Until it raises nothing."""
    end = time.monotonic() + READY_S
    while True:
        try:
            answer()
            return
        except Exception:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
