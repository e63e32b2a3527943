"""Write-back: new blocks go to the store behind the computation, on a thread of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from kvtier.errors import CorruptError, DeadlineError, FullError, StorageError
from kvtier.integrations.tensors import BlockBuffer
from kvtier.integrations.verbs import BlockNamespace
from kvtier.prefill.attended import Attended
from kvtier.prefill.cache import Pair, Readers
from kvtier.prefill.importance import block_scores
from kvtier.prefill.timeline import Event

__all__ = ["UNAVAILABLE", "WriteBack", "Writer", "held"]

UNAVAILABLE = (DeadlineError, StorageError, CorruptError, FullError)
"""A store that cannot serve costs a recompute; anything else (a closed store, a bug) is for the caller to see."""


def held(blocks: BlockNamespace, keys: Sequence[bytes]) -> int:
    """How many of the first keys are there."""
    return next((i for i, there in enumerate(blocks.contains(keys)) if not there), len(keys))


class WriteBack:
    """The blocks of one request on their way to the store.

    Attributes:
        blocks_stored: how many the store took so far.
        blocks_refused: how many it did not take, for want of room or a working device.
        seconds: spent storing them.
        events: when.
    """

    def __init__(self, begun: float) -> None:
        self.begun = begun
        self.blocks_stored = 0
        self.blocks_refused = 0
        self.seconds = 0.0
        self.events: list[Event] = []
        self._changed = threading.Condition()
        self._open = 0
        self._error: BaseException | None = None

    def wait(self, timeout: float | None = None) -> bool:
        """Block until every block so far is stored or refused; whether that is so after ``timeout`` seconds.

        Raises:
            KvtierError: what the store raised, where that is more than a lack of room or a failing device.
        """
        with self._changed:
            done = self._changed.wait_for(lambda: not self._open, timeout)
            if self._error is not None:
                raise self._error
        return done

    def opened(self) -> None:
        """One more job is under way."""
        with self._changed:
            self._open += 1

    def closed(self, error: BaseException | None = None) -> None:
        """One of them has ended."""
        with self._changed:
            self._open -= 1
            self._error = self._error or error
            self._changed.notify_all()


@dataclass
class _Job:
    """Consecutive blocks of one request."""

    pairs: Sequence[Pair]
    readers: Readers | None
    first: int
    keys: Sequence[bytes]
    before: bytes | None
    target: WriteBack = field(repr=False)


@dataclass
class _Attention:
    """What the tokens of blocks received, which were handed over before."""

    keys: Sequence[bytes]
    received: torch.Tensor
    target: WriteBack = field(repr=False)


class Writer:
    """Copies blocks out of caches and puts them, in order, on one thread.

    Args:
        blocks: where to.
        timeout: seconds to wait at most for room; ``None`` is the store's default.
        batch: blocks that are copied and put together.
        backlog: bytes that may wait; beyond them new blocks are refused, for the model waits for no write.
    """

    def __init__(self, blocks: BlockNamespace, timeout: float | None, batch: int, backlog: int) -> None:
        self._blocks = blocks
        self._timeout = timeout
        self._attended = Attended(blocks)
        self._batch = batch
        self._backlog = backlog
        self._waiting = 0
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | _Attention | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(
        self,
        pairs: Sequence[Pair],
        readers: Readers | None,
        first: int,
        keys: Sequence[bytes],
        before: bytes | None,
        target: WriteBack,
    ) -> None:
        """Store blocks in the background. Does not block.

        Args:
            pairs: each layer's keys and values.
            readers: told when the tensors have been read; ``None`` if nobody will overwrite them.
            first: the number of the first block; its tokens begin at ``first * block_tokens``.
            keys: of consecutive blocks.
            before: the key of the block before them; ``None`` for the first of a prompt.
            target: what the outcome is counted in.
        """
        size = len(keys) * self._blocks.layout.block_bytes
        with self._lock:
            if self._closed or self._waiting + size > self._backlog:
                target.blocks_refused += len(keys)
                return
            self._waiting += size
            if readers is not None:
                readers.enter((first + len(keys)) * self._blocks.layout.block_tokens)
            self._put(_Job(pairs, readers, first, keys, before, target))

    def count(self, keys: Sequence[bytes], received: torch.Tensor, target: WriteBack) -> None:
        """Count attention to blocks and set their importance by all of it, behind what was submitted before. Does not
        block.

        Args:
            keys: of a prompt's first blocks; those that the store does not hold by then are left out.
            received: see :meth:`kvtier.prefill.attended.Attended.add`.
            target: whoever waits for it waits for this too.
        """
        with self._lock:
            if not self._closed:
                self._put(_Attention(keys, received, target))

    def _put(self, job: _Job | _Attention) -> None:
        """Called under the lock."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvtier-store", daemon=True)
            self._thread.start()
        job.target.opened()
        self._jobs.put(job)

    def close(self) -> None:
        """Store what waits, then end the thread. Blocks until then."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            self._jobs.put(None)
            thread.join()

    def _run(self) -> None:
        buffer = BlockBuffer(self._blocks.layout, self._batch)
        while (job := self._jobs.get()) is not None:
            error: BaseException | None = None
            try:
                if isinstance(job, _Attention):
                    self._count(job)
                else:
                    self._store(job, buffer)
            except BaseException as caught:  # the thread goes on; whoever waits for the request sees it
                error = caught
            job.target.closed(error)

    def _count(self, job: _Attention) -> None:
        size = self._blocks.layout.block_tokens
        with suppress(*UNAVAILABLE):
            count = held(self._blocks, job.keys)
            mass, seen = self._attended.add(job.keys[:count], job.received[:, : count * size])
            scores = block_scores(mass / seen.clamp(min=1), 0, count, size)
            self._blocks.set_importance(job.keys[:count], scores)

    def _store(self, job: _Job, buffer: BlockBuffer) -> None:
        target, layout = job.target, self._blocks.layout
        begun, before = time.perf_counter(), target.blocks_stored
        try:
            self._copy(job, buffer)
        finally:
            if job.readers is not None:
                job.readers.leave()
            ended = time.perf_counter()
            span = job.first * layout.block_tokens, (job.first + len(job.keys)) * layout.block_tokens
            size = (target.blocks_stored - before) * layout.block_bytes
            target.seconds += ended - begun
            target.events.append(Event("store", -1, span, begun - target.begun, ended - target.begun, None, size))
            with self._lock:
                self._waiting -= len(job.keys) * layout.block_bytes

    def _copy(self, job: _Job, buffer: BlockBuffer) -> None:
        keys, size = job.keys, self._blocks.layout.block_tokens
        done = 0
        try:
            # What is there already, from the start on, need not be copied.
            done = held(self._blocks, keys)
            while done < len(keys):
                part = keys[done : done + self._batch]
                buffer.read_from(job.pairs, (job.first + done) * size, len(part))
                parents = [keys[done - 1] if done else job.before, *part[:-1]]
                results = self._blocks.put_many(part, buffer.rows(len(part)), parents=parents, timeout=self._timeout)
                job.target.blocks_stored += sum(result.stored for result in results)
                job.target.blocks_refused += sum(not (result.stored or result.present) for result in results)
                done += len(part)
        except UNAVAILABLE:
            job.target.blocks_refused += len(keys) - done
