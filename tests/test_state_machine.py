"""A store against a dict: whatever is done to it by either policy, a hit is what was put, and the space is used.

Three namespaces of different block sizes share one small arena, with and without tiers below it.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from blocks import MIB, key, payload
from kvtier import Cxl, Dram, FullError, Hbm, KVLayout, Lease, Namespace, Nvme, Store
from kvtier.config import Policy
from kvtier.tiers import HostBackend

ARENA = 16 * MIB
POOL = 5 * MIB
PAGE = 4096
# Below this no tier is ever full, so nothing may be lost.
ROOMY = 10 * MIB
# With so few blocks held there is a hole for the largest block, wherever they lie.
HOLDS = 6

LAYOUTS = [
    KVLayout.opaque(),
    KVLayout(3, "gqa", kv_heads=2, head_dim=(64, 96, 160), block_tokens=57),
    KVLayout(5, "mla", rank=512, rope_dim=64, dtype="fp32", block_tokens=85),
]
SIZES = [8 * PAGE, LAYOUTS[1].block_bytes, LAYOUTS[2].block_bytes]
assert SIZES[2] <= MIB
spaces = st.integers(0, len(LAYOUTS) - 1)
picks = st.integers(0, 2**16)


def part_of(layout: KVLayout, data: bytes, layers: tuple[int, int], tokens: tuple[int, int]) -> bytes:
    """What a range of layers and tokens takes from a block, by NumPy's indexing."""
    count = len(data) // layout.bytes_per_token
    out, at = [], 0
    for number, segment in enumerate(layout.segments):
        size = segment.planes * count * segment.token_bytes
        layer = np.frombuffer(data, np.uint8, size, at).reshape(segment.planes, count, segment.token_bytes)
        if layers[0] <= number < layers[1]:
            out.append(layer[:, tokens[0] : tokens[1]].tobytes())
        at += size
    return b"".join(out)


class Block:
    """What the model knows of a block that was put and not removed."""

    def __init__(self, space: int, of: bytes, data: bytes, parent: bytes | None) -> None:
        self.space, self.key, self.data, self.parent = space, of, data, parent


def some(machine: MemoryMachine) -> bool:
    """Whether any block was put."""
    return bool(machine.blocks)


