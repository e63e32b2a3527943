"""The HBM tier, on the host's own "device": what a store with one does, and that nothing of it is lost or mixed up."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from blocks import MIB, fill, host, key, keys, payload
from kvtier import (
    ClosedError,
    ConfigError,
    DeadlineError,
    Dram,
    Hbm,
    InvalidBlockError,
    KVLayout,
    Nvme,
    Result,
    StorageError,
    Store,
    StoreConfig,
    UnsupportedError,
)
from kvtier.tiers import Copying, DeviceBackend, HostBackend, hbm
from kvtier.tiers.cuda import missing

WITHOUT = missing()
KINDS = ["host"] if WITHOUT else ["host", "cuda"]
"""Where no GPU is, its tests do not exist: `scripts/gpu_check.sh` runs them where one is."""


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with Store(Hbm(4 * MIB, backend=request.param), Dram(32 * MIB), policy="lru-leaf") as store:
        yield store


def empty(store: Store, size: int) -> Any:
    """An array on the store's device."""
    device = store.device
    if isinstance(device, HostBackend):
        return device.empty(size)
    import cupy

    return cupy.empty(size, np.uint8)


def used(store: Store) -> int:
    return int(store.stats()["tiers"]["hbm"]["used_bytes"])


class Gate(HostBackend):
    """A device whose copies begin when the test says so, and fail if it says that."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.open = threading.Event()
        self.broken = False

    def copy_in(self, copies: Any, *, after: Copying | None = None) -> Copying:
        given = [copy._replace() for copy in copies]
        gate = self

        class Behind:
            """What the copies wait for."""

            def wait(self, timeout: float | None = None) -> bool:
                gate.open.wait(timeout)
                if gate.broken:
                    raise StorageError("the device is broken")
                return True

        behind: Any = Behind()
        return super().copy_in(given, after=behind)


def test_blocks_go_up_and_are_read_on_the_device(store: Store) -> None:
    names = fill(store, 6)
    assert store.prefetch(names[:3], to="hbm").result() == [Result(True, "hbm")] * 3
    match = store.match(names)
    assert match.tiers == ["hbm"] * 3 + ["dram"] * 3
    assert match.bytes == {"hbm": 3 * MIB, "dram": 3 * MIB}
    outs = [empty(store, MIB) for _ in names]
    results = store.get_into(names, outs)
    assert results == [Result(True, "hbm")] * 3 + [Result(True, "dram")] * 3
    for name, out in zip(names, outs, strict=True):
        assert host(out).tobytes() == payload(name, MIB)
    # Readers of the process's own memory are served from there.
    data = store.get(names[0])
    assert data is not None
    assert data.tobytes() == payload(names[0], MIB)
    stats = store.stats()["tiers"]["hbm"]
    assert (stats["blocks"], stats["inserts"], stats["hits"], stats["hit_bytes"]) == (3, 3, 3, 3 * MIB)
    assert stats["used_bytes"] == 3 * MIB <= stats["capacity_bytes"] == stats["size_bytes"]


def test_parts_of_blocks_on_the_device(store: Store) -> None:
    layout = KVLayout(3, "gqa", kv_heads=2, head_dim=64, block_tokens=64, dtype="fp16")
    cache = store.namespace(b"model", layout)
    names = keys(2, "part")
    datas = [np.frombuffer(payload(name, layout.block_bytes), np.uint8) for name in names]
    cache.put_many(names, datas)
    assert cache.prefetch(names[:1], to="hbm").result()[0].hit
    for name, data in zip(names, datas, strict=True):
        part = data.reshape(3, 2, 64, 256)[1:3, :, 5:9]
        out = empty(store, part.nbytes)
        assert cache.get_into([name], [out], layers=range(1, 3), tokens=range(5, 9))[0].hit
        assert np.array_equal(host(out), part.reshape(-1))
    wrong = empty(store, layout.block_bytes).view(np.float32)
    with pytest.raises(InvalidBlockError, match="fp16"):
        cache.get_into(names[:1], [wrong])
    with pytest.raises(UnsupportedError, match="read the whole blocks, or into memory of the host"):
        cache.get_into(names[:1], [empty(store, layout.block_bytes)], tokens=np.ones((1, 64), np.bool_))


def test_arrays_that_do_not_fit_are_refused(store: Store) -> None:
    (name,) = fill(store, 1)
    with pytest.raises(InvalidBlockError, match="exactly that size"):
        store.get_into([name], [empty(store, MIB - 1)])
    with pytest.raises(InvalidBlockError, match="2 buffers were given for 1 keys"):
        store.get_into([name], [empty(store, MIB), empty(store, MIB)])
    with pytest.raises(InvalidBlockError, match="not contiguous"):
        store.get_into([name], [empty(store, 2 * MIB)[::2]])
    with pytest.raises(InvalidBlockError, match="1 of 2 buffers"):
        store.get_into([name, name], [empty(store, MIB), np.empty(MIB, np.uint8)])


def test_misses_are_values_on_the_device_too(store: Store) -> None:
    (name,) = fill(store, 1)
    outs = [empty(store, MIB), empty(store, MIB)]
    absent, there = store.get_into([key("absent"), name], outs)
    assert (absent, there) == (Result(False, None, "absent"), Result(True, "dram"))
    assert host(outs[1]).tobytes() == payload(name, MIB)
    assert store.prefetch([key("absent")], to="hbm").result() == [Result(False, None, "absent")]


def test_asynchronous_reads_end_on_the_device(store: Store) -> None:
    names = fill(store, 2)

    async def read() -> list[Result]:
        assert all(await store.aprefetch(names[:1], to="hbm"))
        return await store.aget_into(names, outs)

    outs = [empty(store, MIB) for _ in names]
    assert [result.tier for result in asyncio.run(read())] == ["hbm", "dram"]
    assert [host(out).tobytes() for out in outs] == [payload(name, MIB) for name in names]


def filled(store: Store, name: bytes) -> Any:
    """The bytes of the block with this key, on the store's device."""
    data = np.frombuffer(payload(name, MIB), np.uint8)
    out = empty(store, MIB)
    if isinstance(out, np.ndarray):
        out[:] = data
    else:
        out.set(data)
    return out


