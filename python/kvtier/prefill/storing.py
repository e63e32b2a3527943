"""Write-back: new blocks go to the store behind the computation, on a thread of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.errors import CorruptError, DeadlineError, FullError, StorageError
from kvtier.integrations.tensors import BlockBuffer
from kvtier.integrations.verbs import BlockNamespace
from kvtier.prefill.cache import Pair, Readers
from kvtier.prefill.timeline import Event

__all__ = ["UNAVAILABLE", "WriteBack", "Writer"]

UNAVAILABLE = (DeadlineError, StorageError, CorruptError, FullError)
"""A store that cannot serve costs a recompute; anything else (a closed store, a bug) is for the caller to see."""


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
    scores: Sequence[float]
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
        self._batch = batch
        self._backlog = backlog
        self._waiting = 0
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
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
        scores: Sequence[float] = (),
    ) -> None:
        """Store blocks in the background. Does not block.

        Args:
            pairs: each layer's keys and values.
            readers: told when the tensors have been read; ``None`` if nobody will overwrite them.
            first: the number of the first block; its tokens begin at ``first * block_tokens``.
            keys: of consecutive blocks.
            before: the key of the block before them; ``None`` for the first of a prompt.
            target: what the outcome is counted in.
            scores: the importance of each block, or of the first of them; set once they are there. Default: left as it is.
        """
        size = len(keys) * self._blocks.layout.block_bytes
        with self._lock:
            if self._closed or self._waiting + size > self._backlog:
                target.blocks_refused += len(keys)
                return
            self._waiting += size
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvtier-store", daemon=True)
                self._thread.start()
            target.opened()
            if readers is not None:
                readers.enter((first + len(keys)) * self._blocks.layout.block_tokens)
            self._jobs.put(_Job(pairs, readers, first, keys, before, scores, target))

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
            begun = time.perf_counter()
            try:
                self._store(job, buffer)
            except BaseException as caught:  # the thread goes on; whoever waits for the request sees it
                error = caught
            finally:
                if job.readers is not None:
                    job.readers.leave()
            ended = time.perf_counter()
            target, size = job.target, len(job.keys) * self._blocks.layout.block_bytes
            block = self._blocks.layout.block_tokens
            span = job.first * block, (job.first + len(job.keys)) * block
            target.seconds += ended - begun
            target.events.append(Event("store", -1, span, begun - target.begun, ended - target.begun, None, size))
            with self._lock:
                self._waiting -= size
            target.closed(error)

    def _store(self, job: _Job, buffer: BlockBuffer) -> None:
        keys, size = job.keys, self._blocks.layout.block_tokens
        done = 0
        try:
            # What is there already, from the start on, need not be copied.
            held = self._blocks.contains(keys)
            done = next((i for i, there in enumerate(held) if not there), len(keys))
            while done < len(keys):
                part = keys[done : done + self._batch]
                buffer.read_from(job.pairs, (job.first + done) * size, len(part))
                parents = [keys[done - 1] if done else job.before, *part[:-1]]
                results = self._blocks.put_many(part, buffer.rows(len(part)), parents=parents, timeout=self._timeout)
                job.target.blocks_stored += sum(result.stored for result in results)
                job.target.blocks_refused += sum(not (result.stored or result.present) for result in results)
                done += len(part)
            if job.scores:
                self._blocks.set_importance(keys[: len(job.scores)], job.scores)
        except UNAVAILABLE:
            job.target.blocks_refused += len(keys) - done
