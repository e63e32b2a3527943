"""A device made of the process's own memory: the same protocol, for tests and for machines without a GPU."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import ClosedError, StorageError
from kvtier.tiers.backend import Copy, Copying, check_copies, check_place

__all__ = ["HostBackend"]


class _Batch:
    """A batch under way."""

    def __init__(self, work: Callable[[], None], after: Copying | None) -> None:
        self._work: Callable[[], None] | None = work
        self._after = after
        self._ended = threading.Event()
        self._error: Exception | None = None

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        ended = self._ended.wait(timeout)
        if self._error is not None:
            raise StorageError(f"a copy failed ({self._error}): copy it again") from self._error
        return ended

    def before(self, stream: Any) -> None:  # noqa: ARG002
        """There are no streams here: whoever computes does so after this returns."""
        self.wait()

    def run(self) -> None:
        try:
            if self._after is not None:
                self._after.wait()
            if self._work is not None:
                self._work()
        except Exception as error:
            self._error = error
        finally:
            self._work = self._after = None  # the host's memory may go
            self._ended.set()


class HostBackend:
    """A pool in the process's memory; see :class:`kvtier.tiers.DeviceBackend`.

    Args:
        capacity: bytes.
    """

    def __init__(self, capacity: int) -> None:
        try:
            self._pool: NDArray[np.uint8] | None = np.zeros(capacity, np.uint8)
        except MemoryError:
            raise StorageError(f"the machine has not {capacity} bytes for the pool: ask for less") from None
        self.capacity = capacity
        self.name = "host"
        self._lock = threading.Lock()
        self._queues: list[queue.SimpleQueue[_Batch | None]] = [queue.SimpleQueue(), queue.SimpleQueue()]
        self._threads = [
            threading.Thread(target=self._serve, args=(jobs,), name=f"kvtier-copy-{way}", daemon=True)
            for jobs, way in zip(self._queues, ("in", "out"), strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def register(self, memory: NDArray[np.uint8]) -> None:
        """Nothing to do: all memory is the same here."""

    def copy_in(self, copies: Sequence[Copy], *, after: Copying | None = None) -> Copying:
        """See :meth:`kvtier.tiers.DeviceBackend.copy_in`."""
        return self._submit(0, copies, after)

    def copy_out(self, copies: Sequence[Copy], *, after: Copying | None = None) -> Copying:
        """See :meth:`kvtier.tiers.DeviceBackend.copy_out`."""
        return self._submit(1, copies, after)

    def _submit(self, way: int, copies: Sequence[Copy], after: Copying | None) -> _Batch:
        with self._lock:
            pool = self._pool
            check_copies(copies, self.capacity, closed=pool is None)
            assert pool is not None
            given = tuple(copies)

            def work() -> None:
                for at, host in given:
                    place = pool[at : at + host.nbytes]
                    source, target = (host, place) if way == 0 else (place, host)
                    target[:] = source

            batch = _Batch(work, after)
            self._queues[way].put(batch)
        return batch

    @staticmethod
    def _serve(jobs: queue.SimpleQueue[_Batch | None]) -> None:
        while (batch := jobs.get()) is not None:
            batch.run()

    def view(self, at: int, size: int) -> NDArray[np.uint8]:
        """See :meth:`kvtier.tiers.DeviceBackend.view`."""
        pool = self._pool
        if pool is None:
            raise ClosedError("the device's memory is closed: open a backend again")
        check_place(at, size, self.capacity)
        return pool[at : at + size]

    def close(self) -> None:
        """See :meth:`kvtier.tiers.DeviceBackend.close`."""
        with self._lock:
            if self._pool is None:
                return
            self._pool = None
            for jobs in self._queues:
                jobs.put(None)
        for thread in self._threads:
            thread.join()