def test_blocks_are_put_from_the_device(store: Store) -> None:
    names = keys(12, "put")  # more than goes through memory at a time
    first, *others = (filled(store, name) for name in names)
    assert store.put(names[0], first).stored
    puts = store.put_many(names[1:], others, parents=names[:-1], importance=[1.0] * 11)
    assert [(put.stored, put.tier) for put in puts] == [(True, "dram")] * 11
    again = asyncio.run(store.aput_many(names[:2], [first, others[0]]))
    assert [put.present for put in again] == [True, True]
    assert asyncio.run(store.aput(names[2], others[1])).present
    for name in names:
        data = store.get(name)
        assert data is not None
        assert data.tobytes() == payload(name, MIB)
    assert store.remove(names[1:2]) == [True]
    assert store.contains(names) == [True] + [False] * 11  # the parents were taken
    with pytest.raises(InvalidBlockError, match="one a key is needed"):
        store.put_many(names, [first])
    layout = KVLayout(1, "gqa", kv_heads=1, head_dim=8, block_tokens=16, dtype="fp16")
    with pytest.raises(InvalidBlockError):
        store.namespace(b"model", layout).put(names[0], first)


def test_hbm_keeps_what_was_used_last_and_the_store_all(store: Store) -> None:
    names = fill(store, 8)
    for name in names[:4]:
        store.prefetch([name], to="hbm").result()
    store.get_into(names[:1], [empty(store, MIB)])
    store.prefetch(names[4:6], to="hbm").result()
    assert store.match(names).tiers == ["hbm", "dram", "dram", "hbm", "hbm", "hbm", "dram", "dram"]
    assert store.stats()["tiers"]["hbm"]["drops"] == 2
    assert all(store.contains(names))


def test_a_lease_in_hbm_takes_the_copies_over(store: Store) -> None:
    names = fill(store, 3)
    with store.lease([*names, key("absent")], to="hbm") as lease:
        assert lease.reasons == [None, None, None, "absent"]
        assert lease.blocks[3] is None
        assert [host(block).tobytes() for block in lease.blocks[:3]] == [payload(name, MIB) for name in names]
        block: Any = lease.blocks[0]
        tensor = torch.from_dlpack(block)
        tensor.zero_()
        assert not host(block).any()
        assert store.match(names).tiers == ["dram"] * 3
        # What was scribbled there is nobody else's: not below, and not in HBM again.
        with store.lease(names[:1], to="hbm") as other:
            assert host(other.blocks[0]).tobytes() == payload(names[0], MIB)
        assert used(store) == 3 * MIB
    del block
    assert used(store) == MIB  # the tensor is left
    del tensor
    assert used(store) == 0