class MemoryMachine(RuleBasedStateMachine):
    """Memory alone: what leaves it is gone.

    What is generated depends on the model alone, never on what the store evicted: a failure can be replayed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kvtier-"))
        self.blocks: dict[bytes, Block] = {}
        self.held: list[tuple[Any, bytes]] = []
        self.pinned: list[Block] = []
        self.pressed = False
        self.number = 0

    @initialize(policy=st.sampled_from(["auto", "lru-leaf"]))
    def begin(self, policy: Policy) -> None:
        self.policy = policy
        self.open()

    def tiers(self) -> list[Any]:
        return [Dram(ARENA)]

    def open(self) -> None:
        self.store = Store(*self.tiers(), policy=self.policy)
        self.spaces: list[Namespace] = [
            self.store.namespace(b"model %d" % i, layout) for i, layout in enumerate(LAYOUTS)
        ]

    def teardown(self) -> None:
        self.held.clear()
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.folder)

    # What the model says.

    def live(self, space: int | None = None) -> list[Block]:
        return [block for block in self.blocks.values() if space in (None, block.space)]

    def pick(self, number: int) -> Block:
        live = self.live()
        return live[number % len(live)]

    def forget(self, roots: list[Block]) -> None:
        gone = {block.key for block in roots}
        for block in self.blocks.values():  # parents come before their children
            if block.parent in gone:
                gone.add(block.key)
        for of in gone:
            del self.blocks[of]
        self.pinned = [block for block in self.pinned if block.key not in gone]

    def press(self) -> None:
        used = sum(len(block.data) for block in self.blocks.values()) + sum(len(data) for _, data in self.held)
        self.pressed |= used > ROOMY

    def resident(self, block: Block) -> bool:
        (there,) = self.spaces[block.space].contains([block.key])
        return there

    # Rules.

    @rule(space=spaces, count=st.integers(1, 12), after=st.none() | picks, partial=st.booleans(), many=st.booleans())
    def put_chain(self, space: int, count: int, after: int | None, partial: bool, many: bool) -> None:
        live = self.live(space)
        parent = live[after % len(live)].key if live and after is not None else None
        chain = []
        for i in range(count):
            self.number += 1
            size = SIZES[space]
            if partial and i == count - 1 and space > 0:
                size = LAYOUTS[space].bytes_per_token * (1 + self.number % LAYOUTS[space].block_tokens)
            of = key(space, self.number)
            chain.append(Block(space, of, payload(of, size), parent))
            parent = of
        cache = self.spaces[space]
        datas = [block.data for block in chain]
        parents = [block.parent for block in chain]
        if many:
            results = cache.put_many([block.key for block in chain], datas, parents=parents)
        else:
            results = [cache.put(block.key, block.data, parent=block.parent) for block in chain]
        self.blocks |= {block.key: block for block in chain}
        self.press()
        for result in results:
            assert result.reason in (None, "parent")
            assert result.reason is None or self.pressed, "a parent left a store that was never full"

    @precondition(some)
    @rule(number=picks, many=st.booleans())
    def get(self, number: int, many: bool) -> None:
        block = self.pick(number)
        cache = self.spaces[block.space]
        if not many:
            data = cache.get(block.key)
            assert data is None or data.tobytes() == block.data
            assert data is not None or self.pressed
            return
        wanted = self.live(block.space)[-8:]
        outs = [bytearray(len(other.data)) for other in wanted]
        results = cache.get_into([other.key for other in wanted], outs)
        for other, out, result in zip(wanted, outs, results, strict=True):
            assert (out == other.data) if result.hit else result.reason == "absent"

    @precondition(some)
    @rule(number=picks, ends=st.tuples(picks, picks, picks, picks))
    def get_part(self, number: int, ends: tuple[int, int, int, int]) -> None:
        block = self.pick(number)
        layout = LAYOUTS[block.space]
        if not layout.layers:
            return
        layers = sorted(end % (layout.layers + 1) for end in ends[:2])
        tokens = sorted(end % (len(block.data) // layout.bytes_per_token + 1) for end in ends[2:])
        expected = part_of(layout, block.data, (layers[0], layers[1]), (tokens[0], tokens[1]))
        out = np.empty(len(expected), np.uint8)
        cache = self.spaces[block.space]
        (result,) = cache.get_into([block.key], [out], layers=range(*layers), tokens=range(*tokens))
        assert (out.tobytes() == expected) if result.hit else result.reason == "absent"

    @precondition(some)
    @rule(number=picks, verify=st.booleans(), form=st.sampled_from(["lease", "view", "array", "tensor"]))
    def lease(self, number: int, verify: bool, form: str) -> None:
        block = self.pick(number)
        if len(self.held) + len(self.pinned) >= HOLDS:
            return
        lease = self.spaces[block.space].lease([block.key], verify=verify)
        (producer,) = lease.blocks
        assert (producer is None) == (lease.reasons != [None])
        if producer is None:
            assert lease.reasons == ["absent"]
            return
        held: Any = lease
        if form == "view":
            held = lease.views[0]
        elif form == "array":
            held = np.from_dlpack(producer)
        elif form == "tensor":
            held = torch.from_dlpack(producer)
        if form != "lease":
            lease.release()
        self.held.append((held, block.data))
        self.press()

    @rule(number=picks)
    def release(self, number: int) -> None:
        if not self.held:
            return
        held, data = self.held.pop(number % len(self.held))
        assert bytes_of(held) == data
        if isinstance(held, Lease):
            held.release()

    @precondition(some)
    @rule(number=picks)
    def pin(self, number: int) -> None:
        block = self.pick(number)
        if len(self.held) + len(self.pinned) >= HOLDS:
            return
        (pinned,) = self.spaces[block.space].pin([block.key])
        if pinned:
            self.pinned.append(block)

    @rule(number=picks)
    def unpin(self, number: int) -> None:
        if not self.pinned:
            return
        block = self.pinned.pop(number % len(self.pinned))
        assert self.spaces[block.space].unpin([block.key]) == [True]

    @precondition(some)
    @rule(number=picks)
    def prefetch(self, number: int) -> None:
        block = self.pick(number)
        wanted = [other.key for other in self.live(block.space)[-8:]]
        for result in self.spaces[block.space].prefetch(wanted).result():
            assert result.hit or self.pressed

    @precondition(some)
    @rule(number=picks, score=st.floats(0, 100))
    def set_importance(self, number: int, score: float) -> None:
        block = self.pick(number)
        before = self.resident(block)
        assert self.spaces[block.space].set_importance([block.key], [score]) in ([True], [False], [before])

    @precondition(some)
    @rule(number=picks)
    def remove(self, number: int) -> None:
        block = self.pick(number)
        (was,) = self.spaces[block.space].remove([block.key])
        assert was or self.pressed
        self.forget([block])
        assert not self.resident(block)

    @precondition(some)
    @rule(number=picks)
    def remove_and_put_another(self, number: int) -> None:
        """The bytes of a removed block never come back under its key."""
        block = self.pick(number)
        cache = self.spaces[block.space]
        cache.remove([block.key])
        self.forget([block])
        self.number += 1
        again = Block(block.space, block.key, payload(block.key, len(block.data), self.number), None)
        assert cache.put(again.key, again.data).stored
        self.blocks[again.key] = again
        data = cache.get(again.key)
        assert data is None or data.tobytes() == again.data

    @rule(number=picks)
    def flush(self, number: int) -> None:
        try:
            self.store.flush()
        except FullError:  # all that lies below is needed by what lies above
            assert self.pressed

    @rule(space=st.none() | spaces)
    def clear(self, space: int | None) -> None:
        (self.store if space is None else self.spaces[space]).clear()
        self.forget(self.live(space))
        assert not any(
            self.spaces[i].contains([key(i, n)])[0] for i in range(3) for n in range(8) if space in (None, i)
        )
        if space is None:
            assert self.store.stats()["blocks"] == 0
            self.pressed = False
            self.press()

    @rule(space=spaces)
    def shift_to(self, space: int) -> None:
        """Another namespace takes the whole arena: at once nearly all of it is payload again."""
        self.held.clear()
        for block in self.pinned:
            self.spaces[block.space].unpin([block.key])
        self.pinned.clear()
        cache = self.spaces[space]
        for _ in range(2 * ARENA // SIZES[space]):
            self.number += 1
            of = key(space, self.number)
            block = Block(space, of, payload(of, SIZES[space]), None)
            assert cache.put(of, block.data).stored
            self.blocks[of] = block
        self.press()
        if len(self.tiers()) > 2:
            return  # the mover empties DRAM into CXL memory ahead of need, at times further than that
        found = 0
        for block in self.live():
            found += self.spaces[block.space].match([block.key]).bytes.get("dram", 0)
        # With a tier below, room for the next block is made ahead of need.
        ahead = SIZES[space] if len(self.tiers()) > 1 else 0
        # What `auto` names lies further apart among blocks of other sizes: more leaves until a hole is large enough.
        share = 0.9 if self.policy == "lru-leaf" else 0.85
        assert found + ahead >= share * self.store.stats()["tiers"]["dram"]["capacity_bytes"]

    # What always holds.

    @invariant()
    def what_is_held_stays(self) -> None:
        for held, data in self.held:
            assert bytes_of(held) == data

    @invariant()
    def parents_are_resident(self) -> None:
        for space, cache in enumerate(self.spaces):
            live = self.live(space)
            there = dict(zip((b.key for b in live), cache.contains([b.key for b in live]), strict=True))
            for block in live:
                if there[block.key] and block.parent is not None and not there[block.parent]:
                    assert not self.resident(block), "a block outlived its parent"
            assert self.pressed or all(there.values())

    @invariant()
    def nothing_is_larger_than_it_may_be(self) -> None:
        stats = self.store.stats()
        assert stats["blocks"] <= len(self.blocks)
        for tier in stats["tiers"].values():
            assert tier["used_bytes"] <= tier["capacity_bytes"] <= tier["size_bytes"]
            assert tier["corrupt"] == tier["errors"] == tier["quarantined_bytes"] == 0
        first = stats["tiers"]["dram"]
        assert first["used_bytes"] + stats["metadata_bytes"] <= first["size_bytes"]
        if not self.blocks and not self.held:
            self.store.flush()  # a slot is free once the record that frees it is durable
            for tier in self.store.stats()["tiers"].values():
                assert tier["used_bytes"] == tier["blocks"] == 0


def bytes_of(held: Any) -> bytes:
    if isinstance(held, Lease):
        (view,) = held.views
        return bytes(view or b"")
    return held.tobytes() if not isinstance(held, torch.Tensor) else held.numpy().tobytes()


class DiskMachine(MemoryMachine):
    """Memory over NVMe: what leaves the first comes back from the second, also after a restart."""

    def tiers(self) -> list[Any]:
        return [Dram(ARENA), Nvme(self.folder / "kv", 2 * ARENA)]

    @rule()
    def restart(self) -> None:
        before = [block for block in self.live() if self.resident(block)]
        self.store.close()
        self.pinned.clear()
        self.open()
        assert self.pressed or all(self.resident(block) for block in before)

    @precondition(some)
    @rule(number=picks)
    def drop_from_memory(self, number: int) -> None:
        """A block that lies only on NVMe, and then its way up."""
        self.restart()
        block = self.pick(number)
        cache = self.spaces[block.space]
        if self.resident(block):
            assert cache.match([block.key]).tiers == ["nvme"]
        data = cache.get(block.key)
        assert data is None or data.tobytes() == block.data
        assert data is not None or self.pressed


class ThreeTierMachine(DiskMachine):
    """DRAM, memory of a NUMA node, and NVMe."""

    def tiers(self) -> list[Any]:
        return [Dram(ARENA), Cxl(ARENA, numa_node=0), Nvme(self.folder / "kv", 2 * ARENA, engine="threads")]


class DeviceMachine(DiskMachine):
    """A small device above memory and NVMe: what is read there is what was put, whatever came and went meanwhile."""

    def tiers(self) -> list[Any]:
        return [Hbm(POOL, backend="host"), Dram(ARENA), Nvme(self.folder / "kv", 2 * ARENA)]

    @precondition(some)
    @rule(number=picks)
    def bring_up(self, number: int) -> None:
        block = self.pick(number)
        wanted = [other.key for other in self.live(block.space)[-8:]]
        for result in self.spaces[block.space].prefetch(wanted, to="hbm").result():
            assert result.tier == "hbm" or self.pressed

    @precondition(some)
    @rule(number=picks)
    def get_on_device(self, number: int) -> None:
        block = self.pick(number)
        wanted = self.live(block.space)[-8:]
        device = self.store.device
        assert isinstance(device, HostBackend)
        outs = [device.empty(len(other.data)) for other in wanted]
        results = self.spaces[block.space].get_into([other.key for other in wanted], outs)
        for other, out, result in zip(wanted, outs, results, strict=True):
            assert (out.tobytes() == other.data) if result.hit else result.reason == "absent"

    @precondition(some)
    @rule(number=picks)
    def lease_on_device(self, number: int) -> None:
        """Whoever leases may scribble there; nobody else sees it."""
        block = self.pick(number)
        with self.spaces[block.space].lease([block.key], to="hbm") as lease:
            (array,) = lease.blocks
            assert (array is None) == (lease.reasons != [None])
            if array is not None:
                assert array.tobytes() == block.data
                array[:] = 0


TestMemory = MemoryMachine.TestCase
TestMemory.settings = settings(max_examples=15, stateful_step_count=30, phases=[Phase.generate])
TestDisk = DiskMachine.TestCase
TestDisk.settings = settings(max_examples=15, stateful_step_count=30, phases=[Phase.generate])
TestThreeTiers = ThreeTierMachine.TestCase
TestThreeTiers.settings = settings(max_examples=10, stateful_step_count=30, phases=[Phase.generate])
TestDevice = DeviceMachine.TestCase
TestDevice.settings = settings(max_examples=10, stateful_step_count=30, phases=[Phase.generate])
