"""Loading a prefix layer by layer, on threads of its own, while the model computes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.integrations.tensors import BlockBuffer, layer_shapes
from kvtier.integrations.verbs import BlockNamespace
from kvtier.layout import KVLayout
from kvtier.prefill.cache import Room
from kvtier.prefill.storing import UNAVAILABLE
from kvtier.prefill.timeline import Event
from kvtier.tiers import DeviceBackend, HostArray

__all__ = ["Load", "MissingError", "Stages", "is_device_of", "layer_groups", "tokens_to_read"]

PARTLY = ("dram", "cxl", "dict")
"""Tiers of which some tokens of a layer can be read without reading the rest. On NVMe a segment is read whole, to be verified;
on a device each range of tokens would be a copy of its own, for bytes that cost little there.
"""
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


def is_device_of(backend: DeviceBackend | None, model: torch.device) -> bool:
    """Whether an HBM tier is in the memory that a model on this device computes with."""
    here = "host" if model.type == "cpu" else f"{model.type}:{model.index or 0}"
    return backend is not None and backend.name == here


class Stage:
    """Staging memory of one loader, allocated with its first use, and the stream that copies out of it.

    Args:
        size: bytes.
        device: of the model.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._size = size
        self._device = device
        self._shape: object = None
        self._buffer: BlockBuffer | None = None
        self._rows: list[Any] = []

    def blocks(self, layout: KVLayout, layers: range, count: int, hbm: bool) -> tuple[BlockBuffer, list[Any]]:
        """The memory as blocks of some layers, and the first ``count`` of them as arrays to get into. It is kept for the next
        layers of the same shape: on two cores, what a loader does for each block is time that the model has not.
        """
        shape = (layout, hbm, layer_shapes(layout)[layers.start : layers.stop])
        if self._buffer is None or shape != self._shape:
            memory = self.on_device if hbm else self.on_host
            each = layout.offsets[layers.stop] - layout.offsets[layers.start]
            self._shape, self._buffer, self._rows = shape, BlockBuffer(layout, self._size // each, layers, memory), []
        if len(self._rows) < count:
            rows = self._buffer.rows(count)
            self._rows = [_of_device(row) for row in rows] if hbm else rows
        return self._buffer, self._rows[:count]

    @cached_property
    def on_host(self) -> torch.Tensor:
        """``uint8[size]``, for what comes by way of the host; pinned where a GPU will read it."""
        return torch.empty(self._size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    @cached_property
    def on_device(self) -> torch.Tensor:
        """``uint8[size]``, for what is in HBM."""
        return torch.empty(self._size, dtype=torch.uint8, device=self._device)

    @cached_property
    def stream(self) -> torch.cuda.Stream | None:
        """Always the same: a copy that came too late for one request ends before the next one's begin."""
        return torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def queue(self) -> AbstractContextManager[Any]:
        """What is copied within is queued on the stream, if there is one."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


class Stages:
    """The loaders' staging memory, and their threads.

    Args:
        size: bytes, all of them together; as much again on the device where blocks are read from HBM.
        device: of the model.
        hbm: whether blocks in HBM are read on the device, see :func:`is_device_of`.
    """

    def __init__(self, size: int, device: torch.device, *, hbm: bool) -> None:
        self.each = max(size // LOADERS // 64 * 64, 64)
        self.hbm = hbm
        self._lock = threading.Lock()
        self._loads: list[Load] = []
        self._working = 0
        self._free: queue.SimpleQueue[Stage] = queue.SimpleQueue()
        for _ in range(LOADERS):
            self._free.put(Stage(self.each, device))
        self._threads = ThreadPoolExecutor(LOADERS, thread_name_prefix="kvtier-load")

    def start(self, loads: Sequence[Load]) -> None:
        """Have the parts of loads read. They take turns layer by layer, for who computes them together waits for all. Does not
        block.
        """
        with self._lock:
            self._loads += loads
        self._one_more()

    def _one_more(self) -> None:
        """Let another loader begin, if one is idle. The first one has the link to itself until it has read its part: two
        would share it, and the model wait twice as long for the first layers.
        """
        with self._lock:
            if self._loads and self._working < LOADERS:
                self._threads.submit(self._work)
                self._working += 1

    def _work(self) -> None:
        stage = self._free.get()
        while (found := self._take()) is not None:
            load, part = found
            load.read(part, stage, self._one_more)
        self._free.put(stage)

    def _take(self) -> tuple[Load, _Part] | None:
        """The part to read next."""
        with self._lock:
            while self._loads:
                load = min(self._loads, key=lambda each: each.group)
                if (part := load.take()) is not None:
                    return load, part
                self._loads.remove(load)
            self._working -= 1
        return None

    def close(self) -> None:
        """End the threads. Blocks until their loads have ended."""
        self._threads.shutdown()


class _Some(NamedTuple):
    """Blocks that are read in one call, of layer after layer."""

    numbers: Sequence[int]
    """Counted from the first of the load."""
    keys: Sequence[bytes]
    reads: NDArray[np.bool_]
    """See :func:`tokens_to_read`."""
    tokens: NDArray[np.bool_] | None
    """The same; ``None`` for all."""
    hbm: bool
    """Whether they are read on the device."""
    tiers: Mapping[str, int]
    """Tokens to read, by the tier where they were found."""


class _Part(NamedTuple):
    """What is read in one call."""

    group: int
    some: _Some


class Load:
    """The tail of one request's prefix on its way into the room.

    From :meth:`Stages.start` on layers are loaded first to last, a few at a time, and within them blocks in the order of the prompt. A block that
    fails is left out from then on; the others go on. What was found in HBM is handed over on the device, if that is where the
    model computes; blocks that have left it by then come from below, in the same call.

    Args:
        blocks: where from.
        room: where to.
        first: the number of the first block.
        keys: of consecutive blocks.
        tiers: where each of them was found, which is what its bytes are reported as: once a part of a small block was read, all
            of it is in memory. Only of those found in HBM, which are in other tiers too, it is where they were read.
        groups: layers to load together, first to last.
        deadline: ``time.perf_counter()`` after which nothing is waited for; ``None`` for never.
        begun: when the request began, for the timeline.
        stages: staging memory and threads, which start it.
        kept: ``bool[tokens]`` of the keys' tokens: which to load; default all, and at the places of the others zeros. See
            :func:`tokens_to_read` for what is read.
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
        kept: torch.Tensor | None = None,
    ) -> None:
        self._blocks = blocks
        self._room = room
        self._first = first
        self._keys = keys
        self._tiers = tiers
        self._deadline = deadline
        self._begun = begun
        self._changed = threading.Condition()
        self._groups = groups
        self._kept = None if kept is None else kept.view(-1, blocks.layout.block_tokens).numpy()
        # Without the model's device, a block in HBM is read from below.
        self._reads = tokens_to_read(blocks.layout, kept, [t if stages.hbm or t != "hbm" else "dram" for t in tiers])
        self._items: list[_Part] = []
        self._open: list[int] = []
        self._group_of: dict[int, int] = {}
        layout = blocks.layout
        wanted = np.flatnonzero(self._reads.any(1)).tolist()
        if len(wanted) < len(keys):
            unread = torch.from_numpy(~self._reads.any(1)).repeat_interleave(layout.block_tokens)
            room.clear(first * layout.block_tokens + unread.nonzero()[:, 0])
        kinds = [  # a call reads into memory of one kind
            (hbm, some)
            for hbm in (True, False)
            if (some := [i for i in wanted if (stages.hbm and tiers[i] == "hbm") == hbm])
        ]
        steps: dict[int, list[_Some]] = {}
        for number, group in enumerate(groups):
            step = max(1, stages.each // (layout.offsets[group.stop] - layout.offsets[group.start]))
            if step not in steps:
                steps[step] = [
                    self._some(some[at : at + step], hbm) for hbm, some in kinds for at in range(0, len(some), step)
                ]
            self._items += [_Part(number, some) for some in steps[step]]
            self._open.append(len(steps[step]))
            self._group_of |= dict.fromkeys(group, number)
        self._next = 0
        self._error: BaseException | None = None
        self.missing: set[int] = set()
        """Numbers of blocks that did not load, counted from the first of the prompt."""
        self.reason = ""
        self.events: list[Event] = []
        self._reading = 0

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
        with self._changed:
            self._changed.wait_for(lambda: not self._reading and (self._next >= len(self._items) or self._error))
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Load no more, and block until what was begun has ended: it writes to the room."""
        with self._changed:
            self._next = len(self._items)
            self._changed.wait_for(lambda: not self._reading)

    @property
    def group(self) -> int:
        """Which layers are read next."""
        with self._changed:
            return self._items[self._next].group if self._next < len(self._items) else 0

    def take(self) -> _Part | None:
        """The part that is next, which the caller :meth:`read` then; ``None`` for no more."""
        with self._changed:
            if self._next >= len(self._items) or self._error is not None:
                return None
            self._next += 1
            self._reading += 1
            return self._items[self._next - 1]

    def read(self, part: _Part, stage: Stage, came: Callable[[], None]) -> None:
        """A loader's work.

        Args:
            part: what to read.
            stage: where to.
            came: called once it is read, before it is copied to where the model reads.
        """
        error: BaseException | None = None
        try:
            self._read(part, stage, came)
        except BaseException as caught:  # the model's thread raises it
            error = caught
        with self._changed:
            self._error = self._error or error
            self._reading -= 1
            self._open[part.group] -= error is None
            self._changed.notify_all()

    def _some(self, numbers: Sequence[int], hbm: bool) -> _Some:
        reads = self._reads[numbers]
        tiers: dict[str, int] = {}
        for i, count in zip(numbers, reads.sum(1).tolist(), strict=True):
            tiers[self._tiers[i]] = tiers.get(self._tiers[i], 0) + count
        return _Some(numbers, [self._keys[i] for i in numbers], reads, None if reads.all() else reads, hbm, tiers)

    def _read(self, part: _Part, stage: Stage, came: Callable[[], None]) -> None:
        group, layout, some = self._groups[part.group], self._blocks.layout, part.some
        if self.missing:
            some = self._some([i for i in some.numbers if self._first + i not in self.missing], some.hbm)
        if not some.numbers:
            return
        buffer, rows = stage.blocks(layout, group, len(some.numbers), some.hbm)
        begun = time.perf_counter()
        left = None if self._deadline is None else max(0.0, self._deadline - begun)
        try:
            with stage.queue():
                results = self._blocks.get_into(
                    some.keys, rows, layers=(group.start, group.stop), tokens=some.tokens, timeout=left
                )
        except UNAVAILABLE as error:
            self._lose(some.numbers, str(error))
            return
        finally:
            came()
        bad = {at: result for at, result in enumerate(results) if not result.hit}
        if bad:
            self._lose([some.numbers[at] for at in bad], next(iter(bad.values())).reason or "the block is gone")
        size = layout.block_tokens
        tensors = self._room.slice(group)
        with stage.queue():
            if self._kept is not None:
                buffer.clear(*np.nonzero(~self._kept[some.numbers]))
            for first, last in _runs(some.numbers, bad):
                buffer.write_to(tensors, (self._first + some.numbers[first]) * size, last - first, first)
        if stage.stream is not None:
            stage.stream.synchronize()
        ended = time.perf_counter()
        tiers = some.tiers
        if bad or "hbm" in tiers:
            tiers = {}
            for i, result, count in zip(some.numbers, results, some.reads.sum(1).tolist(), strict=True):
                if result.hit:
                    tier = str(result.tier) if self._tiers[i] == "hbm" else self._tiers[i]
                    tiers[tier] = tiers.get(tier, 0) + count
        token = rows[0].nbytes // size
        span = (self._first + some.numbers[0]) * size, (self._first + some.numbers[-1] + 1) * size
        begins, ends = begun - self._begun, ended - self._begun
        with self._changed:
            self.events += [
                Event("load", group.start, span, begins, ends, tier, n * token) for tier, n in tiers.items()
            ]

    def _lose(self, wanted: Sequence[int], reason: str) -> None:
        with self._changed:
            self.reason = self.reason or reason
            self.missing.update(self._first + i for i in wanted)
            self._changed.notify_all()


def _of_device(row: Any) -> Any:
    """An array on the device, as an HBM tier takes it: the one that is the host's own knows its arrays by their type."""
    return row.view(HostArray) if isinstance(row, np.ndarray) else row


def tokens_to_read(layout: KVLayout, kept: torch.Tensor | None, tiers: Sequence[str]) -> NDArray[np.bool_]:
    """Which tokens a :class:`Load` reads of each block.

    Args:
        layout: of the blocks.
        kept: ``bool[tokens]``: which of their tokens are wanted; ``None`` for all.
        tiers: where each block lies.

    Returns:
        ``bool[blocks, block_tokens]``: the kept tokens where a tier can be read in parts; elsewhere all of a block, if one
        is kept.
    """
    if kept is None:
        return np.ones((len(tiers), layout.block_tokens), np.bool_)
    reads: NDArray[np.bool_] = kept.view(-1, layout.block_tokens).numpy().copy()
    whole = np.array([tier not in PARTLY for tier in tiers], np.bool_)
    reads[whole] = reads[whole].any(1, keepdims=True)
    return reads


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