def test_who_leases_in_hbm_writes_to_nothing_that_others_still_copy() -> None:
    class Late(HostBackend):
        """A device on which something else comes first."""

        first: Any = None

        def deliver(self, deliveries: Any, stream: Any = None) -> Copying:
            if self.first is not None:
                self.first()
            return super().deliver(deliveries, stream)

    device = Late(4 * MIB)
    with Store(Hbm(4 * MIB, backend=device), Dram(32 * MIB)) as store:
        names = fill(store, 1)
        assert all(store.prefetch(names, to="hbm").result())

        def scribble() -> None:
            with store.lease(names, to="hbm") as lease:
                (block,) = lease.blocks
                assert host(block).tobytes() == payload(names[0], MIB)
                block[:] = 0

        device.first = scribble
        out = device.empty(MIB)
        assert store.get_into(names, [out]) == [Result(True, "hbm")]
        assert out.tobytes() == payload(names[0], MIB)
        del out
        gc.collect()
        assert used(store) == 0


def test_a_lease_of_more_than_hbm_holds_says_so(store: Store) -> None:
    names = fill(store, 6)
    with store.lease(names, to="hbm", timeout=0.5) as lease:
        assert lease.reasons.count(None) == 4
        assert set(lease.reasons) <= {None, "full", "deadline"}
    assert used(store) == 0


def test_a_lease_waits_for_what_uses_it(store: Store) -> None:
    names = fill(store, 1)
    lease = store.lease(names, to="hbm")
    used_up = threading.Event()
    lease.release(after=used_up)
    assert used(store) == MIB
    used_up.set()
    for thread in threading.enumerate():
        if thread.name == "kvtier-release":
            thread.join()
    assert used(store) == 0


def test_nothing_is_visible_before_its_copy_has_ended() -> None:
    device = Gate(4 * MIB)
    with Store(Hbm(4 * MIB, backend=device), Dram(32 * MIB)) as store:
        names = fill(store, 4)
        job = store.prefetch(names, to="hbm")
        assert not job.wait(0.05)
        assert store.match(names).tiers == ["dram"] * 4
        store.remove(names[:1])
        device.open.set()
        assert [result.reason for result in job.result()] == ["absent", None, None, None]
        assert used(store) == 3 * MIB


def test_a_failed_copy_gives_its_place_back() -> None:
    device = Gate(4 * MIB)
    device.open.set()
    device.broken = True
    with Store(Hbm(4 * MIB, backend=device), Dram(32 * MIB)) as store:
        names = fill(store, 2)  # a third one might be a third failure in a row
        assert store.prefetch(names, to="hbm").result() == [Result(False, None, "device")] * 2
        assert (used(store), store.stats()["tiers"]["hbm"]["errors"]) == (0, 2)
        # The store serves from the rest.
        outs = [device.empty(MIB) for _ in names]
        assert all(store.get_into(names, outs))
        device.broken = False
        assert store.prefetch(names, to="hbm").result() == [Result(True, "hbm")] * 2


def test_a_thread_that_cannot_start_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    start = threading.Thread.start
    refused: list[str] = []
    device = HostBackend(MIB)

    def begin(thread: threading.Thread) -> None:
        if thread.name in refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    def threads() -> list[str]:
        return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("kvtier"))

    monkeypatch.setattr(threading.Thread, "start", begin)
    tiers = Dram(8 * MIB), Nvme(tmp_path, 16 * MIB)
    before = threads()
    for name in ("kvtier-copy-in", "kvtier-copy-out", "kvtier-hbm"):
        refused[:] = [name]
        with pytest.raises(StorageError, match="cannot start the thread kvtier-"):
            Store(Hbm(MIB, backend="host"), *tiers)
        assert threads() == before
        with Store(*tiers) as store:  # the directory's lock is free
            assert store.put(key("a"), b"a").reason is None
    with pytest.raises(StorageError):
        Store(Hbm(MIB, backend=device), *tiers)
    with pytest.raises(ClosedError):
        device.copy_in([])


