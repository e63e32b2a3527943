"""``auto`` as plain lists and dictionaries: what docs/POLICIES.md says of it, in the arithmetic of the fast one (32 bits).

Every number is worked out where it is asked for; nothing is cached but what the policy itself computes only now and then (the
worth of a class) or leaves for later (blocks that grew older stay in their list until somebody looks at its front).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from plain_policies import Meta, Plain

F = np.float32
AGES, GENERATIONS, GAPS = 40, 8, 8
CLASSES = GENERATIONS * GAPS * 2
TICK = 16  # uses in a tick
REFRESH = 16  # uses after which the worth of one class is computed
UNKNOWN, PRIOR, PRIOR_WIDE = F(0.02), F(100), F(2)

Cell = tuple[int, int]
"""A class, and an age."""


def begin_of(age: int) -> int:
    """The first tick of an age: two ages for each doubling."""
    if age < 4:
        return age
    return (1 << age // 2) + age % 2 * (1 << age // 2 - 1)


def age_of(ticks: int) -> int:
    return next(age for age in reversed(range(AGES)) if begin_of(age) <= ticks)


def width_of(age: int) -> np.float32:
    return F(begin_of(age + 1) - begin_of(age))


def gap_of(ticks: int) -> int:
    return min(max(0, age_of(ticks) - 6) // 3, GAPS - 2) + 1


def hash_of(block: int) -> int:
    return block * 0x9E37_79B9_7F4A_7C15 % (1 << 64) >> 32


@dataclass
class Known:
    """What is known of a block."""

    hash: int
    parent: int | None
    touched: int
    turn: int = 1
    hits: int = 0
    gap: int = 0
    continued: bool = False
    shared: bool = False

    def class_(self) -> int:
        generation = sum(self.turn + self.hits >= first for first in (2, 3, 4, 6, 10, 21, 61))
        return (generation * GAPS + self.gap) * 2 + self.continued


def wide_of(class_: int) -> int:
    """The class without its gap."""
    return class_ // (GAPS * 2) * 2 + class_ % 2


@dataclass
class Use:
    """The last use of a block, for learning from the next one."""

    at: int
    class_: int
    reached: int = 0  # ages in which it was counted


@dataclass
class Counts:
    at_risk: Counter[tuple[object, int]] = field(default_factory=Counter)
    back: Counter[tuple[object, int]] = field(default_factory=Counter)

    def chance(self, who: object, age: int, wider: np.float32, prior: np.float32) -> np.float32:
        at_risk, back = F(self.at_risk[who, age]), F(self.back[who, age])
        return (back + prior * wider) / (at_risk + prior)


class Reuse:
    """How soon blocks come back, by class; with it, what each is worth."""

    def __init__(self) -> None:
        self.uses: dict[int, Use] = {}
        self.counts = Counts()
        self.last: Cell = (0, 0)
        self.backs, self.bursts = F(20), F(1)
        self.worths: dict[int, list[np.float32]] = {}
        self.seen: set[int] = set()
        self.stale: set[int] = set()
        self.turn = 0
        self.touches = 0
        self.now = 0

    def touch(self, block: Known, now: int) -> None:
        self.touches += 1
        if self.touches % REFRESH == 0:
            self.refresh_next()
        for use in self.uses.values() if now > self.now else ():
            while now - use.at >= max(1, begin_of(use.reached)):
                self.count(self.counts.at_risk, use.class_, use.reached)
                use.reached += 1
        self.now = now
        if (before := self.uses.get(block.hash)) is not None:
            self.came_back(before, now)
        self.uses[block.hash] = Use(now, block.class_())
        self.stale.add(block.class_())
        if block.class_() not in self.seen:
            self.seen.add(block.class_())
            self.refresh(block.class_())

    def correct(self, block: Known) -> None:
        if block.hash in self.uses:
            self.uses[block.hash].class_ = block.class_()
            self.seen.add(block.class_())
            self.stale.add(block.class_())

    def count(self, what: Counter[tuple[object, int]], class_: int, age: int) -> None:
        for who in (class_, ("wide", wide_of(class_)), "common"):
            what[who, age] += 1
        self.stale.add(class_)

    def came_back(self, use: Use, now: int) -> None:
        age = age_of(now - use.at)
        for reached in range(use.reached, age + 1):
            self.count(self.counts.at_risk, use.class_, reached)
        self.count(self.counts.back, use.class_, age)
        self.backs += F(1)
        if self.last != (use.class_, age):
            self.last = (use.class_, age)
            self.bursts += F(1)

    def refresh_next(self) -> None:
        for class_ in [*range(self.turn + 1, CLASSES), *range(self.turn + 1)]:
            if class_ in self.stale:
                self.stale.remove(class_)
                self.turn = class_
                self.refresh(class_)
                return

    def refresh(self, class_: int) -> None:
        self.worths[class_] = self.gittins(self.chances(class_))

    def chances(self, class_: int) -> list[np.float32]:
        """Of coming back within each age: of the class, leaning on the wider ones."""
        burst, unknown, out = self.backs / self.bursts, UNKNOWN, []
        for age in range(AGES):
            common = self.counts.chance("common", age, unknown, PRIOR_WIDE * burst)
            unknown = min(common, UNKNOWN)
            wide = self.counts.chance(("wide", wide_of(class_)), age, common, PRIOR_WIDE * burst)
            out.append(min(self.counts.chance(class_, age, wide, PRIOR * burst), F(0.99)))
        return out

    def gittins(self, chances: list[np.float32]) -> list[np.float32]:
        """The best rate of hits for time, over all times that one might give a block of an age: each age takes in what
        comes after it as long as that is worth more.
        """
        worths: list[np.float32] = []
        later: list[tuple[np.float32, np.float32, np.float32]] = []
        for age in reversed(range(AGES)):
            back = chances[age]
            hits, time, alive = back, width_of(age) * (F(1) - back / F(2)), F(1) - back
            while later and later[-1][0] / later[-1][1] > hits / time:
                more, longer, left = later.pop()
                hits, time, alive = hits + alive * more, time + alive * longer, alive * left
            later.append((hits, time, alive))
            worths.append(hits / time)
        return worths[::-1]

    def worth(self, cell: Cell) -> np.float32:
        class_, age = cell
        if class_ in self.worths:
            return self.worths[class_][age]
        return UNKNOWN / (width_of(age) * (F(1) - UNKNOWN / F(2)))


class Departed:
    """A block that left is remembered in one place, until another takes it; the table grows from 64 places."""

    MOST = 1 << 14

    def __init__(self) -> None:
        self.places: dict[int, Known] = {}
        self.len = 64

    def place(self, hash_: int) -> int:
        """By linear hashing (Litwin, 1980)."""
        whole = 1 << (self.len - 1).bit_length()
        return hash_ % whole if hash_ % whole < self.len else hash_ % (whole // 2)

    def get(self, hash_: int) -> Known | None:
        block = self.places.get(self.place(hash_))
        return block if block is not None and block.hash == hash_ else None

    def add(self, block: Known) -> None:
        self.len = min(self.len + 4, self.MOST)
        self.places = {self.place(known.hash): known for known in self.places.values()}
        self.places[self.place(block.hash)] = replace(block, turn=min(63, block.turn + block.hits))


class Auto(Plain):
    """One tier, in chain order."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.known: dict[int, Known] = {}
        self.here: set[int] = set()
        self.lists: dict[Cell, list[int]] = {}
        self.children: Counter[int] = Counter()
        self.aside: set[int] = set()
        self.queue: list[int] = []
        self.departed = Departed()
        self.reuse = Reuse()
        self.touches = 0
        self.sweep = 0
        self.looked = 0
        self.young = 0

    @property
    def now(self) -> int:
        return self.touches // TICK

    # What is known of blocks.

    def arriving(self, block: int, meta: Meta) -> Known:
        new = Known(hash_of(block), meta.parent, self.now)
        if (left := self.departed.get(new.hash)) is not None:
            return replace(
                new,
                turn=left.turn,
                hits=1,
                gap=gap_of(self.now - left.touched),
                continued=left.continued,
                shared=left.shared,
            )
        if meta.parent in self.here:
            above = self.known[meta.parent]
            if above.hits == 0:
                return replace(new, turn=above.turn, gap=above.gap)
            if not above.shared:
                return replace(new, turn=above.turn + above.hits, gap=above.gap)
        return new

    def use(self, block: Known) -> None:
        self.touches += 1
        self.reuse.touch(block, self.now)

    def admit(self, block: int, meta: Meta) -> bool:
        self.grow_older()
        if (least := self.least()) is None:
            return True
        new = replace(self.arriving(block, meta), continued=True)
        return bool(self.reuse.worth((new.class_(), 0)) >= self.reuse.worth(least) * F(0.9))

    def refuse(self, block: int, meta: Meta) -> None:
        new = replace(self.arriving(block, meta), continued=True)
        self.use(new)
        self.departed.add(new)

    def insert(self, block: int, meta: Meta) -> None:
        self.known[block] = new = self.arriving(block, meta)
        self.here.add(block)
        self.use(new)
        if meta.parent in self.here:
            above = self.known[meta.parent]
            if not above.continued:
                above.continued = True
                self.reuse.correct(above)
                if above.parent is not None:
                    self.known[above.parent].shared = True
            self.children[meta.parent] += 1
            self.aside.discard(meta.parent)
            self.unlink(meta.parent)  # it leaves after its children
        self.place(block)

    def hit(self, block: int) -> None:
        known = self.known[block]
        now = (self.touches + 1) // TICK
        known.hits, known.gap, known.touched = known.hits + 1, gap_of(now - known.touched), now
        self.use(known)
        self.aside.discard(block)
        self.place(block)

    def remove(self, block: int) -> None:
        self.here.remove(block)
        self.unlink(block)
        self.aside.discard(block)
        self.departed.add(self.known[block])
        parent = self.known[block].parent
        if parent is not None:
            self.children[parent] -= 1
            self.place(parent)

    # The lists.

    def cell(self, block: int) -> Cell:
        """Where a block belongs: those that are young are one list of their class."""
        known = self.known[block]
        age = age_of(self.now - known.touched)
        return known.class_(), 0 if age < self.young else age

    def unlink(self, block: int) -> None:
        for cell, blocks in list(self.lists.items()):
            if block in blocks:
                blocks.remove(block)
                if not blocks:
                    del self.lists[cell]

    def place(self, block: int) -> None:
        self.unlink(block)
        if not self.children[block]:
            self.lists.setdefault(self.cell(block), []).append(block)

    def set_aside(self, block: int) -> None:
        """It cannot leave now: it is asked again when the queue comes to it."""
        self.unlink(block)
        self.aside.add(block)
        if block not in self.queue:
            self.queue.append(block)

    def grow_older(self) -> None:
        """Once a tick: what is no longer young, and a few of what grew older, goes where it belongs."""
        if self.looked == self.now:
            return
        self.looked = self.now
        self.grow_up()
        for _ in range(32):
            self.sweep = (self.sweep + 1) % CLASSES
            for cell in sorted(cell for cell in self.lists if cell[0] == self.sweep):
                for _ in range(4):
                    if cell not in self.lists or self.cell(self.lists[cell][0]) == cell:
                        break
                    self.place(self.lists[cell][0])

    def grow_up(self) -> bool:
        """Four of each class. False: all are young still."""
        classes = sorted({class_ for class_, _ in self.lists})
        return sum(self.grow(class_) for class_ in classes for _ in range(4)) > 0

    def grow(self, class_: int) -> bool:
        """The oldest young block goes where it belongs, unless it is young still."""
        young = self.lists.get((class_, 0), [])
        if not self.young or not young or self.cell(young[0]) == (class_, 0):
            return False
        self.place(young[0])
        return True

    def cheapest(self) -> Cell | None:
        """The list that is worth least; of young blocks only if there are no others."""
        self.young = age_of(max(0, len(self.here) - 256) // 16 // TICK)
        while True:
            grown = sorted(cell for cell in self.lists if cell[1] >= self.young)
            if grown or self.young == 0:
                return min(grown, key=self.reuse.worth, default=None)
            if not self.grow_up():
                self.young = 0

    def least(self) -> Cell | None:
        """As ``cheapest``, with a block in front that belongs there."""
        for _ in range(64):
            cell = self.cheapest()
            if cell is None or self.cell(self.lists[cell][0]) == cell:
                break
            self.place(self.lists[cell][0])
        return self.cheapest()

    def victim(self, may: Callable[[int], bool]) -> int | None:
        for _ in range(min(2, len(self.queue)) if self.lists else len(self.queue)):
            block = self.queue.pop(0)
            if block in self.aside and may(block):
                self.aside.remove(block)
                self.place(block)
            elif block in self.aside:
                self.set_aside(block)
        self.grow_older()
        while (cell := self.least()) is not None:
            block = self.lists[cell][0]
            if may(block):
                self.grow(cell[0])
                return block
            self.set_aside(block)
        return None
