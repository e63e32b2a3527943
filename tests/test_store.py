"""`kvtier.store` and `kvtier.namespace`: every verb of a store and a namespace, its waits and its errors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtier
from blocks import KIB, MIB, fill, key, keys, payload, slow_store
from kvtier import (
    ConfigError,
    DeadlineError,
    Dram,
    FullError,
    InvalidBlockError,
    KVLayout,
    Match,
    Namespace,
    Nvme,
    PutResult,
    Result,
    Store,
    UnsupportedError,
)

LAYOUT = KVLayout(4, "gqa", kv_heads=2, head_dim=16, dtype="fp16", block_tokens=8)
BLOCK = LAYOUT.block_bytes


def cold(
    tiers: tuple[Dram, Nvme], count: int, size: int, emulate_gbs: float | None = None
) -> tuple[Store, list[bytes]]:
    """A store whose blocks lie on NVMe only; ``emulate_gbs`` makes them slow to read."""
    with Store(*tiers) as store:
        names = fill(store, count, size)
    dram, nvme = tiers
    return Store(dram, Nvme(nvme.path, nvme.size, emulate_gbs=emulate_gbs)), names


@pytest.fixture
def cache(store: Store) -> Namespace:
    return store.namespace(b"model", LAYOUT)


@pytest.fixture
def full(store: Store) -> Iterator[tuple[Store, list[bytes], kvtier.Lease]]:
    """A store that has no room, since all of its blocks are leased."""
    names = fill(store, 15)
    with store.lease(names) as lease:
        yield store, names, lease


# put


def test_put_and_get(store: Store) -> None:
    name = key("a")
    assert store.put(name, b"x" * 5000) == PutResult(True, False, "dram", None)
    assert store.put(name, b"x" * 5000) == PutResult(False, True, "dram", None)
    data = store.get(name)
    assert data is not None
    assert (data.dtype, data.shape, data.tobytes()) == (np.uint8, (5000,), b"x" * 5000)
    assert store.get(key("b")) is None


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 15 * MIB])
def test_blocks_of_any_size(store: Store, size: int) -> None:
    name = key(size)
    assert store.put(name, payload(name, size)).stored
    data = store.get(name)
    assert data is not None
    assert data.tobytes() == payload(name, size)


@pytest.mark.parametrize("length", [16, 17, 64])
def test_keys_of_any_length(store: Store, length: int) -> None:
    assert store.put(bytes(length), b"a").stored
    assert store.contains([bytes(length), bytes(length - 1) + b"\1"]) == [True, False]


def test_put_many_gives_a_result_a_key(store: Store) -> None:
    names = keys(5)
    store.put(names[2], b"2")
    results = store.put_many(names, [b"%d" % i for i in range(5)], parents=[None, *names[:4]], importance=range(5))
    assert [(r.stored, r.present, r.tier) for r in results] == [(i != 2, i == 2, "dram") for i in range(5)]
    assert store.put_many([], []) == []


def test_put_many_takes_an_iterator(store: Store) -> None:
    names = keys(3)
    assert all(r.stored for r in store.put_many(names, (name * 10 for name in names)))
    assert [store.get(name).tobytes() for name in names] == [name * 10 for name in names]  # type: ignore[union-attr]


def test_a_block_without_its_parent_is_not_stored(store: Store) -> None:
    result = store.put(key("child"), b"a", parent=key("parent"))
    assert result == PutResult(False, False, None, "parent")
    assert store.contains([key("child")]) == [False]
    assert store.stats()["orphans"] == 1
    results = store.put_many(keys(2), [b"a", b"b"], parents=[key("parent"), keys(2)[0]])
    assert [r.reason for r in results] == ["parent", "parent"]


def test_another_size_under_the_same_key_is_refused(store: Store) -> None:
    store.put(key("a"), b"12345")
    with pytest.raises(InvalidBlockError, match="4 bytes was given under a key that holds 5 bytes"):
        store.put(key("a"), b"1234")
    assert store.get(key("a")).tobytes() == b"12345"  # type: ignore[union-attr]


def test_no_room(full: tuple[Store, list[bytes], kvtier.Lease]) -> None:
    store, names, lease = full
    before = store.stats()["tiers"]["dram"]["used_bytes"]
    with pytest.raises(FullError, match="no room for"):
        store.put(key("more"), bytes(MIB), timeout=0)
    with pytest.raises(DeadlineError, match="before the deadline"):
        store.put(key("more"), bytes(MIB), timeout=0.01)
    many = store.put_many([names[0], key("more"), key("small")], [payload(names[0], MIB), bytes(MIB), b"s"], timeout=0)
    assert [r.reason for r in many] == [None, "full", None]
    assert many[0].present
    late = store.put_many([key("more")], [bytes(MIB)], timeout=0.01)
    assert late == [PutResult(False, False, None, "deadline")]
    # Nothing was lost, and there is room as soon as there are no leases.
    assert all(store.contains(names))
    assert store.stats()["tiers"]["dram"]["used_bytes"] <= before + 4096
    lease.release()
    assert store.put(key("more"), bytes(MIB), timeout=0).stored


def test_a_put_that_waits_goes_on_when_a_lease_ends(full: tuple[Store, list[bytes], kvtier.Lease]) -> None:
    store, _, lease = full
    results: list[PutResult] = []
    waiting = threading.Thread(target=lambda: results.append(store.put(key("more"), bytes(MIB))))
    waiting.start()
    lease.release()
    waiting.join(30)
    assert [r.stored for r in results] == [True]


def test_a_block_larger_than_the_store(store: Store) -> None:
    with pytest.raises(FullError, match="Use a larger tier or smaller blocks"):
        store.put(key("a"), bytes(17 * MIB), timeout=0)
    with pytest.raises(InvalidBlockError, match="1 to 268435456 bytes"):
        store.put(key("a"), b"")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_importance_must_be_a_finite_number(store: Store, bad: float) -> None:
    with pytest.raises(InvalidBlockError, match="at least 0"):
        store.put(key("a"), b"a", importance=bad)
    store.put(key("b"), b"b", importance=3.5)
    with pytest.raises(InvalidBlockError, match="at least 0"):
        store.set_importance([key("b")], [bad])
    assert store.contains([key("a"), key("b")]) == [False, True]


def test_importance(store: Store) -> None:
    store.put(key("a"), b"a")
    assert store.set_importance([key("a"), key("b")], [1, 2.5]) == [True, False]
    with pytest.raises(InvalidBlockError, match="1 scores were given for 2 keys"):
        store.set_importance([key("a"), key("b")], [1])


# Partial blocks


def test_a_partial_block_is_replaced_by_the_full_one(cache: Namespace) -> None:
    tokens = np.arange(20)
    partial = cache.chain(tokens[:18], partial=True)
    whole = cache.chain(np.arange(24))
    assert partial[:2] == whole[:2]
    assert partial[2] != whole[2]
    datas = [bytes([i]) * BLOCK for i in range(3)]
    tail = datas[2][: 2 * LAYOUT.bytes_per_token]
    results = cache.put_many(partial, [*datas[:2], tail], parents=[None, *partial[:2]])
    assert all(r.stored for r in results)
    assert cache.match(partial) == Match(3, 18, ["dram"] * 3, {"dram": 2 * BLOCK + len(tail)})
    assert cache.put(whole[2], datas[2], parent=whole[1], replaces=partial[2]).stored
    assert cache.contains([*whole, partial[2]]) == [True, True, True, False]
    assert cache.match(whole).tokens == 24


def test_a_block_that_replaces_itself_or_nothing(store: Store) -> None:
    assert store.put(key("a"), b"a", replaces=key("a")).stored
    assert store.put(key("b"), b"b", replaces=key("c")).stored
    assert store.contains([key("a"), key("b")]) == [True, True]


def test_what_is_not_stored_replaces_nothing(store: Store) -> None:
    store.put(key("old"), b"old")
    assert store.put(key("new"), b"new", parent=key("nowhere"), replaces=key("old")).reason == "parent"
    assert store.contains([key("old")]) == [True]


# Reading


def test_match_stops_at_the_first_gap(cache: Namespace) -> None:
    names = cache.chain(np.arange(5 * 8))
    cache.put_many(names[:2], [bytes(BLOCK)] * 2, parents=[None, names[0]])
    cache.put(names[3], bytes(BLOCK))
    assert cache.contains(names) == [True, True, False, True, False]
    assert cache.match(names) == Match(2, 16, ["dram", "dram"], {"dram": 2 * BLOCK})
    assert cache.match([]) == cache.match(names[2:]) == Match(0, 0, [], {})


def test_ranges_of_layers_and_tokens(cache: Namespace) -> None:
    block = np.random.default_rng(1).integers(0, 2**16, LAYOUT.shape(), np.uint16)
    cache.put(key("a"), block)
    for layers in [None, range(1, 3), (0, 4), slice(3, 4), range(2, 2), (np.int64(1), np.int64(2))]:
        for tokens in [None, range(3), (2, 8), slice(7, 8), (8, 8)]:
            expected = block[slice(*_ends(layers, 4)), :, slice(*_ends(tokens, 8))]
            got = cache.get(key("a"), layers=layers, tokens=tokens)
            assert got is not None
            assert got.tobytes() == expected.tobytes()
            out = np.zeros(expected.shape, np.uint16)
            assert cache.get_into([key("a")], [out.reshape(-1)], layers=layers, tokens=tokens)[0].hit
            assert (out == expected).all()


def test_tokens_of_each_block_s_own_go_where_they_lie_and_the_rest_stays(cache: Namespace, store: Store) -> None:
    """From memory, against indexing; only what is copied counts as read."""
    random, names = np.random.default_rng(2), keys(5)
    blocks = random.integers(0, 2**16, (5, *LAYOUT.shape()), np.uint16)
    assert all(result.stored for result in cache.put_many(names, list(blocks)))
    wanted = random.random((5, 8)) < 0.5
    wanted[1], wanted[2] = True, False
    for layers in [None, range(1, 3), (3, 4)]:
        span = slice(*_ends(layers, 4))
        outs = random.integers(0, 2**16, blocks[:, span].shape, np.uint16)
        expected = np.where(wanted[:, None, None, :, None, None], blocks[:, span], outs)
        before = store.stats()["tiers"]["dram"]["hit_bytes"]
        rows = list(outs.reshape(5, -1))
        assert all(cache.get_into(names, rows, layers=layers, tokens=wanted))
        assert (outs == expected).all()
        read = store.stats()["tiers"]["dram"]["hit_bytes"] - before
        assert read == wanted.sum() * LAYOUT.bytes_per_token * (span.stop - span.start) // 4
    # A block that is not full has no more tokens than it has.
    short = key("short")
    assert cache.put(short, blocks[0, :, :, :3].copy()).stored
    out = np.zeros_like(blocks[0, :, :, :3])
    assert all(cache.get_into([short], [out], tokens=np.arange(8)[None] == 1))
    assert (out[:, :, 1] == blocks[0, :, :, 1]).all()
    assert not out[:, :, [0, 2]].any()
    with pytest.raises(InvalidBlockError, match=r"this block has layers 0\.\.4 and tokens 0\.\.3"):
        cache.get_into([short], [out], tokens=np.ones((1, 8), np.bool_))


@pytest.mark.parametrize(
    "tokens", [np.ones((1, 8), np.bool_), np.ones((2, 7), np.bool_), np.ones((2, 8), np.uint8), np.ones(16, np.bool_)]
)
def test_flags_that_are_not_one_a_token_are_refused(cache: Namespace, tokens: Any) -> None:
    with pytest.raises(InvalidBlockError, match=r"bool\[keys, (8|block_tokens)\]"):
        cache.get_into(keys(2), [bytearray(BLOCK), bytearray(BLOCK)], tokens=tokens)


def test_bytes_without_tokens_have_no_flags(store: Store) -> None:
    assert store.put(key("a"), b"bytes").stored
    with pytest.raises(InvalidBlockError, match="an opaque block has no tokens"):
        store.get_into([key("a")], [bytearray(5)], tokens=np.ones((1, 16), np.bool_))


def _ends(span: Any, count: int) -> tuple[int, int]:
    if span is None:
        return 0, count
    return (span[0], span[1]) if isinstance(span, tuple) else (span.start, span.stop)


@pytest.mark.parametrize(
    "span", [range(0, 8, 2), slice(0, 4, 2), (1, 2, 3), (-1, 2), (0, 2**32), ("a", "b"), 3, slice(None, 2), (0.0, 1.0)]
)
def test_what_is_no_range_is_refused(cache: Namespace, span: Any) -> None:
    cache.put(key("a"), bytes(BLOCK))
    for name in ("layers", "tokens"):
        with pytest.raises(InvalidBlockError, match=f"{name}=.* was given; allowed are range"):
            cache.get(key("a"), **{name: span})


def test_a_range_outside_the_block_is_refused(cache: Namespace, store: Store) -> None:
    cache.put(key("a"), bytes(BLOCK))
    with pytest.raises(InvalidBlockError, match=r"this block has layers 0\.\.4 and tokens 0\.\.8"):
        cache.get(key("a"), layers=(0, 5))
    with pytest.raises(InvalidBlockError, match=r"tokens 4\.\.2"):
        cache.get_into([key("a")], [bytearray(10)], tokens=(4, 2))
    store.put(key("b"), bytes(BLOCK))
    with pytest.raises(InvalidBlockError, match="An opaque layout has neither"):
        store.get(key("b"), layers=(0, 1))


def test_get_into_gives_a_result_a_key(store: Store) -> None:
    names = keys(3)
    store.put(names[0], b"aaaa")
    store.put(names[2], b"cc")
    outs = [bytearray(4), bytearray(9), bytearray(2)]
    results = store.get_into(names, outs)
    assert results == [Result(True, "dram"), Result(False, None, "absent"), Result(True, "dram")]
    assert [bool(r) for r in results] == [True, False, True]
    assert (outs[0], outs[2]) == (b"aaaa", b"cc")
    assert store.get_into([], []) == []
    stats = store.stats()
    assert (stats["tiers"]["dram"]["hits"], stats["misses"]) == (2, 1)


def test_reads_from_nvme(tiers: tuple[Dram, Nvme]) -> None:
    store, names = cold(tiers, 8, 300 * KIB)
    with store:
        assert store.match(names) == Match(8, 0, ["nvme"] * 8, {"nvme": 8 * 300 * KIB})
        outs = [bytearray(300 * KIB) for _ in names]
        assert store.get_into(names, outs) == [Result(True, "nvme")] * 8
        assert outs == [payload(name, 300 * KIB) for name in names]
        assert store.get_into(names, outs) == [Result(True, "dram")] * 8
        assert store.stats()["loads"] == 8


def test_a_load_that_takes_too_long(tiers: tuple[Dram, Nvme]) -> None:
    store, names = slow_store(*tiers, count=2)
    with store:
        out = bytearray(64 * KIB)
        assert store.get_into(names[:1], [out], timeout=0) == [Result(False, None, "deadline")]
        assert store.get(names[1], timeout=0) is None
        lease = store.lease(names[1:], timeout=0)
        assert (lease.views, lease.reasons) == ([None], ["deadline"])
        assert store.pin(names[1:], timeout=0) == [False]
        job = store.prefetch(names, deadline=0)
        assert {r.reason for r in job.result()} == {"deadline"}
        # A deadline loses nothing.
        assert store.get_into(names[:1], [out]) == [Result(True, "nvme")] or out == payload(names[0], 64 * KIB)
        assert out == payload(names[0], 64 * KIB)


def test_no_room_to_load_into(tiers: tuple[Dram, Nvme]) -> None:
    store, names = cold(tiers, 16, MIB)
    with store, store.lease(names[:15]) as lease:
        assert lease.reasons == [None] * 15
        (result,) = store.get_into(names[15:], [bytearray(MIB)], timeout=0)
        assert result == Result(False, None, "full")
        lease.release()
        assert store.get(names[15]) is not None


# Leases


def test_leases(store: Store) -> None:
    names = keys(3)
    store.put_many(names[:2], [b"first", b"second"])
    with store.lease(names) as lease:
        assert len(lease) == 3
        assert lease.reasons == [None, None, "absent"]
        assert [view and bytes(view) for view in lease.views] == [b"first", b"second", None]
        assert [block and (block.nbytes, block.tier) for block in lease.blocks] == [(5, "dram"), (6, "dram"), None]
        assert all(view.readonly for view in lease.views if view is not None)
    assert lease.views == lease.blocks == []
    lease.release()


def test_a_lease_keeps_its_bytes_whatever_happens(store: Store) -> None:
    names = fill(store, 3)
    lease = store.lease(names, verify=True)
    view = lease.views[0]
    array = np.from_dlpack(lease.blocks[1])
    assert not array.flags.writeable
    lease.release()
    store.remove(names)
    fill(store, 40, MIB, "others")
    assert view == payload(names[0], MIB)
    assert array.tobytes() == payload(names[1], MIB)


def test_leases_end_after_the_store(tmp_path: Path) -> None:
    store = Store(Dram("16MiB"), Nvme(tmp_path, "32MiB"))
    names = fill(store, 4)
    lease = store.lease(names)
    view = lease.views[0]
    done: list[bool] = []

    def end() -> None:
        done.append([bytes(v) for v in lease.views] == [payload(name, MIB) for name in names])
        lease.release()

    store.close()
    del store
    other = threading.Thread(target=end)
    other.start()
    other.join()
    assert done == [True]
    assert view == payload(names[0], MIB)


class Event:
    """As CUDA's: ``synchronize`` blocks until the copy is done."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.waits = threading.Event()

    def synchronize(self) -> None:
        self.waits.set()
        self.done.wait()


