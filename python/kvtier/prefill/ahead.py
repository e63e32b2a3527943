"""Lookahead: what waiting requests will need is on its way to memory before their turn."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.integrations.verbs import BlockNamespace, Transfer

__all__ = ["Lookahead"]

_MEMORY = ("hbm", "dram", "cxl")


@dataclass
class _Waiting:
    keys: Sequence[bytes]
    bytes: int = 0
    job: Transfer | None = None


class Lookahead:
    """Prefetches for the requests that wait, first come first, so that no more than a budget is under way or unused.

    Args:
        blocks: where from.
        budget: bytes of blocks that are fetched ahead for requests that have not begun.
        deadline: seconds that a prefetch may take; ``None`` for no limit.
    """

    def __init__(self, blocks: BlockNamespace, budget: int, deadline: float | None) -> None:
        self._blocks = blocks
        self._left = budget
        self._deadline = deadline
        self._lock = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}

    def add(self, number: int, keys: Sequence[bytes]) -> None:
        """A request waits, behind those that were added before. Does not block."""
        with self._lock:
            self._waiting[number] = _Waiting(keys)
            self._start()

    def take(self, number: int) -> None:
        """It begins now: what has not arrived is its own to load, and its share of the budget is the next one's."""
        with self._lock:
            waiting = self._waiting.pop(number, None)
            if waiting is not None and waiting.job is not None:
                waiting.job.cancel()
                self._left += waiting.bytes
            self._start()

    def _start(self) -> None:
        for waiting in self._waiting.values():
            if waiting.job is not None:
                continue
            match = self._blocks.match(waiting.keys)
            wanted = [key for key, tier in zip(waiting.keys, match.tiers, strict=False) if tier not in _MEMORY]
            fits = self._left // self._blocks.layout.block_bytes
            if not wanted:
                continue
            if not fits:
                return
            wanted = wanted[:fits]
            waiting.bytes = len(wanted) * self._blocks.layout.block_bytes
            self._left -= waiting.bytes
            waiting.job = self._blocks.prefetch(wanted, deadline=self._deadline)