def test_a_device_that_only_fails_is_set_aside(caplog: pytest.LogCaptureFixture) -> None:
    device = Gate(4 * MIB)
    device.open.set()
    with Store(Hbm(4 * MIB, backend=device), Dram(32 * MIB)) as store:
        names = fill(store, 6)
        assert store.prefetch(names[:1], to="hbm").result() == [Result(True, "hbm")]
        device.broken = True
        for name in names[1:4]:
            assert store.prefetch([name], to="hbm").result() == [Result(False, None, "device")]
        stats = store.stats()["tiers"]["hbm"]
        assert (stats["set_aside"], stats["blocks"], stats["errors"]) == (1, 0, 3)
        assert [store.prefetch([name], to="hbm").result()[0].reason for name in names] == ["device"] * 6
        assert store.lease(names[:1], to="hbm").reasons == ["device"]
        assert store.stats()["tiers"]["hbm"]["errors"] == 3, "it was asked for nothing more"
        outs = [device.empty(MIB) for _ in names]
        assert store.get_into(names, outs) == [Result(True, "dram")] * 6
        assert [out.tobytes() for out in outs] == [payload(name, MIB) for name in names]
    said = [record for record in caplog.records if "set aside" in record.getMessage()]
    assert [(record.name, record.levelname) for record in said] == [("kvtier", "WARNING")]


def test_a_device_that_fails_in_a_way_of_its_own_is_tried_again() -> None:
    class Odd(Gate):
        """A device whose library raises what it likes."""

        def copy_in(self, copies: Any, *, after: Copying | None = None) -> Copying:
            event: Any = super().copy_in(copies, after=after)
            if self.broken:
                event.wait = lambda timeout=None: 1 / 0
            return event

    device = Odd(4 * MIB)
    device.open.set()
    with Store(Hbm(4 * MIB, backend=device), Dram(32 * MIB)) as store:
        names = fill(store, 1)
        for broken, result in ((True, Result(False, None, "device")), (False, Result(True, "hbm"))):
            device.broken = broken
            assert store.prefetch(names, to="hbm").result() == [result]


def test_a_device_that_hangs_holds_up_nobody_else(tmp_path: Path) -> None:
    below = Dram(64 * MIB), Nvme(tmp_path, 128 * MIB)
    with Store(*below) as store:
        names = fill(store, 24)
    device = Gate(4 * MIB)
    store = Store(Hbm(4 * MIB, backend=device), *below)
    assert all(store.prefetch(names[:20]).result())
    stuck = store.prefetch(names[:20], to="hbm")  # more than the pool holds: the others wait for room there
    others = store.prefetch(names[20:22])
    assert others.wait(5)
    assert all(others.result())
    for name in names[22:]:
        data = asyncio.run(store.aget(name, timeout=10))
        assert data is not None
        assert data.tobytes() == payload(name, MIB)
    assert not stuck.done()
    # Nor does it take the time that closing has to write what is in memory only.
    fresh = fill(store, 3, MIB, "fresh")
    with pytest.raises(DeadlineError, match="copies to the device did not end"):
        store.close(timeout=1)
    with Store(*below) as again:
        assert again.contains(fresh) == [True] * 3
    device.open.set()


def test_a_thread_that_the_device_holds_is_not_waited_for() -> None:
    waited: list[float] = []
    for answers in (True, False):
        feed = SimpleNamespace(stop=lambda: None, answers=lambda answers=answers: answers)
        hbm._end(feed, SimpleNamespace(join=waited.append))  # type: ignore[arg-type]
    assert waited == [10, 0]


class Torn(HostBackend):
    """A device that cannot read its pool any more."""

    def deliver(self, deliveries: Any, stream: Any = None) -> Copying:
        pool = self.view(0, self.capacity)
        if any(np.may_share_memory(pool, source) for source, _ in deliveries):
            raise StorageError("the device cannot read its memory")
        return super().deliver(deliveries, stream)


def test_what_cannot_be_read_from_the_pool_is_read_from_below() -> None:
    device = Torn(4 * MIB)
    with Store(Hbm(4 * MIB, backend=device), Dram(32 * MIB)) as store:
        names = fill(store, 3)
        assert all(store.prefetch(names[:2], to="hbm").result())
        outs = [device.empty(MIB) for _ in names]
        for failures in (1, 2, 3):
            assert store.get_into(names, outs) == [Result(True, "dram")] * 3
            assert [out.tobytes() for out in outs] == [payload(name, MIB) for name in names]
            stats = store.stats()["tiers"]["hbm"]
            assert (stats["errors"], stats["set_aside"]) == (failures, int(failures == 3))
        assert store.match(names).tiers == ["dram"] * 3


