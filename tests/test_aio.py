"""The asyncio twins: no thread a call, and the store keeps a buffer until it is done with it, whatever becomes of the await."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from blocks import KIB, MIB, key, keys, payload, slow_store
from kvtier import (
    ClosedError,
    ConfigError,
    DeadlineError,
    Dram,
    FullError,
    InvalidBlockError,
    KVLayout,
    Nvme,
    PutResult,
    Result,
    Store,
    aio,
)


def fill(store: Store, count: int, size: int) -> list[bytes]:
    names = keys(count)
    for name in names:
        assert store.put(name, payload(name, size)).stored
    return names


@pytest.fixture
def slow(tiers: tuple[Dram, Nvme]) -> Iterator[tuple[Store, list[bytes]]]:
    """A store of four blocks of 64 KiB on a busy disk."""
    store, names = slow_store(*tiers, count=4)
    with store:
        yield store, names


def threads() -> int:
    """All of the process, also those that Python does not know."""
    return len(list(Path("/proc/self/task").iterdir()))


def held(buffer: bytearray) -> bool:
    """Whether anybody has the buffer's memory."""
    try:
        buffer.append(0)
    except BufferError:
        return True
    del buffer[-1]
    return False


async def settled(buffer: bytearray) -> None:
    """Returns when the store has let go of the buffer."""
    while held(buffer):
        await asyncio.sleep(0)


def test_every_twin(tiers: tuple[Dram, Nvme]) -> None:
    async def main() -> None:
        names = keys(4)
        assert await store.aput(names[0], b"0", importance=1) == PutResult(True, False, "dram")
        assert await store.aput(names[0], b"0") == PutResult(False, True, "dram")
        results = await store.aput_many(names[1:3], [b"1", b"2"], parents=names[:2], importance=[1, 2])
        assert [r.stored for r in results] == [True, True]
        assert (await store.aput(names[3], b"3", parent=key("nowhere"))).reason == "parent"
        assert (await store.aget(names[1])).tobytes() == b"1"  # type: ignore[union-attr]
        assert await store.aget(key("absent")) is None
        out = bytearray(1)
        assert await store.aget_into([names[2], key("absent")], [out, bytearray(1)]) == [
            Result(True, "dram"),
            Result(False, None, "absent"),
        ]
        assert out == b"2"
        layout = KVLayout(1, "gqa", kv_heads=1, head_dim=1, dtype="uint8", block_tokens=3)
        cache, out = store.namespace(b"some tokens", layout), bytearray(b"------")
        assert (await cache.aput(names[0], b"kkkvvv")).stored
        flags = np.array([[False, True, False]])
        assert (await cache.aget_into(names[:1], [out], tokens=flags))[0].hit
        assert out == b"-k--v-"
        with await store.alease(names[:2], verify=True) as lease:
            assert [bytes(view) for view in lease.views] == [b"0", b"1"]
        assert await store.apin([names[0], key("absent")]) == [True, False]
        assert store.unpin([names[0]]) == [True]
        assert await store.aprefetch(names[:1]) == [Result(True, "dram")]
        assert await store.prefetch(names[:1]) == [Result(True, "dram")]
        await store.aflush()
        assert store.stats()["tiers"]["nvme"]["blocks"] == 4
        replaced = await store.aput(names[3], b"3", replaces=names[2])
        assert replaced.stored
        assert store.contains(names) == [True, True, False, True]

    with Store(*tiers) as store:
        asyncio.run(main())


def test_reads_from_nvme(tiers: tuple[Dram, Nvme]) -> None:
    with Store(*tiers) as store:
        names = fill(store, 12, 200 * KIB)

    async def main() -> None:
        outs = [bytearray(200 * KIB) for _ in names[:4]]
        data, results, lease, pinned = await asyncio.gather(
            store.aget(names[4]), store.aget_into(names[:4], outs), store.alease(names[5:9]), store.apin(names[9:])
        )
        assert data is not None
        assert data.tobytes() == payload(names[4], 200 * KIB)
        assert all(results)
        assert outs == [payload(name, 200 * KIB) for name in names[:4]]
        assert [bytes(view) for view in lease.views] == [payload(name, 200 * KIB) for name in names[5:9]]
        assert pinned == [True] * 3

    with Store(*tiers) as store:
        asyncio.run(main())
        assert store.stats()["loads"] == 12