@pytest.mark.parametrize("form", ["synchronize", "wait", "callable"])
def test_a_release_after_an_event(full: tuple[Store, list[bytes], kvtier.Lease], form: str) -> None:
    store, _, lease = full
    event = Event()
    after = {"synchronize": event, "wait": event.done, "callable": event.synchronize}[form]
    lease.release(after=after)
    assert lease.views == []
    if form != "wait":
        assert event.waits.wait(30)
    lease.release()  # changes nothing about the one that waits
    with pytest.raises(FullError):
        store.put(key("more"), bytes(MIB), timeout=0)
    event.done.set()
    assert store.put(key("more"), bytes(MIB)).stored


def test_a_release_after_nothing_that_can_be_waited_for(store: Store) -> None:
    names = fill(store, 1)
    lease = store.lease(names)
    with pytest.raises(ConfigError, match="it needs synchronize"):
        lease.release(after=3)
    assert lease.views[0] == payload(names[0], MIB)


def test_a_scribbled_block_is_a_miss(store: Store) -> None:
    import torch

    (name,) = fill(store, 1)
    with store.lease([name]) as lease:
        torch.from_dlpack(lease.blocks[0])[17] ^= 1
    assert store.lease([name], verify=True).reasons == ["corrupt"]
    assert store.get(name) is None
    assert store.stats()["tiers"]["dram"]["corrupt"] == 1
    assert store.put(name, payload(name, MIB)).stored


