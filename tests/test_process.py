"""The store and its process: forks, a second process, the end of the interpreter, threads and the GIL."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blocks import KIB, MIB, key, keys, payload, slow_store, verbs_of
from kvtier import ClosedError, Dram, FullError, LockedError, Nvme, Store
from programs import program


def in_child(run: Callable[[], None]) -> None:
    """Runs it in a fork of this process, which is killed if it hangs; fails if it raises."""
    ended_well(forked(run))


def forked(run: Callable[[], None]) -> int:
    """Begins to run it in a fork, which is killed if it hangs."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(60)  # ends the child, whatever it waits for
            run()
            code = 0
        except BaseException as error:
            os.write(2, f"in the child: {error!r}\n".encode())
        finally:
            os._exit(code)
    return child


def ended_well(child: int) -> None:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def refused(calls: list[Callable[[], Any]]) -> None:
    for call in calls:
        with pytest.raises(ClosedError, match="a fork has none of its threads"):
            call()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_is_refused_and_the_parent_goes_on(tiers: tuple[Dram, Nvme]) -> None:
    with Store(*tiers) as store:
        store.put(key("a"), b"a")
        store.put_many(keys(20), [payload(name, 100 * KIB) for name in keys(20)])
        lease = store.lease([key("a")])
        region = store.register_region(bytearray(MIB))
        job = store.prefetch([key("a")])

        def child() -> None:
            refused([*verbs_of(store), store.stats])
            refused([job.wait, job.done, job.cancel, job.result])
            store.close()  # nothing of the parent's is closed
            lease.release()
            with pytest.raises(LockedError):
                Store(*tiers)
            with Store(Dram("1MiB")) as own:
                assert own.put(key("own"), b"own").stored

        for _ in range(5):
            in_child(child)
        del region
        assert lease.views[0] == b"a"
        assert job.result()[0].hit
        assert store.get(keys(20)[3]).tobytes() == payload(keys(20)[3], 100 * KIB)  # type: ignore[union-attr]
        store.flush()
    with Store(*tiers) as store:
        assert all(store.contains(keys(20)))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_drops_what_it_inherits(tiers: tuple[Dram, Nvme]) -> None:
    """Objects of the parent's end in the child without a hang, while threads of the parent's are at work."""
    store, names = slow_store(*tiers, count=4)
    out = bytearray(64 * KIB)

    async def main() -> None:
        held: dict[str, Any] = {"store": store, "job": store.prefetch(names), "lease": store.lease([key("slow", 4)])}
        task = asyncio.create_task(store.aget_into(names[:1], [out]))
        await asyncio.sleep(0)

        def child() -> None:
            held.clear()
            refused([*verbs_of(store), store.stats])

        for _ in range(3):
            in_child(child)
        assert held["lease"].views[0] == payload(key("slow", 4), MIB)
        assert (await task)[0].hit
        assert all(await held["job"])

    asyncio.run(main())
    assert out == payload(names[0], 64 * KIB)
    store.close()


def _worker(tiers: tuple[Dram, Nvme], inherited: Store) -> None:
    refused(verbs_of(inherited))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_forks_of_a_busy_process_open_stores_of_their_own(tiers: tuple[Dram, Nvme], tmp_path: Path) -> None:
    """At whatever point the threads of the parent are forked: no lock that they hold keeps a child from working."""
    names = keys(20)
    failures: list[BaseException] = []
    stop = threading.Event()

    with Store(*tiers) as store:
        store.put_many(names, [payload(name, 100 * KIB) for name in names])

        def work(number: int) -> None:
            try:
                out = bytearray(100 * KIB)
                for turn in itertools.count():
                    if stop.is_set():
                        return
                    store.get_into([names[turn % 20]], [out])
                    assert out == payload(names[turn % 20], 100 * KIB)
                    store.put(key(number, turn % 8), out)
                    store.remove([key(number, turn % 8)])
                    if turn % 16 == 0:
                        store.flush()
            except BaseException as error:
                failures.append(error)

        def child() -> None:
            with Store(Dram("1MiB"), Nvme(tmp_path / str(os.getpid()), "8MiB")) as own:
                for name in names:  # more than its memory holds
                    assert own.put(name, payload(name, 100 * KIB)).stored
                own.flush()
                for name in names:
                    assert own.get(name).tobytes() == payload(name, 100 * KIB)  # type: ignore[union-attr]

        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(5):
                for fork in [forked(child) for _ in range(8)]:
                    ended_well(fork)
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)
        assert failures == []
        assert all(store.contains(names))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_multiprocessing_by_fork(tiers: tuple[Dram, Nvme]) -> None:
    with Store(*tiers) as store:
        process = multiprocessing.get_context("fork").Process(target=_worker, args=(tiers, store))
        process.start()
        process.join(60)
        assert process.exitcode == 0
        assert store.put(key("a"), b"a").stored


