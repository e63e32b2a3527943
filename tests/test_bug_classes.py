"""One test for each class of bugs that users of other stores reported.

Classes tested elsewhere: incomplete identity in ``test_identity.py``; crashes (metadata, visible before durable) in
``test_crash.py`` too; forks and hash seeds (process) in ``test_process.py`` too; dtypes and shapes (layout and dtype) in
``test_buffers.py`` too; the GIL in ``test_process.py``. GPU in
``test_hbm.py`` and ``test_devices.py``; "slower than nothing" has no store to be tested in.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from blocks import KIB, MIB, key, keys, payload, slow_store
from kvtier import DeadlineError, Dram, FullError, InvalidBlockError, KVLayout, Nvme, Result, StorageError, Store
from kvtier._kvtier import check_dirs
from programs import program


def data_file(nvme: Nvme) -> Path:
    return max(nvme.paths[0].iterdir(), key=lambda path: path.stat().st_size)


def damage(nvme: Nvme, data: bytes) -> None:
    """Changes a byte in the middle of where ``data`` lies in the file."""
    path = data_file(nvme)
    at = path.read_bytes().find(data)
    assert at >= 0
    with path.open("r+b") as file:
        file.seek(at + len(data) // 2)
        file.write(bytes([data[len(data) // 2] ^ 1]))


# Visible before durable


def test_visible_before_durable_a_put_that_fails_is_not_there(store: Store) -> None:
    """A failed store must not stay in the index."""
    names = keys(15)
    store.put_many(names, [bytes(MIB)] * 15)
    with store.lease(names), pytest.raises(FullError):
        store.put(key("more"), bytes(MIB), timeout=0)
    assert store.contains([key("more")]) == [False]
    assert store.match([key("more")]).blocks == 0
    assert store.get(key("more")) is None


def test_visible_before_durable_nobody_sees_half_a_block(store: Store) -> None:
    """Readers poll while writers store and remove: a block that is listed is complete."""
    names = keys(4)
    datas = [payload(name, 2 * MIB) for name in names]
    stop = threading.Event()
    seen = 0

    def write() -> None:
        for turn in range(60):
            store.put(names[turn % 4], datas[turn % 4])
            store.remove([names[(turn + 2) % 4]])
        stop.set()

    writer = threading.Thread(target=write)
    writer.start()
    out = bytearray(2 * MIB)
    while not stop.is_set() or seen == 0:
        for name, data in zip(names, datas, strict=True):
            if store.get_into([name], [out])[0].hit:
                seen += 1
                assert out == data
    writer.join()


def test_visible_before_durable_a_restart_has_what_was_flushed(tiers: tuple[Dram, Nvme]) -> None:
    """A key that is listed has its value."""
    text = """
import os, sys
from blocks import *
from kvtier import *
store = Store(Dram("16MiB"), Nvme(sys.argv[1], "64MiB"))
for name in keys(10):
    store.put(name, payload(name, 100 * KIB))
store.flush()
for name in keys(10, "later"):
    store.put(name, payload(name, 100 * KIB))
