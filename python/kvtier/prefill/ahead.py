"""Lookahead: what waiting requests will need is on its way to memory before their turn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from kvtier.errors import KvtierError
from kvtier.integrations.verbs import BlockNamespace, Transfer

__all__ = ["Lookahead"]

_MEMORY = ("hbm", "dram", "cxl")


@dataclass
class _Waiting:
    keys: Sequence[bytes]
    jobs: list[tuple[Transfer, str, int]] = field(default_factory=list)
    """What is fetched, to which tier, and its bytes."""
    known: bool = True
    """Whether the keys are what it will load."""


class Lookahead:
    """Prefetches for the requests that wait, first come first, so that no more than a budget is under way or unused.

    Args:
        blocks: where from.
        budget: bytes of blocks that are fetched ahead for requests that have not begun.
        deadline: seconds that a prefetch may take; ``None`` for no limit.
        hbm: how much of it to HBM, first; what does not fit there goes to memory if it is not. Default nothing.
    """

    def __init__(self, blocks: BlockNamespace, budget: int, deadline: float | None, hbm: int = 0) -> None:
        self._blocks = blocks
        self._deadline = deadline
        self._left = {"hbm": min(hbm, budget), "dram": budget}
        self._lock = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvtier-ahead")

    def add(
        self,
        number: int,
        keys: Sequence[bytes],
        needed: Callable[[Sequence[bytes]], Sequence[bytes]] | None = None,
    ) -> None:
        """A request waits, behind those that were added before. Does not block.

        Args:
            number: its own.
            keys: of its blocks.
            needed: says which of them it will load, on a thread of the lookahead's; default all.
        """
        with self._lock:
            self._waiting[number] = _Waiting(keys, known=needed is None)
            if needed is not None:
                self._thread.submit(self._learn, self._waiting[number], needed)
            self._start()

    def _learn(self, waiting: _Waiting, needed: Callable[[Sequence[bytes]], Sequence[bytes]]) -> None:
        keys: Sequence[bytes] = ()
        try:
            keys = needed(waiting.keys)
        finally:  # what cannot be told is the request's own to load
            with self._lock:
                waiting.keys, waiting.known = keys, True
                self._start()

    def close(self) -> None:
        """Blocks until nothing is being looked up."""
        self._thread.shutdown()

    def take(self, number: int) -> None:
        """It begins now: what has not arrived is its own to load, and its share of the budget is the next one's."""
        with self._lock:
            waiting = self._waiting.pop(number, None)
            for job, goal, size in waiting.jobs if waiting is not None else ():
                job.cancel()
                self._pay(goal, -size)
            self._start()

    def _start(self) -> None:
        """Begin what the budget has room for, under the lock. Where the store refuses, who waits meets the same and says so."""
        with suppress(KvtierError):
            self._fetch()

    def _fetch(self) -> None:
        size = self._blocks.layout.block_bytes
        for waiting in self._waiting.values():
            if waiting.jobs or not waiting.known:
                continue
            match = self._blocks.match(waiting.keys)
            found = list(zip(waiting.keys, match.tiers, strict=False))
            for goal, there in (("hbm", ("hbm",)), ("dram", _MEMORY)):
                room = min(self._left["dram"], self._left[goal]) // size
                wanted = [key for key, tier in found if tier not in there][:room]
                if wanted:
                    job = self._blocks.prefetch(wanted, to=goal, deadline=self._deadline)
                    self._pay(goal, len(wanted) * size)
                    waiting.jobs.append((job, goal, len(wanted) * size))
                    fetched = set(wanted)
                    found = [(key, tier) for key, tier in found if key not in fetched]

    def _pay(self, goal: str, size: int) -> None:
        """What goes to HBM goes by way of memory."""
        for tier in {goal, "dram"}:
            self._left[tier] -= size