def test_thousands_of_awaits_use_no_thread_each(tiers: tuple[Dram, Nvme]) -> None:
    with Store(*tiers) as store:
        names = fill(store, 100, 16 * KIB)

    async def one(i: int) -> bool:
        name = names[i % 100]
        out = bytearray(16 * KIB)
        if i % 3 == 0:
            return (await store.aput(name, payload(name, 16 * KIB))).present
        if i % 3 == 1:
            return (await store.aget_into([name], [out]))[0].hit and out == payload(name, 16 * KIB)
        with await store.alease([name]) as lease:
            return lease.views[0] == payload(name, 16 * KIB)

    async def main() -> None:
        before, of_python = threads(), threading.active_count()
        most = 0
        tasks = [asyncio.create_task(one(i)) for i in range(3000)]
        await asyncio.sleep(0)  # all have started
        while not all(task.done() for task in tasks):
            most = max(most, threads())
            await asyncio.sleep(0)
        assert all(task.result() for task in tasks)
        assert most <= before
        assert threading.active_count() == of_python

    with Store(*tiers) as store:
        assert store.prefaulted()
        asyncio.run(main())


def test_a_cancelled_await_keeps_its_buffer(slow: tuple[Store, list[bytes]]) -> None:
    store, names = slow

    async def main() -> None:
        out = bytearray(64 * KIB)
        task = asyncio.create_task(store.aget_into(names[:1], [out]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert held(out), "the disk is still busy"
        await settled(out)
        assert out == payload(names[0], 64 * KIB), "it was not taken back half way"

    asyncio.run(main())


def test_a_cancelled_put_is_done_or_not(store: Store) -> None:
    async def main() -> None:
        names = keys(200)
        buffers = [bytearray(payload(name, 32 * KIB)) for name in names]
        tasks = [asyncio.create_task(store.aput(name, b)) for name, b in zip(names, buffers, strict=True)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for buffer in buffers:
            await settled(buffer)
        for name, there in zip(names, store.contains(names), strict=True):
            assert not there or store.get(name).tobytes() == payload(name, 32 * KIB)  # type: ignore[union-attr]

    asyncio.run(main())


def test_wait_for(slow: tuple[Store, list[bytes]]) -> None:
    store, names = slow

    async def main() -> None:
        out = bytearray(64 * KIB)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(store.aget_into(names[:1], [out]), 0.01)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(store.prefetch(names[1:2]), 0.01)
        assert held(out)
        await settled(out)
        assert (await store.aget(names[0])).tobytes() == payload(names[0], 64 * KIB)  # type: ignore[union-attr]

    asyncio.run(main())


def test_deadlines_are_results(slow: tuple[Store, list[bytes]]) -> None:
    store, names = slow

    async def main() -> None:
        out = bytearray(64 * KIB)
        assert await store.aget_into(names[:1], [out], timeout=0) == [Result(False, None, "deadline")]
        assert await store.aget(names[0], timeout=0) is None
        assert (await store.alease(names[1:2], timeout=0)).reasons == ["deadline"]
        assert await store.apin(names[1:2], timeout=0) == [False]
        assert await store.aprefetch(names[2:], deadline=0) == [Result(False, None, "deadline")] * 2
        await settled(out)

    asyncio.run(main())


def test_errors_are_raised_by_the_await(store: Store) -> None:
    async def main() -> None:
        names = fill(store, 15, MIB)
        with pytest.raises(InvalidBlockError, match="a key has 16 to 64 bytes"):
            await store.aput(b"short", b"a")
        with pytest.raises(InvalidBlockError, match="1 buffers were given for 2 keys"):
            await store.aget_into(names[:2], [bytearray(MIB)])
        with pytest.raises(InvalidBlockError, match="a target must be writable"):
            await store.aget_into(names[:1], [bytes(MIB)])
        with pytest.raises(InvalidBlockError, match="4 bytes was given for"):
            await store.aget_into(names[:1], [bytearray(4)])
        with pytest.raises(ConfigError, match="seconds from 0 on"):
            await store.alease(names, timeout=-1)
        with await store.alease(names):
            with pytest.raises(FullError):
                await store.aput(key("more"), bytes(MIB), timeout=0)
            with pytest.raises(DeadlineError):
                await store.aput(key("more"), bytes(MIB), timeout=0.01)
            (late,) = await store.aput_many([key("more")], [bytes(MIB)], timeout=0.01)
            assert late.reason == "deadline"
        assert (await store.aput(key("more"), bytes(MIB))).stored
        store.close()
        for verb in (store.aget_into(names, []), store.aput(key("a"), b"a"), store.alease(names), store.aflush()):
            with pytest.raises(ClosedError):
                await verb

    asyncio.run(main())


def test_a_put_that_waits_lets_others_go_on(store: Store) -> None:
    async def main() -> None:
        names = fill(store, 15, MIB)
        lease = await store.alease(names)
        waiting = asyncio.create_task(store.aput(key("more"), bytes(MIB)))
        for name in names:
            assert (await store.aget(name)).tobytes() == payload(name, MIB)  # type: ignore[union-attr]
        assert not waiting.done()
        lease.release()
        assert (await waiting).stored

    asyncio.run(main())


def test_the_loop_turns_while_a_read_waits(slow: tuple[Store, list[bytes]]) -> None:
    store, names = slow

    async def main() -> None:
        turns = 0
        task = asyncio.create_task(store.aget(names[0]))
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns > 10
        assert task.result() is not None

    asyncio.run(main())


def test_a_loop_that_closes_with_work_in_flight(slow: tuple[Store, list[bytes]]) -> None:
    store, names = slow
    outs = [bytearray(64 * KIB) for _ in names]

    async def main() -> None:
        for name, out in zip(names, outs, strict=True):
            task = asyncio.create_task(store.aget_into([name], [out]))
            await asyncio.sleep(0)
            del task

    asyncio.run(main())
    assert all(held(out) for out in outs), "the disk is still busy"

    async def again() -> None:
        assert (await store.aget(names[-1])).tobytes() == payload(names[-1], 64 * KIB)  # type: ignore[union-attr]

    asyncio.run(again())
    store.close()  # nothing is in flight any more
    assert not any(held(out) for out in outs)
    assert outs[-1] == payload(names[-1], 64 * KIB)


def test_a_loop_that_closes_before_its_job_is_done(slow: tuple[Store, list[bytes]]) -> None:
    store, names = slow
    job = store.prefetch(names)

    async def main() -> None:
        task = asyncio.ensure_future(job)
        await asyncio.sleep(0)
        assert not task.done()

    asyncio.run(main())
    assert job.result() == [Result(True, "dram")] * 4

    async def again() -> None:
        assert await job == [Result(True, "dram")] * 4

    asyncio.run(again())


def test_closing_the_store_with_work_in_flight(slow: tuple[Store, list[bytes]]) -> None:
    store, names = slow

    async def main() -> None:
        outs = [bytearray(64 * KIB) for _ in names]
        tasks = [asyncio.create_task(store.aget_into([n], [o])) for n, o in zip(names, outs, strict=True)]
        job = asyncio.ensure_future(store.prefetch(names))
        await asyncio.sleep(0)
        await asyncio.to_thread(store.close)
        for task, name, out in zip(tasks, names, outs, strict=True):
            try:
                (result,) = await task
                assert (
                    out == payload(name, 64 * KIB)
                    if result.hit
                    else result.reason in ("cancelled", "deadline", "absent")
                )
            except ClosedError:
                pass
            assert not held(out)
        assert len(await job) == 4

    asyncio.run(main())


def test_two_loops_in_two_threads(tiers: tuple[Dram, Nvme]) -> None:
    with Store(*tiers) as store:
        names = fill(store, 40, 64 * KIB)
    failures: list[BaseException] = []

    async def reads(first: int) -> None:
        for i in range(first, 40, 2):
            many = await asyncio.gather(*(store.aget(names[i]) for _ in range(5)))
            assert all(data is not None and data.tobytes() == payload(names[i], 64 * KIB) for data in many)

    def run(first: int) -> None:
        try:
            asyncio.run(reads(first))
        except BaseException as error:  # shown by the assertion below
            failures.append(error)

    with Store(*tiers) as store:
        both = [threading.Thread(target=run, args=(first,)) for first in (0, 1)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join(60)
        assert failures == []
        assert not any(thread.is_alive() for thread in both)
        assert store.stats()["loads"] == 40


def test_a_job_is_awaited_by_many(slow: tuple[Store, list[bytes]]) -> None:
    store, names = slow

    async def main() -> None:
        job = store.prefetch(names)

        async def wait() -> list[Result]:
            return await job

        first, second = await asyncio.gather(wait(), wait())
        assert first == second == [Result(True, "dram")] * 4
        cancelled = store.prefetch(keys(2, "absent"))
        cancelled.cancel()
        assert {r.reason for r in await cancelled} <= {"cancelled", "absent"}

    asyncio.run(main())


def test_loops_that_are_gone_are_forgotten(store: Store) -> None:
    """Neither a descriptor nor a loop is kept once its work is over."""
    store.put(key("a"), b"a")

    async def main() -> None:
        assert await store.aget(key("a")) is not None

    asyncio.run(main())
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(100):
        asyncio.run(main())
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # noqa: PTH208
    aio.sweep()
    assert not aio._inboxes