def test_a_stream_that_was_given_is_the_one_that_is_used() -> None:
    given: list[Any] = []

    class Listening(HostBackend):
        def deliver(self, deliveries: Any, stream: Any = None) -> Copying:
            given.append(stream)
            return super().deliver(deliveries, stream)

    device = Listening(4 * MIB)
    with Store(Hbm(4 * MIB, backend=device), Dram(32 * MIB)) as store:
        names, out = fill(store, 1), device.empty(MIB)
        for stream in (None, 0, 7):  # 0 is the default stream's address
            assert store.get_into(names, [out], stream=stream)[0].hit
            assert store.put(b"a copy of the 1st" + bytes([len(given)]), out, stream=stream).stored
    assert given == [None, None, 0, 0, 7, 7]


def test_closing_with_copies_in_flight() -> None:
    device = Gate(4 * MIB)
    store = Store(Hbm(4 * MIB, backend=device), Dram(32 * MIB))
    job = store.prefetch(fill(store, 4), to="hbm")
    assert not job.wait(0.05)
    closer = threading.Thread(target=store.close)
    closer.start()
    assert [result.reason for result in job.result()] == ["cancelled"] * 4
    device.open.set()
    closer.join(30)
    assert not closer.is_alive()
    with pytest.raises(ClosedError):
        device.view(0, 1)
    for verb in (
        lambda: store.get_into([key("a")], [device.empty(1)]),
        lambda: store.lease([key("a")], to="hbm"),
        lambda: store.prefetch([key("a")], to="hbm"),
    ):
        with pytest.raises(ClosedError):
            verb()


def test_memory_is_mapped_for_as_long_as_the_device_knows_it() -> None:
    """A driver that forgot memory which is gone would fail, and one that still copies there kill the process."""

    class Registers(HostBackend):
        memory: Any = None

        def register(self, memory: Any) -> None:
            self.memory = memory

        def close(self) -> None:
            if self.memory is not None:
                sums.append((self.memory.nbytes, int(self.memory[::4096].sum())))
                self.memory = None
            super().close()

    for closed in (True, False):
        sums: list[tuple[int, int]] = []
        store = Store(Hbm(4 * MIB, backend=Registers(4 * MIB)), Dram(8 * MIB))
        fill(store, 4)
        if closed:
            store.close()
        del store
        gc.collect()
        assert sums
        assert sums[0][0] >= 7 * MIB
        assert sums[0][1] > 0


def test_a_lease_outlives_the_store(store: Store) -> None:
    names = fill(store, 1)
    block = store.lease(names, to="hbm").blocks[0]
    store.close()
    gc.collect()
    assert host(block).tobytes() == payload(names[0], MIB)


def test_a_store_that_nobody_closed_ends_its_thread() -> None:
    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "kvtier-hbm"]

    before = len(threads())
    store = Store(Hbm(MIB, backend="host"), Dram(MIB * 8))
    assert len(threads()) == before + 1
    cache = store.namespace(b"model")
    (name,) = fill(cache, 1)
    del store
    gc.collect()
    assert cache.prefetch([name], to="hbm").result()[0].hit  # it lives on in its namespace
    del cache
    gc.collect()
    assert len(threads()) == before


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_is_refused() -> None:
    with Store(Hbm(4 * MIB, backend="host"), Dram(32 * MIB)) as store:
        names = fill(store, 2)
        lease = store.lease(names[:1], to="hbm")
        device: Any = store.device
        child = os.fork()
        if child == 0:
            good = 0
            for verb in (
                lambda: store.get_into(names, [device.empty(MIB) for _ in names]),
                lambda: store.lease(names, to="hbm"),
                lambda: store.prefetch(names, to="hbm"),
            ):
                try:
                    verb()
                except ClosedError:
                    good += 1
            lease.release()
            store.close()
            os._exit(0 if good == 3 else 1)
        ended = time.monotonic() + 60
        while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < ended:
            time.sleep(0.01)
        assert done == (child, 0)
        assert store.prefetch(names, to="hbm").result() == [Result(True, "hbm")] * 2
        lease.release()


