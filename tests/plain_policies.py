"""The eviction policies as plain lists, slow and obvious: what the fast ones are checked against.

Each keeps blocks in lists from the oldest to the newest, and is asked for one victim at a time among the candidates. It is told
which blocks are leaves: what cannot be named for another reason is in the way where a hand goes round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Meta:
    """What a policy is told of a block that arrives."""

    parent: int | None = None
    pages: int = 1
    importance: float = 0.0


class Plain:
    """FIFO: the base of the others."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.order: list[int] = []
        self.is_leaf: Callable[[int], bool] = lambda block: True
        self.aside: set[int | None] = set()

    def admit(self, block: int, meta: Meta) -> bool:
        return True

    def refuse(self, block: int, meta: Meta) -> None:
        pass

    def insert(self, block: int, meta: Meta) -> None:
        self.order.append(block)
        self.aside.discard(meta.parent)

    def set_importance(self, block: int, score: float) -> None:
        pass

    def hit(self, block: int) -> None:
        pass

    def remove(self, block: int) -> None:
        self.order.remove(block)

    def victim(self, may: Callable[[int], bool]) -> int | None:
        return next(filter(may, self.order), None)

    # What a search passed is out of the way until the next, which matters to some.

    def ask_again(self, may: Callable[[int], bool]) -> None:
        self.aside = {block for block in self.aside if block is not None and self.is_leaf(block) and not may(block)}

    def first(self, blocks: list[int], may: Callable[[int], bool]) -> int | None:
        for block in blocks:
            if self.is_leaf(block) and block not in self.aside:
                if may(block):
                    return block
                self.aside.add(block)
        return None


class Lru(Plain):
    def hit(self, block: int) -> None:
        self.order.remove(block)
        self.order.append(block)


