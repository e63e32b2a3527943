"""A process that is killed while it writes: what it left is right, and what it flushed is there.

Each round's child verifies in a fresh process what the rounds before it left, then writes on until it is killed, at a
random point of a seeded sequence. The parent knows from what the child says what may be there: it hears of each change
before it is made, and of each flush after it.

``KVTIER_CRASH_ROUNDS`` sets the number of rounds (200).
"""

from __future__ import annotations

import multiprocessing
import os
import random
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from blocks import KIB, MIB, key, payload
from kvtier import Dram, FullError, Nvme, Store
from kvtier._kvtier import check_dirs

ROUNDS = int(os.environ.get("KVTIER_CRASH_ROUNDS", "200"))
pytestmark = pytest.mark.timeout(max(300, 2 * ROUNDS))
# Children are forks of one process that has imported all and opened nothing.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["pytest", "kvtier"])
# A child that says nothing for so many seconds hangs.
PATIENCE = 60
# Rounds after which the directory is also checked from outside; each child checks it from inside.
CHECKED_EVERY = 8
Place = tuple[int, int]  # a chain, and a block's place in it
# Chains are removed above this, far from the capacity: nothing is evicted unless the test wants it.
ROOMY = 10 * MIB
ABSENT = 0
SETUPS: dict[str, dict[str, Any]] = {
    "one path": {"paths": 1, "size": 32 * MIB, "engine": "auto", "evicts": False, "share": 0.5},
    "two paths": {"paths": 2, "size": 48 * MIB, "engine": "threads", "evicts": False, "share": 0.3},
    "full": {"paths": 1, "size": 8 * MIB, "engine": "auto", "evicts": True, "share": 0.2},
}


def size_of(chain: int, i: int, version: int) -> int:
    """The size of a block in bytes; another version of it, after a removal, may have another."""
    return 4 * KIB * (1 + (7 * chain + 3 * i + version) % 40) - 64 * (i % 2)


def block(chain: int, i: int, version: int) -> bytes:
    return payload(key(chain, i), size_of(chain, i, version), version)


def parent_of(chain: int, i: int) -> bytes | None:
    return key(chain, i - 1) if i else None


# The child.