def test_blocks_on_nvme_go_up_by_way_of_memory(tmp_path: Path) -> None:
    with Store(Dram(32 * MIB), Nvme(tmp_path, 64 * MIB)) as store:
        names = fill(store, 12)
    with Store(Hbm(16 * MIB, backend="host"), Dram(8 * MIB), Nvme(tmp_path, 64 * MIB)) as store:
        device: Any = store.device
        assert store.prefetch(names, to="hbm").result() == [Result(True, "hbm")] * 12
        store.flush()
        outs = [device.empty(MIB) for _ in names]
        assert store.get_into(names, outs) == [Result(True, "hbm")] * 12
        assert [out.tobytes() for out in outs] == [payload(name, MIB) for name in names]


def test_cold_blocks_are_read_into_device_arrays_that_memory_does_not_hold_at_once(tmp_path: Path) -> None:
    with Store(Dram(32 * MIB), Nvme(tmp_path, 256 * MIB)) as store:
        names = fill(store, 20)
    with Store(Hbm(MIB, backend="host"), Dram(8 * MIB), Nvme(tmp_path, 256 * MIB)) as store:
        device: Any = store.device
        outs = [device.empty(MIB) for _ in names]
        assert all(store.get_into(names, outs))
        assert [out.tobytes() for out in outs] == [payload(name, MIB) for name in names]


def test_without_the_tier_it_says_what_to_do(tmp_path: Path) -> None:
    device = HostBackend(MIB)
    with Store(Dram(8 * MIB)) as store:
        assert store.device is None
        for verb in (lambda: store.prefetch([key("a")], to="hbm"), lambda: store.lease([key("a")], to="hbm")):
            with pytest.raises(UnsupportedError, match=r"open it with Hbm\(\.\.\.\) in front"):
                verb()
        with pytest.raises(UnsupportedError, match="to='tape'"):
            store.lease([key("a")], to="tape")
    with pytest.raises(ConfigError, match="DRAM tier"):
        Store(Hbm(MIB, backend="host"), Nvme(tmp_path, 64 * MIB))
    with pytest.raises(ConfigError, match="make them equal"):
        Store(Hbm(2 * MIB, backend=device), Dram(8 * MIB))
    device.close()


def test_cuda_that_is_not_there_says_what_was_found(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvtier.tiers.cuda.missing", lambda device=0: "CuPy cannot be imported (no module)")
    with pytest.raises(UnsupportedError, match="CuPy cannot be imported"):
        Store(Hbm(MIB, backend="cuda"), Dram(8 * MIB))
    assert not caplog.records
    with Store(Hbm(MIB), Dram(8 * MIB)) as store:
        assert isinstance(store.device, HostBackend)
        assert isinstance(store.device, DeviceBackend)
        assert store.stats()["tiers"]["hbm"]["device"] == "host"
        assert "backend='host'" in repr(store)
    (warned,) = caplog.messages
    assert "1 MiB of this process's memory, not of a GPU's: CuPy cannot be imported (no module)" in warned
    with Store(Hbm(MIB, backend="host"), Dram(8 * MIB)):
        assert len(caplog.records) == 1, "who asks for the host gets it in silence"


def test_the_settings_of_the_tier(tmp_path: Path) -> None:
    path = tmp_path / "store.toml"
    text = "[[tier]]\nkind = 'hbm'\nsize = '2MiB'\nbackend = 'host'\n[[tier]]\nkind = 'dram'\nsize = '8MiB'\n"
    path.write_text(text)
    assert StoreConfig.from_toml(path) == StoreConfig((Hbm("2MiB", backend="host"), Dram("8MiB")))
    with Store.from_toml(path) as store:
        assert store.stats()["tiers"]["hbm"]["size_bytes"] == 2 * MIB
    path.write_text(text.replace("backend = 'host'", "device = 3"))
    assert StoreConfig.from_toml(path).tiers[0] == Hbm("2MiB", device=3)
    for wrong in ({"device": -1}, {"device": True}, {"backend": "tpu"}, {"backend": 3}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Hbm("1MiB", **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="in the order Hbm, Dram"):
        StoreConfig((Dram("8MiB"), Hbm("2MiB")))