def test_a_second_process_is_told_who_holds_the_directory(tiers: tuple[Dram, Nvme]) -> None:
    text = "import sys; from kvtier import *; Store(Dram('1MiB'), Nvme(sys.argv[1], '64MiB'))"
    with Store(*tiers) as store:
        second = program(text, tiers[1].path)
        assert second.returncode == 1
        assert "LockedError" in second.stderr
        assert str(os.getpid()) in second.stderr
        with pytest.raises(LockedError, match=str(os.getpid())):
            Store(*tiers)
        assert store.put(key("a"), b"a").stored
    assert program(text, tiers[1].path).returncode == 0


PUTS = """
import sys
from blocks import *
from kvtier import *
store = Store(Dram("16MiB"), Nvme(sys.argv[1], "64MiB"))
for name in keys(20):
    store.put(name, payload(name, 300 * KIB))
"""

ENDS = {
    "without close": "",
    "in a function": "def f():\n    own = store\nf()\n",
    "with an exception": "raise SystemExit(0)",
    "with a job": "job = store.prefetch(keys(20))",
    "with a lease": "lease = store.lease(keys(3)); view = lease.views[0]",
    "with a region": "region = store.register_region(bytearray(MIB))",
    "in a cycle": "class C: pass\nc = C(); c.c = c; c.store = store",
    "with a loop": """
import asyncio
async def main():
    for name in keys(20):
        asyncio.ensure_future(store.aget_into([name], [bytearray(300 * KIB)]))
        asyncio.ensure_future(store.aput(name + b"x", bytes(200 * KIB)))
    await asyncio.sleep(0)
asyncio.run(main())
""",
    "with a thread that waits": """
import threading
lease = store.lease(keys(20))
began = threading.Event()
def wait():
    began.set()
    store.put(key("more"), bytes(15 * MIB), timeout=60)
threading.Thread(target=wait, daemon=True).start()
began.wait()
""",
    "with threads at work": """
import threading
began = threading.Barrier(4)
def work(i):
    out = bytearray(300 * KIB)
    began.wait()
    while True:
        store.get_into([keys(20)[i]], [out])
        store.put(key("own", i), bytes(100 * KIB))
for i in range(3):
    threading.Thread(target=work, args=(i,), daemon=True).start()
began.wait()
""",
}


@pytest.mark.parametrize("how", ENDS)
def test_the_interpreter_ends(how: str, tiers: tuple[Dram, Nvme]) -> None:
    """With a live store, whatever is in flight: no hang, no crash, and the directory is fine."""
    result = program(PUTS + ENDS[how] + "\nprint('end')", tiers[1].path)
    assert (result.returncode, result.stderr) == (0, "")
    with Store(*tiers) as store:
        for name in keys(20):
            data = store.get(name)
            assert data is None or data.tobytes() == payload(name, 300 * KIB)
        if how == "without close":
            assert all(store.contains(keys(20)))


def test_keys_are_the_same_in_every_process() -> None:
    text = """
from kvtier import *
layout = KVLayout(2, "gqa", 1, 8)
store = Store(Dram("1MiB"))
identity = Identity(b"weights", config={"b": 1, "a": {"y": 2, "x": {"z"}.pop()}}, lora=b"l", kv_dtype="bf16")
cache = store.namespace(identity, layout)
print(cache.digest.hex(), [k.hex() for k in cache.chain(range(40), {1: b"image"}, partial=True)])
"""
    seen = {program(text, PYTHONHASHSEED=seed).stdout for seed in ("0", "1", "random")}
    assert len(seen) == 1
    assert len(seen.pop()) > 3 * 64


