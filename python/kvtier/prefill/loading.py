"""Loading a prefix layer by layer, on threads of its own, while the model computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Container, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from kvtier.integrations.tensors import BlockBuffer
from kvtier.integrations.verbs import BlockNamespace
from kvtier.prefill.cache import Room
from kvtier.prefill.storing import UNAVAILABLE
from kvtier.prefill.timeline import Event

__all__ = ["Load", "MissingError", "Stages", "layer_groups"]

LOADERS = 2
"""One reads from the store while the other copies to where the model reads: one would leave the link idle meanwhile."""
_READ = 16 << 10


class MissingError(Exception):
    """Some of the prefix did not load."""


def layer_groups(sizes: Sequence[int]) -> list[range]:
    """Layers to load together: enough that a block's part has 16 KiB, but never more than a sixteenth of them: what waits
    for the last of them cannot be overlapped.

    Args:
        sizes: bytes of each layer in a block.

    Returns:
        Ranges of layers, first to last.
    """
    layers = len(sizes)
    each = max(1, min(-(-_READ * layers // sum(sizes)), layers // 16))
    return [range(first, min(first + each, layers)) for first in range(0, layers, each)]


class Stages:
    """Staging memory of the loaders, allocated once, and their threads.

    Args:
        size: bytes, all of them together.
        pinned: whether a GPU will read it.
    """

    def __init__(self, size: int, *, pinned: bool) -> None:
        self.each = max(size // LOADERS // 64 * 64, 64)
        self._pinned = pinned
        self._memory: list[torch.Tensor] = []
        self._threads = ThreadPoolExecutor(LOADERS, thread_name_prefix="kvtier-load")

    def memory(self) -> list[torch.Tensor]:
        """``uint8[each]``, one a loader."""
        while len(self._memory) < LOADERS:
            self._memory.append(torch.empty(self.each, dtype=torch.uint8, pin_memory=self._pinned))
        return self._memory

    def start(self, load: Load) -> list[Future[None]]:
        """Run a load's loaders."""
        return [self._threads.submit(load.pump, memory) for memory in self.memory()]

    def close(self) -> None:
        """End the threads. Blocks until their loads have ended."""
        self._threads.shutdown()


