"""A pool on a GPU, through CuPy: two streams of its own, completion by blocking events, no synchronising of the device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import ClosedError, StorageError
from kvtier.tiers.backend import Copy, Copying, check_copies, check_place

__all__ = ["CupyBackend", "missing"]

_REGISTER = 1 << 30
"""Bytes registered with the driver at a time: one call for all of a large arena would hold its lock for seconds."""


def missing(device: int = 0) -> str | None:
    """Why a GPU cannot be used here; ``None`` if it can."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy cannot be imported ({error})"
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:  # CuPy raises a type of its own
        return f"CuPy {cupy.__version__} found no CUDA driver or device ({error})"
    if device >= count:
        return f"CuPy {cupy.__version__} found {count} GPU(s), numbered from 0"
    return None


class _Event:
    """A batch on a stream."""

    def __init__(
        self, cupy: Any, device: int, stream: Any, kept: Sequence[Any], release: Callable[[_Event], None]
    ) -> None:
        self._cupy = cupy
        self._kept: Sequence[Any] | None = kept
        self._release = release
        with cupy.cuda.Device(device):
            self._event = cupy.cuda.Event(block=True, disable_timing=True)
            self._event.record(stream)

    def done(self) -> bool:
        ended = bool(self._failing(lambda: self._event.done))
        if ended:
            self._end()
        return ended

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is None:
            self._failing(self._event.synchronize)  # sleeps in the driver, without the interpreter
            self._end()
            return True
        # A driver's event has no deadline: another thread waits, and this one waits for that.
        waiter = threading.Thread(target=self._quietly, daemon=True)
        waiter.start()
        waiter.join(timeout)
        return self.done()

    def before(self, stream: Any) -> None:
        stream.wait_event(self._event)

    @property
    def event(self) -> Any:
        return self._event

    def _quietly(self) -> None:
        try:
            self._event.synchronize()
        except self._cupy.cuda.runtime.CUDARuntimeError:
            return  # `done` says it

    def _failing(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            self._end()
            raise StorageError(f"a copy failed ({error}): copy it again") from error

    def _end(self) -> None:
        if self._kept is not None:
            self._kept = None
            self._release(self)


class CupyBackend:
    """A pool on a GPU; see :class:`kvtier.tiers.DeviceBackend`.

    Args:
        capacity: bytes.
        device: the GPU's number.
    """

    def __init__(self, capacity: int, device: int = 0) -> None:
        import cupy

        self._cupy = cupy
        self._device = device
        self.capacity = capacity
        self.name = f"cuda:{device}"
        self._lock = threading.Lock()
        self._registered: list[int] = []
        self._under_way: set[_Event] = set()
        with cupy.cuda.Device(device):
            try:
                self._pool: Any = cupy.cuda.runtime.malloc(capacity)
            except cupy.cuda.runtime.CUDARuntimeError as error:
                free, total = cupy.cuda.runtime.memGetInfo()
                raise StorageError(
                    f"{self.name} has {free} of {total} bytes free, and the pool needs {capacity} ({error}): ask for less"
                ) from error
            self._memory = cupy.cuda.UnownedMemory(self._pool, capacity, self, device)
            self._streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]

    def register(self, memory: NDArray[np.uint8]) -> None:
        """See :meth:`kvtier.tiers.DeviceBackend.register`."""
        begin, runtime = memory.ctypes.data, self._cupy.cuda.runtime
        with self._lock, self._cupy.cuda.Device(self._device):
            for at in range(begin, begin + memory.nbytes, _REGISTER):
                runtime.hostRegister(at, min(_REGISTER, begin + memory.nbytes - at), runtime.hostRegisterPortable)
                self._registered.append(at)

    def copy_in(self, copies: Sequence[Copy], *, after: Copying | None = None) -> Copying:
        """See :meth:`kvtier.tiers.DeviceBackend.copy_in`."""
        return self._submit(0, copies, after)

    def copy_out(self, copies: Sequence[Copy], *, after: Copying | None = None) -> Copying:
        """See :meth:`kvtier.tiers.DeviceBackend.copy_out`."""
        return self._submit(1, copies, after)

    def _submit(self, way: int, copies: Sequence[Copy], after: Copying | None) -> _Event:
        runtime, stream = self._cupy.cuda.runtime, self._streams[way]
        kind = (runtime.memcpyHostToDevice, runtime.memcpyDeviceToHost)[way]
        with self._lock, self._cupy.cuda.Device(self._device):
            check_copies(copies, self.capacity, closed=self._pool is None)
            if isinstance(after, _Event):
                stream.wait_event(after.event)
            elif after is not None:
                after.wait()
            for at, host in copies:
                place, data = self._pool + at, host.ctypes.data
                to, source = (place, data) if way == 0 else (data, place)
                runtime.memcpyAsync(to, source, host.nbytes, kind, stream.ptr)
            event = _Event(self._cupy, self._device, stream, tuple(copies), self._forget)
            self._under_way.add(event)
        return event

    def _forget(self, event: _Event) -> None:
        with self._lock:
            self._under_way.discard(event)

    def view(self, at: int, size: int) -> Any:
        """See :meth:`kvtier.tiers.DeviceBackend.view`."""
        if self._pool is None:
            raise ClosedError("the device's memory is closed: open a backend again")
        check_place(at, size, self.capacity)
        return self._cupy.ndarray((size,), np.uint8, self._cupy.cuda.MemoryPointer(self._memory, at))

    def close(self) -> None:
        """See :meth:`kvtier.tiers.DeviceBackend.close`."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is None:
            return
        runtime = self._cupy.cuda.runtime
        with self._cupy.cuda.Device(self._device):
            for stream in self._streams:
                stream.synchronize()
            # Before whoever owns that memory unmaps it.
            for at in self._registered:
                runtime.hostUnregister(at)
            runtime.free(pool)
        self._registered.clear()
        self._under_way.clear()