os._exit(0)
"""
    program(text, tiers[1].path).check_returncode()
    with Store(*tiers) as store:
        assert store.contains(keys(10)) == [True] * 10
        for name in [*keys(10), *keys(10, "later")]:
            data = store.get(name)
            assert (data is not None) == store.contains([name])[0]
            assert data is None or data.tobytes() == payload(name, 100 * KIB)


# Dropped status


def test_dropped_status_a_damaged_block_is_a_miss_once_and_gone(tiers: tuple[Dram, Nvme]) -> None:
    """A failed transfer is never counted as done, and a failed load takes back the answer that led to it."""
    names = keys(4)
    datas = [payload(name, 200 * KIB) for name in names]
    with Store(*tiers) as store:
        store.put_many(names, datas, parents=[None, names[0], names[1], None])
    damage(tiers[1], datas[1])
    with Store(*tiers) as store:
        assert store.contains(names) == [True] * 4
        outs = [bytearray(200 * KIB) for _ in names]
        results = store.get_into(names, outs)
        assert results[0].hit
        assert results[1] == Result(False, None, "corrupt")
        assert results[3].hit
        assert (outs[0], outs[3]) == (datas[0], datas[3])
        # The request comes again: a plain miss now, with what followed it, and then the block can be stored anew.
        assert store.contains(names) == [True, False, False, True]
        assert store.get_into(names[1:2], outs[1:2]) == [Result(False, None, "absent")]
        assert store.stats()["tiers"]["nvme"]["corrupt"] == 1
        assert store.put(names[1], datas[1], parent=names[0]).stored
        assert store.get(names[1]).tobytes() == datas[1]  # type: ignore[union-attr]
    (report,) = check_dirs([*tiers[1].paths], False)
    assert report["corrupt"] == 0


@pytest.mark.parametrize("verb", ["get", "lease", "prefetch", "pin", "aget"])
def test_dropped_status_every_way_of_reading(verb: str, tiers: tuple[Dram, Nvme]) -> None:
    name = key("a")
    with Store(*tiers) as store:
        store.put(name, payload(name, 200 * KIB))
    damage(tiers[1], payload(name, 200 * KIB))
    with Store(*tiers) as store:
        if verb == "get":
            assert store.get(name) is None
        elif verb == "lease":
            assert store.lease([name]).reasons == ["corrupt"]
        elif verb == "prefetch":
            assert store.prefetch([name]).result() == [Result(False, None, "corrupt")]
        elif verb == "pin":
            assert store.pin([name]) == [False]
        else:
            assert asyncio.run(store.aget(name)) is None
        assert store.contains([name]) == [False]


# No deadline


def test_no_deadline_every_wait_ends(tiers: tuple[Dram, Nvme]) -> None:
    """Nothing waits for ever for a disk that is busy for a second, or for room that nobody makes."""
    store, names = slow_store(*tiers, count=3)
    out = bytearray(64 * KIB)
    assert store.get(names[0], timeout=0) is None
    assert store.get_into(names[:1], [out], timeout=0)[0].reason == "deadline"
    assert store.lease(names[1:2], timeout=0).reasons == ["deadline"]
    assert store.pin(names[1:2], timeout=0) == [False]
    assert store.prefetch(names, deadline=0).result()[2].reason == "deadline"
    assert not store.prefetch(names).wait(0)
    store.put(key("dirty"), bytes(KIB))
    with pytest.raises(DeadlineError):
        store.flush(timeout=0)
    with store.lease([key("slow", 3)]), pytest.raises((DeadlineError, FullError)):
        store.put(key("large"), bytes(15 * MIB + 512 * KIB), timeout=0)
    store.close()


# Reuse in flight


def test_reuse_in_flight_a_late_read_does_not_hit_reused_memory(tiers: tuple[Dram, Nvme]) -> None:
    """Reads whose caller gave up complete into memory that is still theirs, while other blocks fill the arena."""
    store, names = slow_store(*tiers, count=8)
    with store:
        outs = [bytearray(64 * KIB) for _ in names]
        store.get_into(names, outs, timeout=0)
        before = [bytes(out) for out in outs]
        store.remove(names[:4])
        others = keys(10, "others")
        for name in others:
            assert store.put(name, payload(name, MIB)).stored
        job = store.prefetch(names[4:])
        assert [result.hit for result in job.result()] == [True] * 4
        for name in others:
            data = store.get(name)
            assert data is None or data.tobytes() == payload(name, MIB)
        for name in names[4:]:
            assert store.get(name).tobytes() == payload(name, 64 * KIB)  # type: ignore[union-attr]
        assert [bytes(out) for out in outs] == before, "a caller's buffer is its own after the call"
        assert store.get(names[0]) is None
        store.clear()


def test_reuse_in_flight_a_lease_outlives_removal_and_reuse(store: Store) -> None:
    names = keys(3)
    store.put_many(names, [payload(name, MIB) for name in names])
    lease = store.lease(names)
    store.clear()
    for turn in range(60):
        store.put(key("others", turn), bytes(MIB))
    assert [bytes(view) for view in lease.views] == [payload(name, MIB) for name in names]


def test_reuse_in_flight_a_region_knows_its_reads(tiers: tuple[Dram, Nvme]) -> None:
    store, names = slow_store(*tiers, count=2)
    memory = np.zeros(256 * KIB, np.uint8)
    out = memory[-memory.ctypes.data % 4096 :][: 64 * KIB]
    with store:
        region = store.register_region(memory)
        assert region.in_flight() == 0
        assert store.get_into(names[:1], [out], timeout=0)[0].reason == "deadline"
        assert region.in_flight() > 0
        while region.in_flight():
            assert store.get_into(names[1:], [bytearray(64 * KIB)])[0].hit
        assert not out.any() or out.tobytes() == payload(names[0], 64 * KIB)


# Short transfers


def test_short_transfers_a_file_that_ends_too_early(tiers: tuple[Dram, Nvme]) -> None:
    """A read that gets fewer bytes than it asked for is an error, not a success."""
    name = key("a")
    with Store(*tiers) as store:
        store.put_many(keys(40), [payload(k, MIB // 2) for k in keys(40)])
        store.flush()
        store.put(name, payload(name, MIB))
    with Store(*tiers) as store:
        path = data_file(tiers[1])
        at = path.read_bytes().find(payload(name, MIB))
        os.truncate(path, at + 4096)
        (result,) = store.get_into([name], [bytearray(MIB)])
        assert result.reason in ("device", "corrupt")
        assert store.contains([name]) == [False]
        os.truncate(path, 64 * MIB)


# Leaks


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_leaks_a_thousand_stores(tmp_path: Path) -> None:
    """Neither descriptors nor threads nor memory stay behind."""

    def cycle() -> None:
        with Store(Dram("1MiB", prefault=False)) as store:
            store.put(key("a"), b"a")
            store.lease([key("a")]).release()

    def cycle_on_disk(turn: int) -> None:
        with Store(Dram("1MiB"), Nvme(tmp_path, "4MiB", engine="threads" if turn % 2 else "auto")) as store:
            store.put(key(turn), b"a")

    for turn in range(10):
        cycle()
        cycle_on_disk(turn)
    gc.collect()
    before = descriptors(), len(list(Path("/proc/self/task").iterdir()))
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for turn in range(1000):
        cycle()
        if turn % 20 == 0:
            cycle_on_disk(turn)
    gc.collect()
    assert descriptors() <= before[0]
    assert len(list(Path("/proc/self/task").iterdir())) <= before[1] + 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < size + 200 * KIB


def test_leaks_pins_end_with_their_leases(store: Store) -> None:
    """Lookups, errors, forgotten leases and removals leave no pin: all the memory can be used again."""
    names = keys(14)
    for turn in range(5):
        store.put_many(names, [bytes(MIB)] * 14)
        store.lease(names)
        store.match(names)
        lease = store.lease([*names, key("absent")], verify=True)
        np.from_dlpack(lease.blocks[0])
        torch.from_dlpack(lease.blocks[1])
        del lease
        with pytest.raises(InvalidBlockError):
            store.get_into(names, [bytearray(MIB)] * 13 + [bytearray(1)])
        with pytest.raises(InvalidBlockError):
            store.lease([*names, b"short"])
        gc.collect()
        assert store.put(key("large", turn), bytes(15 * MIB), timeout=0).stored
        store.clear()
    assert store.stats()["tiers"]["dram"]["used_bytes"] == 0


def test_leaks_a_removed_block_is_not_pinned_any_more(store: Store) -> None:
    name = key("a")
    store.put(name, bytes(MIB))
    store.pin([name])
    store.remove([name])
    assert store.stats()["tiers"]["dram"]["used_bytes"] == 0
    store.put(name, bytes(MIB))
    assert store.pin([name]) == [True]
    store.put_many(keys(40), [bytes(MIB)] * 40)
    assert store.contains([name]) == [True], "the pin is the new block's"


def test_leaks_nothing_in_dev_shm(tiers: tuple[Dram, Nvme]) -> None:
    before = set(os.listdir("/dev/shm"))  # noqa: PTH208
    store = Store(*tiers)
    store.put(key("a"), b"a")
    assert set(os.listdir("/dev/shm")) <= before  # noqa: PTH208
    store.close()


# Accounting


def test_accounting_remove_lowers_the_used_size(tiers: tuple[Dram, Nvme]) -> None:
    with Store(*tiers) as store:
        for turn in range(20):
            names = keys(10, turn)
            store.put_many(names, [bytes(MIB)] * 10)
            store.flush()
            used = store.stats()["tiers"]
            assert used["dram"]["used_bytes"] == used["nvme"]["used_bytes"] == 10 * MIB
            assert store.remove(names) == [True] * 10
            store.flush()
            used = store.stats()["tiers"]
            assert used["dram"]["used_bytes"] == used["nvme"]["used_bytes"] == 0
        assert sum(tier["evictions"] for tier in store.stats()["tiers"].values()) == 0, "live keys were evicted"


def test_accounting_usage_right_after_a_restart(tiers: tuple[Dram, Nvme]) -> None:
    with Store(*tiers) as store:
        store.put_many(keys(12), [payload(name, 300 * KIB) for name in keys(12)])
    with Store(*tiers) as store:
        stats = store.stats()
        assert stats["blocks"] == stats["tiers"]["nvme"]["blocks"] == 12
        assert stats["tiers"]["nvme"]["used_bytes"] >= 12 * 300 * KIB
        assert stats["tiers"]["dram"]["used_bytes"] == 0


def test_accounting_the_disk_is_bounded(tmp_path: Path) -> None:
    """Ten times the capacity goes through, and the directory never grows."""
    nvme = Nvme(tmp_path / "kv", "16MiB")
    with Store(Dram("4MiB"), nvme, policy="lru-leaf") as store:
        size = sum(path.stat().st_size for path in nvme.paths[0].iterdir())
        for turn in range(160):
            name = key(turn)
            assert store.put(name, payload(name, MIB)).stored
        store.flush()
        assert sum(path.stat().st_size for path in nvme.paths[0].iterdir()) == size <= 16 * MIB + 4096
        stats = store.stats()["tiers"]["nvme"]
        assert 10 * MIB < stats["used_bytes"] <= stats["capacity_bytes"] <= 16 * MIB
        assert stats["evictions"] > 100


# Metadata


def test_metadata_free_space_follows_from_the_entries(tiers: tuple[Dram, Nvme]) -> None:
    """After many restarts with removals all of the space is still there."""
    for turn in range(12):
        with Store(*tiers) as store:
            assert store.stats()["tiers"]["nvme"]["used_bytes"] == (0 if turn == 0 else 5 * MIB)
            store.clear()
            store.put_many(keys(10, turn), [bytes(MIB)] * 10)
            store.flush()
            store.remove(keys(10, turn)[::2])
    with Store(*tiers) as store:
        store.clear()
        store.flush()
        assert store.stats()["tiers"]["nvme"]["used_bytes"] == 0
        names = keys(60)
        for name in names:
            store.put(name, payload(name, MIB))
        store.flush()
        assert sum(store.contains(names)) == 60


def test_metadata_a_new_format_forgets_the_old_journal(tmp_path: Path) -> None:
    """Nothing of a former life is applied to a file that was made anew."""
    nvme = Nvme(tmp_path / "kv", "16MiB")
    with Store(Dram("4MiB"), nvme) as store:
        store.put_many(keys(20), [payload(name, 64 * KIB) for name in keys(20)])
    old = data_file(nvme).read_bytes()
    data_file(nvme).unlink()
    with Store(Dram("4MiB"), nvme) as store:
        assert store.stats()["blocks"] == 0
        store.put(key("new"), b"new")
    new = bytearray(data_file(nvme).read_bytes())
    # The old journal behind the new superblocks: its records are those of another life.
    differs = [at for at in range(2 * 4096, len(new), 4096) if not any(new[at : at + 4096])]
    for at in differs:
        new[at : at + 4096] = old[at : at + 4096]
    data_file(nvme).write_bytes(new)
    with Store(Dram("4MiB"), nvme) as store:
        assert store.contains(keys(20)) == [False] * 20
        assert store.get(key("new")).tobytes() == b"new"  # type: ignore[union-attr]


# Process


def test_process_a_missing_file_kills_nobody(tiers: tuple[Dram, Nvme]) -> None:
    """The file is unlinked under a living store: it serves on, and the next one starts empty."""
    with Store(*tiers) as store:
        store.put(key("a"), b"a")
        store.flush()
        data_file(tiers[1]).unlink()
        assert store.get(key("a")).tobytes() == b"a"  # type: ignore[union-attr]
        assert store.put(key("b"), b"b").stored
        store.flush()
    with Store(*tiers) as store:
        assert store.stats()["blocks"] == 0
        assert store.put(key("a"), b"a").stored


def test_process_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"not a store's")
    with pytest.raises((StorageError, ValueError)):
        Store(Dram("1MiB"), Nvme(file, "16MiB"))
    assert file.read_bytes() == b"not a store's"


# Layout and dtype


def test_layout_and_dtype_the_same_key_of_another_layout_is_a_miss(store: Store) -> None:
    first = store.namespace(b"model", KVLayout(2, "gqa", kv_heads=2, head_dim=8, block_tokens=4))
    second = store.namespace(b"model", KVLayout(4, "gqa", kv_heads=1, head_dim=8, block_tokens=4))
    assert first.layout.block_bytes == second.layout.block_bytes
    first.put(key("a"), bytes(first.layout.block_bytes))
    assert second.get(key("a")) is None


def test_layout_and_dtype_fp16_over_a_bf16_model(store: Store) -> None:
    cache = store.namespace(b"model", KVLayout(2, "gqa", kv_heads=2, head_dim=8, block_tokens=4))
    block = torch.ones(cache.layout.shape(), dtype=torch.bfloat16)
    assert cache.put(key("a"), block).stored
    attempts: list[Callable[[], object]] = [
        lambda: cache.put(key("b"), block.to(torch.float16)),
        lambda: cache.get_into([key("a")], [torch.empty(cache.layout.shape(), dtype=torch.float16)]),
        lambda: cache.get_into([key("a")], [np.empty(cache.layout.shape(), np.float16)]),
    ]
    for attempt in attempts:
        with pytest.raises(InvalidBlockError, match="this layout takes bf16"):
            attempt()


@pytest.mark.parametrize("engine", ["auto", "io_uring", "threads"])
def test_layout_and_dtype_unaligned_buffers(engine: str, tmp_path: Path) -> None:
    """Sources and targets at odd addresses, of odd sizes, through O_DIRECT."""
    nvme = Nvme(tmp_path / "kv", "64MiB", engine=engine)  # type: ignore[arg-type]
    sizes = [1, 4095, 4097, 65535, 65536, 65537, 300001, MIB + 7]
    memory = np.zeros(2 * MIB, np.uint8)
    with Store(Dram("16MiB"), nvme) as store:
        for size in sizes:
            memory[3 : 3 + size] = np.frombuffer(payload(key(size), size), np.uint8)
            assert store.put(key(size), memory[3 : 3 + size]).stored
    with Store(Dram("16MiB"), nvme) as store:
        store.register_region(memory)
        for size in sizes:
            for shift in (5, -memory.ctypes.data % 4096):
                memory[:] = 0xAA
                out = memory[shift : shift + size]
                assert store.get_into([key(size)], [out])[0].hit
                assert out.tobytes() == payload(key(size), size)
                assert (memory[shift + size :] == 0xAA).all(), "bytes behind the target were written"
                assert (memory[:shift] == 0xAA).all()


# Spin


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_spin_an_idle_store_uses_no_cpu(engine: str, tmp_path: Path) -> None:
    text = """
import json, resource, sys, threading
from blocks import *
from kvtier import *
store = Store(Dram("16MiB"), Nvme(sys.argv[1], "64MiB", engine=sys.argv[2]))
for name in keys(20):
    store.put(name, payload(name, 300 * KIB))
store.flush()
store.prefaulted()
job = store.prefetch([key("absent")], deadline=60)
job.result()
def used():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
before = used()
threading.Event().wait(1)
print(json.dumps(used() - before))
"""
    run = program(text, tmp_path / "kv", engine)
    assert json.loads(run.stdout) < 0.3, "of a second"