class Load:
    """The tail of one request's prefix on its way into the room.

    Layers are loaded first to last, a few at a time, and within them blocks in the order of the prompt. A block that
    fails is left out from then on; the others go on.

    Args:
        blocks: where from.
        room: where to.
        first: the number of the first block.
        keys: of consecutive blocks.
        tiers: where each of them was found; once a part of a small block was read, all of it is in memory.
        groups: layers to load together, first to last.
        deadline: ``time.perf_counter()`` after which nothing is waited for; ``None`` for never.
        begun: when the request began, for the timeline.
        stages: staging memory and threads.
    """

    def __init__(
        self,
        blocks: BlockNamespace,
        room: Room,
        first: int,
        keys: Sequence[bytes],
        tiers: Sequence[str],
        groups: Sequence[range],
        deadline: float | None,
        begun: float,
        stages: Stages,
    ) -> None:
        self._blocks = blocks
        self._room = room
        self._first = first
        self._keys = keys
        self._tiers = tiers
        self._deadline = deadline
        self._begun = begun
        self._changed = threading.Condition()
        self._items: list[tuple[int, range, int, int]] = []
        self._open: list[int] = []
        self._group_of: dict[int, int] = {}
        layout = blocks.layout
        for number, group in enumerate(groups):
            part = layout.offsets[group.stop] - layout.offsets[group.start]
            step = max(1, stages.each // part)
            spans = [(at, min(at + step, len(keys))) for at in range(0, len(keys), step)]
            self._items += [(number, group, *span) for span in spans]
            self._open.append(len(spans))
            self._group_of |= dict.fromkeys(group, number)
        self._next = 0
        self._error: BaseException | None = None
        self.missing: set[int] = set()
        """Numbers of blocks that did not load, counted from the first of the prompt."""
        self.reason = ""
        self.events: list[Event] = []
        self._threads = stages.start(self) if keys else []

    def wait(self, layer: int) -> None:
        """Block until a layer is there.

        Raises:
            MissingError: parts of it, or of one before it, are not.
        """
        number = self._group_of[layer]
        with self._changed:
            self._changed.wait_for(lambda: not self._open[number] or bool(self.missing) or self._error is not None)
            if self._error is not None:
                raise self._error
            if self.missing:
                raise MissingError

    def ready(self, layer: int) -> bool:
        """Whether :meth:`wait` would return at once."""
        return not self._open[self._group_of[layer]] and not self.missing and self._error is None

    def finish(self) -> None:
        """Block until nothing is loading any more."""
        for thread in self._threads:
            thread.result()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Load no more, and block until what was begun has ended: it writes to the room."""
        with self._changed:
            self._next = len(self._items)
        for thread in self._threads:
            thread.exception()

    def pump(self, memory: torch.Tensor) -> None:
        """A loader's work."""
        stream = torch.cuda.Stream(self._room.pairs[0][0].device) if memory.is_pinned() else None
        while True:
            with self._changed:
                if self._next >= len(self._items) or self._error is not None:
                    return
                item = self._items[self._next]
                self._next += 1
            try:
                self._item(*item[1:], memory, stream)
            except BaseException as error:  # the model's thread raises it
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._open[item[0]] -= 1
                self._changed.notify_all()

    def _item(
        self, group: range, start: int, stop: int, memory: torch.Tensor, stream: torch.cuda.Stream | None
    ) -> None:
        wanted = [i for i in range(start, stop) if self._first + i not in self.missing]
        if not wanted:
            return
        buffer = BlockBuffer(self._blocks.layout, len(wanted), group, memory)
        rows = buffer.rows(len(wanted))
        begun = time.perf_counter()
        left = None if self._deadline is None else max(0.0, self._deadline - begun)
        try:
            results = self._blocks.get_into(
                [self._keys[i] for i in wanted], rows, layers=(group.start, group.stop), timeout=left
            )
        except UNAVAILABLE as error:
            self._lose(wanted, str(error))
            return
        bad = {at: result for at, result in enumerate(results) if not result.hit}
        if bad:
            self._lose([wanted[at] for at in bad], next(iter(bad.values())).reason or "the block is gone")
        size = self._blocks.layout.block_tokens
        tensors = self._room.slice(group)
        with torch.cuda.stream(stream):  # does nothing without one
            for first, last in _runs(wanted, bad):
                buffer.write_to(tensors, (self._first + wanted[first]) * size, last - first, first)
        if stream is not None:
            stream.synchronize()
        ended = time.perf_counter()
        begins, ends = begun - self._begun, ended - self._begun
        sizes: dict[str, int] = {}
        for i, result in zip(wanted, results, strict=True):
            if result.hit:
                sizes[self._tiers[i]] = sizes.get(self._tiers[i], 0) + rows[0].nbytes
        span = (self._first + wanted[0]) * size, (self._first + wanted[-1] + 1) * size
        with self._changed:
            self.events += [Event("load", group.start, span, begins, ends, tier, n) for tier, n in sizes.items()]

    def _lose(self, wanted: Sequence[int], reason: str) -> None:
        with self._changed:
            self.reason = self.reason or reason
            self.missing.update(self._first + i for i in wanted)
            self._changed.notify_all()


def _runs(wanted: Sequence[int], bad: Container[int]) -> list[tuple[int, int]]:
    """Where in ``wanted`` there are consecutive good blocks: ``(first, last + 1)``."""
    runs: list[tuple[int, int]] = []
    for at, number in enumerate(wanted):
        if at in bad:
            continue
        if runs and runs[-1][1] == at and wanted[at - 1] == number - 1:
            runs[-1] = runs[-1][0], at + 1
        else:
            runs.append((at, at + 1))
    return runs