class Counting(Plain):
    """With a number for each block."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.uses: dict[int, int] = {}

    def insert(self, block: int, meta: Meta) -> None:
        super().insert(block, meta)
        self.uses[block] = 0


class Lfu(Counting):
    def hit(self, block: int) -> None:
        self.order.remove(block)
        self.order.append(block)
        self.uses[block] += 1

    def victim(self, may: Callable[[int], bool]) -> int | None:
        return min(filter(may, self.order), key=lambda block: self.uses[block], default=None)


class Clock(Counting):
    def hit(self, block: int) -> None:
        self.uses[block] = 1

    def victim(self, may: Callable[[int], bool]) -> int | None:
        while (block := next(filter(may, self.order), None)) is not None and self.uses[block]:
            self.uses[block] = 0
            self.order.remove(block)
            self.order.append(block)
        return block


class Sieve(Counting):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.arrived: dict[int, int] = {}
        self.hand = 0
        self.clock = 0

    def insert(self, block: int, meta: Meta) -> None:
        super().insert(block, meta)
        self.clock += 1
        self.arrived[block] = self.clock

    def hit(self, block: int) -> None:
        self.uses[block] = 1

    def victim(self, may: Callable[[int], bool]) -> int | None:
        self.ask_again(may)
        while True:
            at = self.first(self.ahead(), may)
            if at is None and self.hand == 0:
                return None
            self.hand = 0 if at is None else self.arrived[at] + 1
            if at is not None:
                if not self.uses[at]:
                    self.hand *= any(self.is_leaf(block) and block not in self.aside for block in self.ahead())
                    return at
                self.uses[at] = 0

    def ahead(self) -> list[int]:
        return [block for block in self.order if self.arrived[block] >= self.hand]


class Gdsf(Counting):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.age = 0.0
        self.pages: dict[int, int] = {}
        self.priority: dict[int, float] = {}

    def insert(self, block: int, meta: Meta) -> None:
        super().insert(block, meta)
        self.uses[block], self.pages[block] = 1, meta.pages
        self.priority[block] = self.age + 1 / meta.pages

    def hit(self, block: int) -> None:
        self.order.remove(block)
        self.order.append(block)
        self.uses[block] += 1
        self.priority[block] = self.age + self.uses[block] / self.pages[block]

    def victim(self, may: Callable[[int], bool]) -> int | None:
        block = min(filter(may, self.order), key=lambda b: self.priority[b], default=None)
        if block is not None:
            self.age = max(self.age, self.priority[block])
        return block


class S3Fifo(Counting):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.main: list[int] = []
        self.ghosts: list[int] = []
        self.most = 0

    def insert(self, block: int, meta: Meta) -> None:
        self.uses[block] = 0
        if block in self.ghosts:
            self.ghosts.remove(block)
            self.main.append(block)
        else:
            self.order.append(block)
        self.most = max(self.most, len(self.order) + len(self.main))

    def hit(self, block: int) -> None:
        self.uses[block] = min(self.uses[block] + 1, 3)

    def remove(self, block: int) -> None:
        if block in self.main:
            self.main.remove(block)
            return
        self.order.remove(block)
        self.ghosts.append(block)
        del self.ghosts[: -max(16, self.most - self.most // 10)]

    def _from_small(self, may: Callable[[int], bool]) -> int | None:
        while (block := next(filter(may, self.order), None)) is not None and self.uses[block] > 1:
            self.uses[block] = 0
            self.order.remove(block)
            self.main.append(block)
        return block

    def _from_main(self, may: Callable[[int], bool]) -> int | None:
        while (block := next(filter(may, self.main), None)) is not None and self.uses[block]:
            self.uses[block] -= 1
            self.main.remove(block)
            self.main.append(block)
        return block

    def victim(self, may: Callable[[int], bool]) -> int | None:
        if len(self.order) >= self.capacity // 10 and (block := self._from_small(may)) is not None:
            return block
        if (block := self._from_main(may)) is not None:
            return block
        if (block := self._from_small(may)) is not None:
            return block
        return self._from_main(may)


class Arc(Plain):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.often: list[int] = []
        self.gone_once: list[int] = []
        self.gone_often: list[int] = []
        self.target = 0.0
        self.most = 0
        self.returning = False

    def admit(self, block: int, meta: Meta) -> bool:
        b1, b2 = len(self.gone_once), len(self.gone_often)
        self.returning = block in self.gone_often
        if block in self.gone_once:
            self.target = min(self.most, self.target + max(1.0, b2 / b1))
        elif self.returning:
            self.target = max(0.0, self.target - max(1.0, b1 / b2))
        return True

    def insert(self, block: int, meta: Meta) -> None:
        if block in self.gone_once or block in self.gone_often:
            for ghosts in (self.gone_once, self.gone_often):
                if block in ghosts:
                    ghosts.remove(block)
            self.often.append(block)
        else:
            self.order.append(block)
        self.returning = False
        here = len(self.order) + len(self.often)
        self.most = max(self.most, here)
        while len(self.gone_once) > max(0, self.most - len(self.order)):
            del self.gone_once[0]
        while len(self.gone_often) > max(0, 2 * self.most - here - len(self.gone_once)):
            del self.gone_often[0]

    def hit(self, block: int) -> None:
        (self.order if block in self.order else self.often).remove(block)
        self.often.append(block)

    def remove(self, block: int) -> None:
        if block in self.order:
            self.order.remove(block)
            self.gone_once.append(block)
        else:
            self.often.remove(block)
            self.gone_often.append(block)

    def victim(self, may: Callable[[int], bool]) -> int | None:
        once = len(self.order)
        take_once = once > 0 and (once > self.target or (self.returning and once == self.target))
        lists = [self.order, self.often] if take_once else [self.often, self.order]
        return next((b for blocks in lists for b in filter(may, blocks)), None)


class WTinyLfu(Plain):
    SEEDS = (0x9E37_79B9_7F4A_7C15, 0xC2B2_AE3D_27D4_EB4F, 0x1656_67B1_9E37_79F9, 0xD6E8_FEB8_6659_FD93)

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.window_limit = max(1, capacity // 100)
        self.protected_limit = (capacity - min(capacity, self.window_limit)) * 4 // 5
        self.probation: list[int] = []
        self.protected: list[int] = []
        self.pages: dict[int, int] = {}
        self.sketch = [0] * max(256, 1 << (4 * capacity - 1).bit_length())
        self.additions = 0

    def places(self, block: int) -> list[int]:
        return [(block * seed % (1 << 64) >> 32) % len(self.sketch) for seed in self.SEEDS]

    def count(self, block: int) -> None:
        for place in self.places(block):
            self.sketch[place] = min(15, self.sketch[place] + 1)
        self.additions += 1
        if self.additions * 4 >= len(self.sketch) * 10:
            self.additions //= 2
            self.sketch = [count // 2 for count in self.sketch]

    def counted(self, block: int) -> int:
        return min(self.sketch[place] for place in self.places(block))

    def overflow(self, blocks: list[int], limit: int) -> None:
        while sum(self.pages[block] for block in blocks) > limit:
            movable = [block for block in blocks if self.is_leaf(block) and block not in self.aside]
            if not movable:
                break
            blocks.remove(movable[0])
            self.probation.append(movable[0])

    def insert(self, block: int, meta: Meta) -> None:
        self.count(block)
        self.pages[block] = meta.pages
        self.order.append(block)
        self.overflow(self.order, self.window_limit)
        self.aside.discard(meta.parent)

    def hit(self, block: int) -> None:
        self.count(block)
        self.aside.discard(block)
        if block in self.order:
            self.order.remove(block)
            self.order.append(block)
        else:
            (self.probation if block in self.probation else self.protected).remove(block)
            self.protected.append(block)
        self.overflow(self.protected, self.protected_limit)

    def remove(self, block: int) -> None:
        next(blocks for blocks in (self.order, self.probation, self.protected) if block in blocks).remove(block)
        self.aside.discard(block)

    def victim(self, may: Callable[[int], bool]) -> int | None:
        self.ask_again(may)
        settled = self.first(self.probation + self.protected, may)
        if sum(self.pages[block] for block in self.order) < self.window_limit and settled is not None:
            return settled
        candidate = self.first(self.order, may)
        if candidate is None or settled is None:
            return candidate if settled is None else settled
        if self.counted(candidate) <= self.counted(settled):
            return candidate
        self.order.remove(candidate)
        self.probation.append(candidate)
        return settled


class Importance(Plain):
    """Attention mass x seconds to compute the block again, per page, on top of an age (Cao and Irani, 1997)."""

    SLOPE = np.float32(1) / np.float32(60)

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.age = 0.0
        self.metas: dict[int, Meta] = {}
        self.depths: dict[int, int] = {}
        self.priority: dict[int, float] = {}

    def place(self, block: int) -> None:
        scores = [meta.importance for meta in self.metas.values() if meta.importance > 0]
        mean = sum(scores) / len(scores) if scores else 1.0
        meta = self.metas[block]
        mass = meta.importance / mean if meta.importance > 0 else 1.0
        seconds = np.float32(1) + self.SLOPE * np.float32(self.depths[block])
        self.priority[block] = self.age + mass * float(seconds) / meta.pages
        if block in self.order:
            self.order.remove(block)
        self.order.append(block)

    def insert(self, block: int, meta: Meta) -> None:
        self.metas[block] = meta
        self.depths[block] = 0 if meta.parent is None else self.depths[meta.parent] + 1
        self.place(block)

    def hit(self, block: int) -> None:
        self.place(block)

    def set_importance(self, block: int, score: float) -> None:
        self.metas[block] = replace(self.metas[block], importance=score)
        self.place(block)

    def remove(self, block: int) -> None:
        super().remove(block)
        del self.metas[block]

    def victim(self, may: Callable[[int], bool]) -> int | None:
        block = min(filter(may, self.order), key=lambda b: self.priority[b], default=None)
        if block is not None:
            self.age = max(self.age, self.priority[block])
        return block


PLAIN: dict[str, Callable[[int], Plain]] = {
    "fifo": Plain,
    "lru": Lru,
    "lfu": Lfu,
    "clock": Clock,
    "sieve": Sieve,
    "gdsf": Gdsf,
    "s3-fifo": S3Fifo,
    "arc": Arc,
    "w-tinylfu": WTinyLfu,
}
"""In chain order or not."""