# Keeping


def test_pins_hold_as_often_as_they_were_taken(store: Store) -> None:
    (name, *_) = fill(store, 2)
    assert store.pin([name, key("absent")]) == [True, False]
    assert store.pin([name]) == [True]
    for _ in range(2):
        fill(store, 30, MIB, "press", _)
        assert store.contains([name]) == [True]
        assert store.unpin([name, key("absent")]) == [True, False]
    fill(store, 30, MIB, "press again")
    assert store.contains([name]) == [False]
    assert store.unpin([name]) == [False]


def test_a_pin_loads(tiers: tuple[Dram, Nvme]) -> None:
    store, names = cold(tiers, 2, MIB)
    with store:
        assert store.pin(names) == [True, True]
        assert store.match(names).tiers == ["dram", "dram"]


def test_removing_a_block_removes_what_follows_it(store: Store) -> None:
    names = keys(4)
    store.put_many(names, [bytes(5000)] * 4, parents=[None, *names[:3]])
    assert store.remove([names[1], names[3], key("absent")]) == [True, False, False]
    assert store.contains(names) == [True, False, False, False]
    assert store.remove(names[:1]) == [True]
    assert store.stats()["tiers"]["dram"]["used_bytes"] == 0


def test_clear_takes_one_namespace_or_all(tiers: tuple[Dram, Nvme]) -> None:
    with Store(*tiers) as store:
        for number in range(2):
            cache = store.namespace(b"model %d" % number, LAYOUT)
            cache.put_many(keys(5), [bytes(BLOCK)] * 5)
        store.put(key("own"), b"own")
    with Store(*tiers) as store:
        assert store.namespace(b"model 0", LAYOUT).clear() == 5
        assert store.namespace(b"model 1", LAYOUT).contains(keys(5)) == [True] * 5
        assert store.clear() == 6
        store.flush()  # a slot is free once the record that frees it is durable
        assert store.stats()["blocks"] == store.stats()["tiers"]["nvme"]["used_bytes"] == 0
    with Store(*tiers) as store:
        assert store.stats()["blocks"] == 0


