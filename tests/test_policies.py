"""Every policy against its plain model, and what holds for all of them whatever is asked."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier._kvtier import POLICIES, Policy
from plain_auto import Auto
from plain_policies import PLAIN, Importance, Meta, Plain

CAPACITY = 12
BLOCKS = 40

# Those that know chains themselves, and have no other form.
IN_CHAINS: dict[str, Callable[[int], Plain]] = {"importance": Importance, "auto": Auto}


class Steep(Importance):
    """``importance:0.5``."""

    SLOPE = np.float32(0.5)


# A request uses a block, or a chain of them; or a block is removed by its owner; or gets a score; or it is pinned, or let go.
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, BLOCKS - 1)),
        st.tuples(st.just("use"), st.integers(0, BLOCKS - 1)),
        st.tuples(st.just("use"), st.integers(0, 15)),
        st.tuples(st.just("remove"), st.integers(0, BLOCKS - 1)),
        st.tuples(st.just("score"), st.integers(0, BLOCKS - 1)),
        st.tuples(st.just("pin"), st.integers(0, BLOCKS - 1)),
    ),
    min_size=40,
    max_size=300,
)


def parent(block: int) -> int | None:
    return (block - 1) // 2 if block else None


class Tier:
    """A policy and its plain model, kept in step, in a tier that holds ``capacity`` blocks."""

    def __init__(self, name: str, model: Callable[[int], Plain] | None, chains: bool, capacity: int = CAPACITY) -> None:
        self.policy = Policy(name, capacity)
        self.model = model(capacity) if model else None
        if self.model:
            self.model.is_leaf = self.is_leaf
        self.capacity = capacity
        self.chains = chains
        self.evictions = 0
        self.here: set[int] = set()
        self.pinned: set[int] = set()

    def is_leaf(self, block: int) -> bool:
        return not self.chains or not any(parent(other) == block for other in self.here)

    def ask(self, block: int) -> None:
        """A request for a block, and for all before it."""
        above = parent(block)
        if above is not None and self.chains:
            self.ask(above)
        self.use(block)

    def use(self, block: int) -> None:
        above = parent(block)
        if block in self.here:
            self.policy.hit(block)
            if self.model:
                self.model.hit(block)
            return
        if self.chains and above is not None and above not in self.here:
            return
        # Scores and sizes of which sums are exact.
        meta = Meta(above if self.chains else None, 1 + block % 3, block % 5 / 4)
        told = block, meta.parent, meta.pages, meta.importance
        admitted = self.policy.admit(block, *told)
        if self.model:
            assert self.model.admit(block, meta) == admitted
        if len(self.here) == self.capacity:
            if not admitted:
                self.policy.refuse(*told)
                if self.model:
                    self.model.refuse(block, meta)
                return
            if not self.make_room({meta.parent} if meta.parent is not None else set()):
                return
        self.policy.insert(block, *told)
        if self.model:
            self.model.insert(block, meta)
        self.here.add(block)

    def make_room(self, needed: set[int]) -> bool:
        kept = self.pinned | needed
        named = self.policy.victims(1, kept)
        if self.model:
            assert named == [
                b for b in [self.model.victim(lambda b: b not in kept and self.is_leaf(b))] if b is not None
            ]
        if not named:
            assert all(block in kept or not self.is_leaf(block) for block in self.here)
            return False
        (victim,) = named
        self.evictions += 1
        assert victim in self.here
        assert victim not in kept
        assert self.is_leaf(victim)
        self.remove(victim)
        return True

    def remove(self, block: int) -> None:
        if block in self.here and self.is_leaf(block):
            self.here.discard(block)
            self.policy.remove(block)
            if self.model:
                self.model.remove(block)

    def score(self, block: int) -> None:
        if block in self.here:
            score = len(self.here) / 4
            self.policy.set_importance(block, score)
            if self.model:
                self.model.set_importance(block, score)

    def run(self, steps: list[tuple[str, int]]) -> None:
        for what, block in steps:
            match what:
                case "ask":
                    self.ask(block)
                case "use":
                    self.use(block)
                case "remove":
                    self.remove(block)
                case "score":
                    self.score(block)
                case _:
                    self.pinned ^= {block}
            assert len(self.policy) == len(self.here) <= self.capacity


@pytest.mark.parametrize(
    ("name", "model", "chains"),
    [
        *[pytest.param(name, PLAIN[name], False, id=name) for name in PLAIN],
        *[pytest.param(f"{name}-leaf", PLAIN[name], True, id=f"{name}-leaf") for name in PLAIN],
        *[pytest.param(name, IN_CHAINS[name], True, id=name) for name in IN_CHAINS],
        pytest.param("importance:0.5", Steep, True, id="importance:0.5"),
    ],
)
@settings(max_examples=40)
@given(steps=STEPS)
def test_the_victim_is_the_models(
    name: str, model: Callable[[int], Plain], chains: bool, steps: list[tuple[str, int]]
) -> None:
    # Blocks that were passed because they were pinned are asked again a few at a time, so a model knows the next
    # victim for certain only where nothing is pinned but the parent of what comes.
    Tier(name, model, chains).run([step for step in steps if step[0] != "pin"])


def test_every_policy_has_a_model() -> None:
    assert set(POLICIES) == {*PLAIN, *(f"{name}-leaf" for name in PLAIN), *IN_CHAINS}


@pytest.mark.parametrize("capacity", [100, 800], ids=["few blocks", "enough to spare what is young"])
def test_autos_victim_is_the_models_once_it_has_learned(capacity: int) -> None:
    rng, tier = random.Random(capacity), Tier("auto", Auto, True, capacity)
    for now in range(800):
        # Some of it is popular, some came not long ago, and most is never asked for again.
        tier.ask(rng.choice([int(rng.paretovariate(0.4)) % 1000, 9 * now // 10, 10 * now + rng.randrange(30)]))
    assert tier.evictions > 500


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=40)
@given(steps=STEPS)
def test_pinned_blocks_stay_and_all_are_accounted_for(name: str, steps: list[tuple[str, int]]) -> None:
    tier = Tier(name, None, chains=name not in PLAIN)
    tier.run(steps)
    everything = tier.policy.victims(BLOCKS, set())
    assert sorted(everything) == sorted(tier.here)
    left = set(tier.here)
    for block in everything:
        left.discard(block)
        assert not tier.chains or all(parent(other) != block for other in left)
        tier.policy.remove(block)
    assert len(tier.policy) == 0
    assert tier.policy.victims(1, set()) == []


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("pattern", ["scan", "loop", "one-hit wonders"])
def test_long_patterns_never_pass_capacity(name: str, pattern: str) -> None:
    capacity, rng = 100, random.Random(1)
    policy, here = Policy(name, capacity), set[int]()
    for i in range(3000):
        block = {"scan": i, "loop": i % 150, "one-hit wonders": i if i % 3 else rng.randrange(50)}[pattern]
        if block in here:
            policy.hit(block)
            continue
        if not policy.admit(block, block):
            continue
        if len(here) == capacity:
            (victim,) = policy.victims(1, set())
            here.remove(victim)
            policy.remove(victim)
        policy.insert(block, block)
        here.add(block)
        assert len(policy) == len(here) <= capacity


@pytest.mark.parametrize("name", POLICIES)
def test_thousands_of_pins_are_passed_once(name: str) -> None:
    policy = Policy(name, 6000)
    for block in range(6000):
        policy.insert(block, block)
    pinned = set(range(5000))
    gone: set[int] = set()
    # Fifty searches pass all that is pinned, 1,024 at most in each; after that they find at once what is not.
    for _ in range(50):
        for victim in policy.victims(20, pinned):
            assert victim not in pinned
            policy.remove(victim)
            gone.add(victim)
    assert len(gone) >= 800
    assert len(policy) == 6000 - len(gone)
    # And what is let go is found again.
    for _ in range(50):
        for victim in policy.victims(6000, set()):
            policy.remove(victim)
            gone.add(victim)
    assert gone == set(range(6000))


@pytest.mark.parametrize("name", POLICIES)
def test_a_removed_handle_can_come_back_as_another_block(name: str) -> None:
    policy = Policy(name, 10)
    for round_ in range(20):
        for block in range(10):
            policy.insert(block, round_ * 100 + block, block - 1 if block and "-leaf" in name else None)
        for block in reversed(range(10)):
            policy.hit(block)
            policy.remove(block)
            policy.remove(block)  # a second time changes nothing
        assert len(policy) == 0
        assert policy.victims(5, set()) == []
