"""A process that is killed while it writes: what it left is right, and what it flushed is there.

The child is this file run as a program. Each round's child verifies in a fresh process what the rounds before it left,
then writes on until it is killed, at a random point of a seeded sequence. The parent knows from the child's lines what
may be there: it reads a line before each change, and one after each flush.

``KVTIER_CRASH_ROUNDS`` sets the number of rounds (50).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from blocks import KIB, MIB, key, payload
from kvtier import Dram, FullError, Nvme, Store
from kvtier._kvtier import check_dirs

ROUNDS = int(os.environ.get("KVTIER_CRASH_ROUNDS", "50"))
# Chains are removed above this, far from the capacity: nothing is evicted unless the test wants it.
ROOMY = 10 * MIB
ABSENT = 0
SETUPS: dict[str, dict[str, Any]] = {
    "one path": {"paths": 1, "size": 32 * MIB, "engine": "auto", "evicts": False, "share": 0.5},
    "two paths": {"paths": 2, "size": 48 * MIB, "engine": "threads", "evicts": False, "share": 0.3},
    "full": {"paths": 1, "size": 8 * MIB, "engine": "auto", "evicts": True, "share": 0.2},
}


def block(chain: int, i: int, version: int) -> bytes:
    """The bytes of a block; another version of it, after a removal, may have another size."""
    of = key(chain, i)
    return payload(of, 4 * KIB * (1 + (7 * chain + 3 * i + version) % 40) - 64 * (i % 2), version)


def parent_of(chain: int, i: int) -> bytes | None:
    return key(chain, i - 1) if i else None


# The child.


def say(*words: object) -> None:
    print(*words, flush=True)


def verify(store: Store, expected: list[list[Any]]) -> dict[tuple[int, int], int]:
    """Checks every block that ever was; returns the version of each that is there."""
    found = {}
    pages = 0
    for chain, i, versions in expected:
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
        say("found", chain, i, found.get((chain, i), ABSENT))
    store.flush()  # children that lost their parents were dropped: their slots are free once that is durable
    stats = store.stats()
    nvme = stats["tiers"]["nvme"]
    assert stats["blocks"] == nvme["blocks"] == len(found)
    assert nvme["used_bytes"] == pages * 4 * KIB <= nvme["capacity_bytes"]
    assert nvme["corrupt"] == nvme["quarantined_bytes"] == nvme["errors"] == 0
    return found


def write(store: Store, setup: dict[str, Any], rng: random.Random, there: dict[tuple[int, int], int]) -> None:
    """Puts, removes and flushes for ever, and says what it does before it does it."""
    versions: dict[int, int] = {}
    lengths: dict[int, int] = {}
    for (chain, i), version in there.items():
        versions[chain] = max(versions.get(chain, 0), version)
        lengths[chain] = max(lengths.get(chain, 0), i + 1)
    fresh = max(versions, default=0) + 1 + rng.randrange(1000)
    while True:
        live = sum(len(block(c, i, versions[c])) for c, n in lengths.items() for i in range(n))
        dice = rng.random()
        if lengths and not setup["evicts"] and (live > ROOMY or dice < 0.1):
            chain = rng.choice(list(lengths))
            say("remove", chain)
            store.remove([key(chain, 0)])
            del lengths[chain]
            if dice < 0.05:  # the same keys again, with other bytes
                versions[chain] += 1
                put(store, chain, range(rng.randint(1, 4)), versions, lengths)
        elif dice < 0.25:
            try:
                store.flush()
            except FullError:
                assert setup["evicts"]
            else:
                say("flushed")
        elif dice < 0.5 and lengths:
            chain = rng.choice(list(lengths))
            put(store, chain, range(lengths[chain], lengths[chain] + rng.randint(1, 3)), versions, lengths)
        else:
            fresh += 1
            versions[fresh] = 1
            put(store, fresh, range(rng.randint(1, 6)), versions, lengths)


def put(store: Store, chain: int, span: range, versions: dict[int, int], lengths: dict[int, int]) -> None:
    for i in span:
        say("put", chain, i, versions[chain])
        result = store.put(key(chain, i), block(chain, i, versions[chain]), parent=parent_of(chain, i))
        if result.reason == "parent":  # evicted: the chain ends here
            return
        lengths[chain] = i + 1


def child(folder: Path, setup: dict[str, Any], seed: int) -> None:
    expected = json.load(sys.stdin)
    say("opening")
    with opened(folder, setup) as store:
        there = verify(store, expected)
        say("verified")
        if seed >= 0:
            write(store, setup, random.Random(seed), there)


def opened(folder: Path, setup: dict[str, Any]) -> Store:
    # Less memory than there are blocks: some are written by the mover, some by flush.
    return Store(Dram(4 * MIB), Nvme(paths(folder, setup), setup["size"], engine=setup["engine"]))


def paths(folder: Path, setup: dict[str, Any]) -> tuple[Path, ...]:
    return tuple(folder / str(number) for number in range(setup["paths"]))


# The parent.


class Expected:
    """What may be there: the versions that each block may have, and the one it has while the child lives."""

    def __init__(self, evicts: bool) -> None:
        self.evicts = evicts
        self.allowed: dict[tuple[int, int], set[int]] = {}
        self.current: dict[tuple[int, int], int] = {}

    def hear(self, line: str) -> None:
        match line.split():
            case ["put", chain, i, version]:
                place = int(chain), int(i)
                self.current[place] = int(version)
                self.allowed.setdefault(place, {ABSENT}).add(int(version))
                if self.evicts:
                    self.allowed[place].add(ABSENT)
            case ["remove", chain]:
                for place in self.current:
                    if place[0] == int(chain):
                        self.current[place] = ABSENT
                        self.allowed[place].add(ABSENT)
            case ["found", chain, i, version]:
                place = int(chain), int(i)
                self.current[place] = int(version)
                self.allowed[place] = {int(version)} | ({ABSENT} if self.evicts else set())
            case ["flushed"]:
                for place, version in self.current.items():
                    self.allowed[place] = {version} | ({ABSENT} if self.evicts else set())
            case ["opening"] | ["verified"]:
                pass
            case _:
                raise AssertionError(f"the child said {line!r}")

    def listed(self) -> list[list[Any]]:
        return [[chain, i, sorted(versions)] for (chain, i), versions in sorted(self.allowed.items())]


def run(folder: Path, setup: dict[str, Any], seed: int, expected: Expected, lines: int | None) -> bool:
    """Starts a child, and kills it after so many lines. Whether it lived to be killed."""
    command = [sys.executable, __file__, str(folder), json.dumps(setup), str(seed)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(json.dumps(expected.listed()))
        process.stdin.close()
        for number, line in enumerate(process.stdout):
            expected.hear(line)
            if number == lines:
                process.kill()
                break
        # What it did between our decision and its death counts too.
        for line in process.stdout:
            if line.endswith("\n"):
                expected.hear(line)
        errors = process.stderr.read()
        code = process.wait()
    assert code in (0, -9), errors
    return code == -9


@pytest.mark.parametrize("name", SETUPS)
def test_a_killed_writer_leaves_what_is_right(name: str, tmp_path: Path) -> None:
    setup = SETUPS[name]
    expected = Expected(setup["evicts"])
    rng = random.Random(name)
    for seed in range(round(ROUNDS * setup["share"])):
        # Sometimes while it opens or verifies, mostly while it writes.
        lines = rng.choice([0, rng.randrange(8)]) if seed % 8 == 7 else len(expected.allowed) + rng.randrange(10, 150)
        assert run(tmp_path, setup, seed, expected, lines)
        if seed > 0:  # the first may not have come so far as to make them
            for report in check_dirs(paths(tmp_path, setup), False):
                assert report["corrupt"] == report["quarantined"] == 0
                assert report["damaged"] == []
    assert not run(tmp_path, setup, -1, expected, None)
    assert setup["evicts"] or any(ABSENT not in versions for versions in expected.allowed.values())
    assert all(report["orphaned"] == 0 for report in check_dirs(paths(tmp_path, setup), False))


if __name__ == "__main__":
    child(Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]))