def test_many_threads_use_one_store(tiers: tuple[Dram, Nvme]) -> None:
    failures: list[BaseException] = []
    begin = threading.Barrier(8)

    def work(number: int) -> None:
        try:
            begin.wait(30)
            for turn in range(40):
                name = key("shared", turn % 60) if turn % 2 else key(number, turn)
                data = payload(name, 100 * KIB)
                store.put(name, data)
                out = bytearray(100 * KIB)
                (result,) = store.get_into([name], [out])
                assert out == data if result.hit else result.reason == "absent"
                with store.lease([name]) as lease:
                    assert lease.views[0] is None or lease.views[0] == data
                if turn % 7 == number % 7:
                    store.remove([name])
                if turn % 11 == number:
                    store.prefetch([key("shared", i) for i in range(10)])
        except BaseException as error:
            failures.append(error)

    with Store(*tiers) as store:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert failures == []
        assert not any(thread.is_alive() for thread in threads)
        assert store.stats()["tiers"]["dram"]["corrupt"] == 0


WAITS: dict[str, Callable[[Store, list[bytes]], Any]] = {
    "put": lambda store, _: store.put(key("more"), bytes(15 * MIB)),
    "put_many": lambda store, _: store.put_many([key("more")], [bytes(15 * MIB)]),
    "get": lambda store, names: store.get(names[0]),
    "get_into": lambda store, names: store.get_into(names[:1], [bytearray(64 * KIB)]),
    "lease": lambda store, names: store.lease(names[:1]).release(),
    "pin": lambda store, names: store.pin(names[:1]),
    "result": lambda store, names: store.prefetch(names).result(),
    "flush": lambda store, _: store.flush(),
    "close": lambda store, _: store.close(),
}


@pytest.mark.parametrize("verb", WAITS)
def test_a_verb_that_waits_lets_other_threads_run(verb: str, tiers: tuple[Dram, Nvme]) -> None:
    """While it waits for a busy disk, or for room, this thread answers all that another one asks."""
    if verb.startswith("put"):
        store, names = Store(tiers[0]), keys(1)
        store.put(names[0], bytes(MIB))
        lease = store.lease(names)
    else:
        store, names = slow_store(*tiers, count=4)
        lease = store.lease([key("slow", 4)])
        store.put(key("dirty"), bytes(MIB))
    asked, answered, done = threading.Event(), threading.Event(), threading.Event()
    answers = 0

    def wait() -> None:
        asked.set()
        WAITS[verb](store, names)
        done.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not done.is_set():
        assert asked.wait(30)
        answers += 1
        answered.set()
        if verb.startswith("put") and answers == 1000:
            lease.release()
    waiting.join(30)
    assert answers > 100
    lease.release()
    store.close()


def test_a_store_dropped_by_one_thread_lets_others_run(tiers: tuple[Dram, Nvme]) -> None:
    """Nobody closed it: its end writes what is only in memory, and does not hold the interpreter meanwhile."""
    store, _ = slow_store(*tiers, count=1)
    stores = [store]
    del store
    stores[0].put(key("dirty"), bytes(MIB))
    done = threading.Event()

    def drop() -> None:
        stores.clear()
        done.set()

    dropping = threading.Thread(target=drop)
    dropping.start()
    turns = 0
    while not done.is_set():
        turns += 1
    dropping.join(30)
    assert turns > 1000
    with Store(*tiers) as again:
        assert again.contains([key("dirty")]) == [True]


def test_closing_wakes_who_waits_for_room(store: Store) -> None:
    names = keys(15)
    store.put_many(names, [bytes(MIB)] * 15)
    lease = store.lease(names)
    began = threading.Event()
    errors: list[BaseException] = []

    def wait() -> None:
        began.set()
        try:
            store.put(key("more"), bytes(MIB), timeout=3600)
        except BaseException as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert began.wait(30)
    store.close()
    waiting.join(30)
    assert not waiting.is_alive()
    assert [type(error) for error in errors] in ([ClosedError], [FullError])
    lease.release()
