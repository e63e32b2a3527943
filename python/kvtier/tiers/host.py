"""A device made of the process's own memory: the same protocol, for tests and for machines without a GPU."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from kvtier._kvtier import show_bytes
from kvtier.errors import ClosedError, InvalidBlockError, StorageError
from kvtier.tiers.backend import CLOSED, Copy, Copying, Delivery, check_copies, check_deliveries, check_place, no_thread
from kvtier.tiers.paged import check_slots, rows_of

__all__ = ["HostArray", "HostBackend"]


class HostArray(np.ndarray):
    """An array that counts as one on the host's own "device": :meth:`HostBackend.empty` makes it, and so does a view of
    one.
    """


class _Kept:
    """Memory of an array for an array that keeps something alive."""

    def __init__(self, array: NDArray[np.uint8], keep: Any) -> None:
        self.__array_interface__ = array.__array_interface__
        self._keep = (array, keep)


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
            self._error = error.with_traceback(None)  # whose frames would keep what was copied
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
            raise StorageError(f"the machine has not {show_bytes(capacity)} for the pool: ask for less") from None
        self.capacity = capacity
        self.name = "host"
        self._lock = threading.Lock()
        self._queues: list[queue.SimpleQueue[_Batch | None]] = [queue.SimpleQueue(), queue.SimpleQueue()]
        self._threads = [
            threading.Thread(target=self._serve, args=(jobs,), name=f"kvtier-copy-{way}", daemon=True)
            for jobs, way in zip(self._queues, ("in", "out"), strict=True)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:
            self._threads = [thread for thread in self._threads if thread.ident is not None]
            self.close()
            raise no_thread("kvtier-copy", error) from None

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

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.uint8) -> HostArray:
        """An array of the caller's on this device, of any content."""
        return np.empty(shape, dtype).view(HostArray)

    def array(self, obj: Any) -> HostArray | None:
        """See :meth:`kvtier.tiers.DeviceBackend.array`."""
        if not isinstance(obj, HostArray):
            return None
        if not obj.flags.c_contiguous:
            raise InvalidBlockError(
                f"an array of shape {obj.shape} and strides {obj.strides} is not contiguous: copy it first"
            )
        return obj.reshape(-1).view(np.uint8).view(HostArray)

    def staging(self, size: int) -> NDArray[np.uint8]:
        """See :meth:`kvtier.tiers.DeviceBackend.staging`."""
        return np.empty(size, np.uint8)

    def deliver(self, deliveries: Sequence[Delivery], stream: Any = None) -> Copying:  # noqa: ARG002
        """See :meth:`kvtier.tiers.DeviceBackend.deliver`."""
        given = tuple(deliveries)

        def work() -> None:
            for source, target in given:
                target[:] = source

        with self._lock:
            check_deliveries(given, closed=self._pool is None)
            batch = _Batch(work, None)
            self._queues[0].put(batch)
        return batch

    def scatter(
        self,
        blocks: Sequence[Any],
        planes: Sequence[Any],
        slots: Sequence[ArrayLike],
        stream: Any = None,  # noqa: ARG002
    ) -> Copying:
        """See :meth:`kvtier.tiers.DeviceBackend.scatter`."""
        return self._spread(blocks, planes, slots, True)

    def gather(
        self,
        blocks: Sequence[Any],
        planes: Sequence[Any],
        slots: Sequence[ArrayLike],
        stream: Any = None,  # noqa: ARG002
    ) -> Copying:
        """See :meth:`kvtier.tiers.DeviceBackend.gather`."""
        return self._spread(blocks, planes, slots, False)

    def _spread(
        self, blocks: Sequence[Any], planes: Sequence[Any], slots: Sequence[ArrayLike], inward: bool
    ) -> Copying:
        rows = [rows_of(_numpy(plane)) for plane in planes]
        given = list(zip(blocks, check_slots(blocks, rows, slots), strict=True))

        def work() -> None:
            for block, where in given:
                at = 0
                for plane in rows:
                    _, page_tokens, heads, row = plane.shape
                    end = at + len(where) * heads * row
                    part = block[at:end].reshape(len(where), heads, row)
                    pages, places = where // page_tokens, where % page_tokens
                    if inward:
                        plane[pages, places] = part
                    else:
                        part[:] = plane[pages, places]
                    at = end

        with self._lock:
            if self._pool is None:
                raise ClosedError(CLOSED)
            batch = _Batch(work, None)
            self._queues[0].put(batch)
        return batch

    @staticmethod
    def _serve(jobs: queue.SimpleQueue[_Batch | None]) -> None:
        while (batch := jobs.get()) is not None:
            batch.run()

    def view(self, at: int, size: int, keep: Any = None) -> HostArray:
        """See :meth:`kvtier.tiers.DeviceBackend.view`."""
        pool = self._pool
        if pool is None:
            raise ClosedError(CLOSED)
        check_place(at, size, self.capacity)
        return np.asarray(_Kept(pool[at : at + size], keep)).view(HostArray)

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


def _numpy(plane: Any) -> NDArray[Any]:
    """A plane as an array of bytes; NumPy knows not all dtypes of torch."""
    if not hasattr(plane, "data_ptr"):
        return np.asarray(plane)
    import torch

    if plane.stride(-1) != 1:
        raise InvalidBlockError(
            f"a plane of strides {plane.stride()} was given; its last axis is contiguous: transpose it"
        )
    array: NDArray[Any] = plane.detach().view(torch.uint8).numpy()
    return array
