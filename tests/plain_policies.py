"""The eviction policies as plain lists, slow and obvious: what the fast ones are checked against.

Each keeps blocks in lists from the oldest to the newest, and is asked for one victim at a time among the candidates.
"""

from __future__ import annotations

from collections.abc import Callable


class Plain:
    """FIFO: the base of the others."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.order: list[int] = []

    def admit(self, block: int) -> None:
        pass

    def insert(self, block: int) -> None:
        self.order.append(block)

    def hit(self, block: int) -> None:
        pass

    def remove(self, block: int) -> None:
        self.order.remove(block)

    def victim(self, may: Callable[[int], bool]) -> int | None:
        return next(filter(may, self.order), None)


class Lru(Plain):
    def hit(self, block: int) -> None:
        self.order.remove(block)
        self.order.append(block)


class Counting(Plain):
    """With a number for each block."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.uses: dict[int, int] = {}

    def insert(self, block: int) -> None:
        super().insert(block)
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

    def insert(self, block: int) -> None:
        super().insert(block)
        self.clock += 1
        self.arrived[block] = self.clock

    def hit(self, block: int) -> None:
        self.uses[block] = 1

    def victim(self, may: Callable[[int], bool]) -> int | None:
        candidates = list(filter(may, self.order))
        while candidates:
            at = next((b for b in candidates if self.arrived[b] >= self.hand), None)
            if at is None:
                self.hand = 0
                continue
            self.hand = self.arrived[at] + 1
            if not self.uses[at]:
                if at == candidates[-1]:
                    self.hand = 0
                return at
            self.uses[at] = 0
        return None


class Gdsf(Counting):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.age = 0.0
        self.priority: dict[int, float] = {}

    def insert(self, block: int) -> None:
        super().insert(block)
        self.uses[block] = 1
        self.priority[block] = self.age + 1

    def hit(self, block: int) -> None:
        self.order.remove(block)
        self.order.append(block)
        self.uses[block] += 1
        self.priority[block] = self.age + self.uses[block]

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

    def insert(self, block: int) -> None:
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

    def admit(self, block: int) -> None:
        b1, b2 = len(self.gone_once), len(self.gone_often)
        self.returning = block in self.gone_often
        if block in self.gone_once:
            self.target = min(self.most, self.target + max(1.0, b2 / b1))
        elif self.returning:
            self.target = max(0.0, self.target - max(1.0, b1 / b2))

    def insert(self, block: int) -> None:
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


class WTinyLfu(Counting):
    """With exact counts instead of a sketch: equal as long as the sketch has no collisions and does not age."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.window_limit = max(1, capacity // 100)
        self.protected_limit = (capacity - min(capacity, self.window_limit)) * 4 // 5
        self.probation: list[int] = []
        self.protected: list[int] = []

    def insert(self, block: int) -> None:
        self.uses[block] = min(15, self.uses.get(block, 0) + 1)
        self.order.append(block)
        while len(self.order) > self.window_limit:
            self.probation.append(self.order.pop(0))

    def hit(self, block: int) -> None:
        self.uses[block] = min(15, self.uses[block] + 1)
        if block in self.order:
            self.order.remove(block)
            self.order.append(block)
            return
        (self.probation if block in self.probation else self.protected).remove(block)
        self.protected.append(block)
        while len(self.protected) > self.protected_limit:
            self.probation.append(self.protected.pop(0))

    def remove(self, block: int) -> None:
        next(blocks for blocks in (self.order, self.probation, self.protected) if block in blocks).remove(block)

    def victim(self, may: Callable[[int], bool]) -> int | None:
        settled = next(filter(may, self.probation + self.protected), None)
        if len(self.order) < self.window_limit and settled is not None:
            return settled
        candidate = next(filter(may, self.order), None)
        if candidate is None or settled is None:
            return candidate if settled is None else settled
        if self.uses[candidate] <= self.uses[settled]:
            return candidate
        self.order.remove(candidate)
        self.probation.append(candidate)
        return settled


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