def test_flush_makes_durable(tiers: tuple[Dram, Nvme]) -> None:
    with Store(*tiers) as store:
        names = fill(store, 5)
        store.flush()
        stats = store.stats()
        assert stats["tiers"]["nvme"]["blocks"] == stats["tiers"]["dram"]["blocks"] == 5
        assert store.match(names).tiers == ["dram"] * 5
        fill(store, 1, MIB, "more")
        with pytest.raises(DeadlineError, match="before the deadline"):
            store.flush(timeout=0)
        store.flush()
        assert store.stats()["tiers"]["nvme"]["blocks"] == 6


def test_flush_without_a_disk_does_nothing(store: Store) -> None:
    fill(store, 1)
    store.flush(timeout=0)


def test_prefetch(tiers: tuple[Dram, Nvme]) -> None:
    store, names = cold(tiers, 4, MIB)
    with store:
        job = store.prefetch([*names, key("absent")], priority=3)
        assert job.wait(30)
        assert job.done()
        assert job.result() == [Result(True, "dram")] * 4 + [Result(False, None, "absent")]
        job.cancel()
        assert job.result()[0].hit
        assert store.match(names).tiers == ["dram"] * 4
        assert store.prefetch([]).result() == []
        assert store.prefetch(names, to="cxl").result() == [Result(True, "dram")] * 4