def verify(store: Store, say: Connection, expected: dict[Place, set[int]]) -> dict[Place, int]:
    """Checks every block that may be there; returns the version of each that is."""
    found = {}
    pages = 0
    for (chain, i), versions in sorted(expected.items()):
        data = store.get(key(chain, i))
        if data is None:
            assert ABSENT in versions, f"block {i} of chain {chain} was flushed and is gone"
        else:
            version = next((v for v in versions if v != ABSENT and block(chain, i, v) == data.tobytes()), None)
            assert version is not None, f"block {i} of chain {chain} has wrong bytes"
            parent = parent_of(chain, i)
            assert parent is None or store.contains([parent]) == [True], f"block {i} of chain {chain} has no parent"
            found[chain, i] = version
            pages += -(-len(data) // (4 * KIB))
        say.send(("found", (chain, i), found.get((chain, i), ABSENT)))
    store.flush()  # children that lost their parents were dropped: their slots are free once that is durable
    stats = store.stats()
    nvme = stats["tiers"]["nvme"]
    assert stats["blocks"] == nvme["blocks"] == len(found)
    assert nvme["used_bytes"] == pages * 4 * KIB <= nvme["capacity_bytes"]
    assert nvme["corrupt"] == nvme["quarantined_bytes"] == nvme["errors"] == 0
    return found


def write(store: Store, say: Connection, setup: dict[str, Any], rng: random.Random, there: dict[Place, int]) -> None:
    """Puts, removes and flushes for ever, and says what it does before it does it."""
    versions: dict[int, int] = {}
    lengths: dict[int, int] = {}
    for (chain, i), version in there.items():
        versions[chain] = max(versions.get(chain, 0), version)
        lengths[chain] = max(lengths.get(chain, 0), i + 1)
    fresh = max(versions, default=0) + 1 + rng.randrange(1000)
    while True:
        live = sum(size_of(c, i, versions[c]) for c, n in lengths.items() for i in range(n))
        dice = rng.random()
        if lengths and not setup["evicts"] and (live > ROOMY or dice < 0.1):
            chain = rng.choice(list(lengths))
            say.send(("remove", chain))
            store.remove([key(chain, 0)])
            del lengths[chain]
            if dice < 0.05:  # the same keys again, with other bytes
                versions[chain] += 1
                put(store, say, chain, range(rng.randint(1, 4)), versions, lengths)
        elif dice < 0.25:
            try:
                store.flush()
            except FullError:
                assert setup["evicts"]
            else:
                say.send(("flushed",))
        elif dice < 0.5 and lengths:
            chain = rng.choice(list(lengths))
            put(store, say, chain, range(lengths[chain], lengths[chain] + rng.randint(1, 3)), versions, lengths)
        else:
            fresh += 1
            versions[fresh] = 1
            put(store, say, fresh, range(rng.randint(1, 6)), versions, lengths)


def put(
    store: Store, say: Connection, chain: int, span: range, versions: dict[int, int], lengths: dict[int, int]
) -> None:
    for i in span:
        say.send(("put", (chain, i), versions[chain]))
        result = store.put(key(chain, i), block(chain, i, versions[chain]), parent=parent_of(chain, i))
        if result.reason == "parent":  # evicted: the chain ends here
            return
        lengths[chain] = i + 1


def child(say: Connection, folder: Path, setup: dict[str, Any], seed: int, expected: dict[Place, set[int]]) -> None:
    try:
        say.send(("opening",))
        with opened(folder, setup) as store:
            there = verify(store, say, expected)
            say.send(("verified",))
            if seed >= 0:
                write(store, say, setup, random.Random(seed), there)
    except BaseException:
        say.send(("failed", traceback.format_exc()))
        raise


def opened(folder: Path, setup: dict[str, Any]) -> Store:
    # Less memory than there are blocks: some are written by the mover, some by flush.
    return Store(Dram(4 * MIB), Nvme(paths(folder, setup), setup["size"], engine=setup["engine"]))


def paths(folder: Path, setup: dict[str, Any]) -> tuple[Path, ...]:
    return tuple(folder / str(number) for number in range(setup["paths"]))


# The parent.


class Expected:
    """What may be there: the versions that each block may have, and the one it has while the child lives."""

    def __init__(self, evicts: bool) -> None:
        self.always = {ABSENT} if evicts else set()
        self.allowed: dict[Place, set[int]] = {}
        self.current: dict[Place, int] = {}

    def hear(self, said: tuple[Any, ...]) -> None:
        match said:
            case ["put", place, version]:
                self.current[place] = version
                self.allowed.setdefault(place, {ABSENT}).update({version} | self.always)
            case ["remove", chain]:
                for place in self.current:
                    if place[0] == chain:
                        self.current[place] = ABSENT
                        self.allowed[place].add(ABSENT)
            case ["found", place, version]:
                if version == ABSENT and self.allowed[place] == {ABSENT}:
                    # Gone for the second time: it need not be looked for for ever.
                    del self.allowed[place], self.current[place]
                else:
                    self.current[place] = version
                    self.allowed[place] = {version} | self.always
            case ["flushed"]:
                for place, version in self.current.items():
                    self.allowed[place] = {version} | self.always
            case ["opening"] | ["verified"]:
                pass
            case _:
                raise AssertionError(*said)


def run(folder: Path, setup: dict[str, Any], seed: int, expected: Expected, said: int | None) -> bool:
    """Starts a child, and kills it after it said so many things. Whether it lived to be killed."""
    listen, say = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=child, args=(say, folder, setup, seed, expected.allowed))
    process.start()
    say.close()
    heard = 0
    try:
        while listen.poll(PATIENCE):
            # What it did between our decision and its death counts too.
            expected.hear(listen.recv())
            if heard == said:
                process.kill()
            heard += 1
        raise AssertionError(f"the child of seed {seed} hangs")
    except EOFError:
        process.join()
    finally:
        process.kill()
        listen.close()
    assert process.exitcode in (0, -9)
    return process.exitcode == -9


def check(folder: Path, setup: dict[str, Any]) -> None:
    for report in check_dirs(paths(folder, setup), False):
        assert report["corrupt"] == report["quarantined"] == 0
        assert report["damaged"] == []


@pytest.mark.parametrize("name", SETUPS)
def test_a_killed_writer_leaves_what_is_right(name: str, tmp_path: Path) -> None:
    setup = SETUPS[name]
    expected = Expected(setup["evicts"])
    rng = random.Random(name)
    for seed in range(round(ROUNDS * setup["share"])):
        # Sometimes while it opens or verifies, mostly while it writes.
        said = rng.choice([0, rng.randrange(8)]) if seed % 8 == 7 else len(expected.allowed) + rng.randrange(10, 150)
        assert run(tmp_path, setup, seed, expected, said)
        if seed % CHECKED_EVERY == CHECKED_EVERY - 1:
            check(tmp_path, setup)
    assert not run(tmp_path, setup, -1, expected, None)
    assert setup["evicts"] or any(ABSENT not in versions for versions in expected.allowed.values())
    check(tmp_path, setup)
    assert all(report["orphaned"] == 0 for report in check_dirs(paths(tmp_path, setup), False))