def test_a_prefetch_is_cancelled(tiers: tuple[Dram, Nvme]) -> None:
    store, names = slow_store(*tiers, count=4)
    with store:
        job = store.prefetch(names)
        assert not job.wait(0)
        with pytest.raises(DeadlineError, match="it goes on"):
            job.result(timeout=0)
        job.cancel()
        job.cancel()
        assert job.result(timeout=0)[-1] == Result(False, None, "cancelled")


def test_a_prefetch_into_what_is_not_there(store: Store) -> None:
    with pytest.raises(UnsupportedError, match="brought to hbm, dram, cxl"):
        store.prefetch([key("a")], to="tape")


def test_a_whole_block_goes_straight_into_a_region(tiers: tuple[Dram, Nvme]) -> None:
    store, names = cold(tiers, 3, MIB)
    memory = np.zeros(4 * MIB + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    with store:
        region = store.register_region(memory)
        assert region.nbytes == len(memory)
        outs = [memory[start + i * MIB :][:MIB] for i in range(3)]
        assert store.get_into(names, outs) == [Result(True, "nvme")] * 3
        assert [out.tobytes() for out in outs] == [payload(name, MIB) for name in names]
        assert store.match(names).tiers == ["nvme"] * 3, "it went past DRAM"
        assert region.in_flight() == 0


@pytest.mark.parametrize("bad", [b"read-only", np.zeros((4, 4))[:, 1], 3])
def test_what_is_no_region_is_refused(store: Store, bad: Any) -> None:
    with pytest.raises(InvalidBlockError, match="a region is writable contiguous memory"):
        store.register_region(bad)


def test_buffers_that_share_memory_are_refused(store: Store) -> None:
    names = fill(store, 2)
    memory = np.zeros(2 * MIB, np.uint8)
    for outs in ([memory[:MIB]] * 2, [memory[1:][:MIB], memory[:MIB]]):
        with pytest.raises(InvalidBlockError, match="share memory"):
            store.get_into(names, outs)
        with pytest.raises(InvalidBlockError, match="share memory"):
            asyncio.run(store.aget_into(names, outs))
    assert not memory.any()
    outs = [memory[MIB:], memory[:MIB]]
    assert all(result.hit for result in store.get_into(names, outs))
    assert all(result.hit for result in asyncio.run(store.aget_into(names, outs)))


def test_more_memory_than_there_is_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"a Dram tier of .*[KMGT]iB.* was given, and this process may use .*[KMGT]iB"
    ):
        Store(Dram("100TiB"))
