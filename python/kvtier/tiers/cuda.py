"""A pool on a GPU, through CuPy: two streams of its own, completion by blocking events, no synchronising of the device."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtier._kvtier import show_bytes
from kvtier.errors import ClosedError, InvalidBlockError, StorageError
from kvtier.tiers.backend import CLOSED, Copy, Copying, Delivery, check_copies, check_deliveries, check_place
from kvtier.tiers.paged import check_slots, rows_of

__all__ = ["CupyBackend", "missing"]

_DLPACK_CUDA = 2
# Which CuPy does not name:
_PORTABLE = 1  # cudaHostRegisterPortable
_NOT_READY = 600  # cudaErrorNotReady
_REGISTER = 1 << 30
"""Bytes registered with the driver at a time: one call for all of a large arena would hold its lock for seconds."""

_PAGED = r"""
// Between blocks and the rows of a paged KV. planes[p]: address, bytes from page to page, from token to token and from head
// to head, tokens a page, heads, bytes a row, and bytes a token of the planes before it. T divides all of them.
template <typename T>
__device__ void spread(const unsigned long long* blocks, const long long* firsts, const long long* slots,
                       const long long* planes, int inward) {
    const long long* plane = planes + 8 * blockIdx.y;
    const long long first = firsts[blockIdx.x], tokens = firsts[blockIdx.x + 1] - first;
    const long long heads = plane[5], row = plane[6] / sizeof(T), all = tokens * heads * row;
    T* block = (T*)(blocks[blockIdx.x] + tokens * plane[7]);
    const long long step = (long long)gridDim.z * blockDim.x;
    for (long long i = (long long)blockIdx.z * blockDim.x + threadIdx.x; i < all; i += step) {
        const long long place = i % row, head = i / row % heads, slot = slots[first + i / row / heads];
        T* paged = (T*)(plane[0] + slot / plane[4] * plane[1] + slot % plane[4] * plane[2] + head * plane[3]) + place;
        if (inward) *paged = block[i]; else block[i] = *paged;
    }
}
extern "C" __global__ void spread16(const unsigned long long* b, const long long* f, const long long* s,
                                    const long long* p, int inward) { spread<uint4>(b, f, s, p, inward); }
extern "C" __global__ void spread4(const unsigned long long* b, const long long* f, const long long* s,
                                   const long long* p, int inward) { spread<unsigned int>(b, f, s, p, inward); }
extern "C" __global__ void spread1(const unsigned long long* b, const long long* f, const long long* s,
                                   const long long* p, int inward) { spread<unsigned char>(b, f, s, p, inward); }
"""
_THREADS = 256


def missing(device: int = 0) -> str | None:
    """Why a GPU cannot be used here; ``None`` if it can."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy cannot be imported ({error}; for pip it is cupy-cuda12x or cupy-cuda13x)"
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:  # CuPy raises a type of its own
        return f"CuPy {cupy.__version__} found no CUDA driver or device ({error})"
    if device >= count:
        return f"CuPy {cupy.__version__} found {count} GPU(s), numbered from 0"
    return None


class _Foreign:
    """A stream of another library, as the protocol of CUDA streams has it."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        follows = hasattr(stream, "__cuda_stream__")
        self.address = int(stream.__cuda_stream__()[1] if follows else getattr(stream, "cuda_stream", stream))

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


def _stream(cupy: Any, device: int, stream: Any) -> Any:
    """A stream, its address, or ``None`` for the current one, as CuPy has it."""
    if stream is None:
        return cupy.cuda.get_current_stream()
    if hasattr(stream, "ptr"):
        return stream
    foreign = _Foreign(stream)
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(foreign)
    return cupy.cuda.ExternalStream(foreign.address, device)  # before CuPy 14


def _address(array: Any) -> int:
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


class _Event:
    """A batch on a stream."""

    def __init__(
        self, cupy: Any, device: int, stream: Any, kept: Sequence[Any], release: Callable[[_Event], None]
    ) -> None:
        self._cupy = cupy
        self._device = device
        self._kept: Sequence[Any] | None = kept
        self._release = release
        with cupy.cuda.Device(device):
            self._event = cupy.cuda.Event(block=True, disable_timing=True)
            self._event.record(stream)

    def done(self) -> bool:
        # CuPy's own `done` takes an event that failed for one that is not there yet.
        if self._cupy.cuda.runtime.eventQuery(self._event.ptr) == _NOT_READY:
            return False
        self._end()
        return True

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is not None and not self.done():
            # A driver's event has no deadline: another thread waits, and this one waits for that.
            waiter = threading.Thread(target=self._quietly, daemon=True)
            waiter.start()
            waiter.join(timeout)
            if not self.done():
                return False
        try:
            self._event.synchronize()  # sleeps in the driver, without the interpreter
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            raise StorageError(f"a copy failed ({error}): copy it again") from error
        finally:
            self._end()
        return True

    def before(self, stream: Any) -> None:
        _stream(self._cupy, self._device, stream).wait_event(self._event)

    @property
    def event(self) -> Any:
        return self._event

    def _quietly(self) -> None:
        with contextlib.suppress(self._cupy.cuda.runtime.CUDARuntimeError):  # the other thread meets it too
            self._event.synchronize()

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
        self._edges: list[int] = []
        """Where pieces of memory begin and end that are registered, or will be, in order of address."""
        self._under_way: set[_Event] = set()
        with cupy.cuda.Device(device):
            try:
                # Freed with the last array over it.
                self._pool: Any = cupy.cuda.Memory(capacity)
            except cupy.cuda.runtime.CUDARuntimeError as error:
                free, total = cupy.cuda.runtime.memGetInfo()
                raise StorageError(
                    f"{self.name} has {show_bytes(free)} of {show_bytes(total)} free, and the pool needs {show_bytes(capacity)} "
                    f"({error}): ask for less"
                ) from error
            self._streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
            # Compiled with its first use.
            self._module = cupy.RawModule(code=_PAGED)

    def register(self, memory: NDArray[np.uint8]) -> None:
        """See :meth:`kvtier.tiers.DeviceBackend.register`."""
        begin, end, runtime = memory.ctypes.data, memory.ctypes.data + memory.nbytes, self._cupy.cuda.runtime
        # Pages are registered whole, and once.
        edges = [begin, *range((begin // _REGISTER + 1) * _REGISTER, end, _REGISTER), end]
        with self._lock:
            self._edges = sorted({*self._edges, *edges})
        for at, until in itertools.pairwise(edges):  # not under the lock: copies go on meanwhile
            with self._cupy.cuda.Device(self._device):
                runtime.hostRegister(at, until - at, _PORTABLE)
            with self._lock:
                if self._pool is not None:
                    self._registered.append(at)
                    continue
            runtime.hostUnregister(at)
            raise ClosedError(CLOSED)

    def copy_in(self, copies: Sequence[Copy], *, after: Copying | None = None) -> Copying:
        """See :meth:`kvtier.tiers.DeviceBackend.copy_in`."""
        return self._submit(0, copies, after)

    def copy_out(self, copies: Sequence[Copy], *, after: Copying | None = None) -> Copying:
        """See :meth:`kvtier.tiers.DeviceBackend.copy_out`."""
        return self._submit(1, copies, after)

    def _submit(self, way: int, copies: Sequence[Copy], after: Copying | None) -> _Event:
        runtime, stream = self._cupy.cuda.runtime, self._streams[way]
        kind = (runtime.memcpyHostToDevice, runtime.memcpyDeviceToHost)[way]
        self._sweep()
        with self._lock, self._cupy.cuda.Device(self._device):
            check_copies(copies, self.capacity, closed=self._pool is None)
            if isinstance(after, _Event):
                stream.wait_event(after.event)
            elif after is not None:
                after.wait()
            pairs = []
            for at, host in copies:
                place, data = self._pool.ptr + at, host.ctypes.data
                pairs.append((place, data, host.nbytes) if way == 0 else (data, place, host.nbytes))
            return self._copy(pairs, kind, stream, tuple(copies))

    def _copy(self, pairs: Sequence[tuple[int, int, int]], kind: int, stream: Any, kept: Sequence[Any]) -> _Event:
        """Queue copies (to, from, bytes), under the lock."""
        with self._queueing(stream):
            for to, source, size in pairs:
                for at, end in self._pieces(to, source, size):
                    self._cupy.cuda.runtime.memcpyAsync(to + at, source + at, end - at, kind, stream.ptr)
            return self._event(stream, kept)

    def _pieces(self, to: int, source: int, size: int) -> Iterator[tuple[int, int]]:
        """Parts of a copy that lie in one piece of registered memory each: the driver takes no other ones."""
        cuts = {0, size}
        for begin in (to, source):
            first, last = bisect.bisect_right(self._edges, begin), bisect.bisect_left(self._edges, begin + size)
            cuts.update(at - begin for at in self._edges[first:last])
        return itertools.pairwise(sorted(cuts))

    @contextlib.contextmanager
    def _queueing(self, stream: Any) -> Iterator[None]:
        """Where the device refuses what is queued on a stream, say so; what was queued before has ended then."""
        cuda = self._cupy.cuda
        try:
            yield
        except (cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError, cuda.memory.OutOfMemoryError) as error:
            with contextlib.suppress(cuda.runtime.CUDARuntimeError):  # a device that is lost refuses this too
                stream.synchronize()
            raise StorageError(f"{self.name} refused a copy ({error}): see whether the device works") from error

    def _event(self, stream: Any, kept: Sequence[Any]) -> _Event:
        event = _Event(self._cupy, self._device, stream, kept, self._forget)
        self._under_way.add(event)
        return event

    def _sweep(self) -> None:
        """Let go of what has ended and nobody asked about."""
        with self._lock:
            events = tuple(self._under_way)
        for event in events:
            event.done()

    def array(self, obj: Any) -> Any | None:
        """See :meth:`kvtier.tiers.DeviceBackend.array`."""
        if hasattr(obj, "data_ptr") and hasattr(obj, "is_contiguous"):
            if not obj.is_cuda:
                return None
            import torch

            if not obj.is_contiguous():
                raise InvalidBlockError(
                    f"a tensor of shape {tuple(obj.shape)} and strides {obj.stride()} is not contiguous: call .contiguous() first"
                )
            obj = obj.detach().reshape(-1).view(torch.uint8)
        if isinstance(obj, self._cupy.ndarray):
            array = obj
        elif hasattr(obj, "__cuda_array_interface__"):
            array = self._cupy.asarray(obj)
        elif hasattr(obj, "__dlpack_device__") and obj.__dlpack_device__()[0] == _DLPACK_CUDA:
            array = self._cupy.from_dlpack(obj)
        else:
            return None
        if array.device.id != self._device:
            raise InvalidBlockError(f"an array on cuda:{array.device.id} was given; this tier is on {self.name}")
        if not array.flags.c_contiguous:
            raise InvalidBlockError(
                f"an array of shape {array.shape} and strides {array.strides} is not contiguous: copy it first"
            )
        return array.reshape(-1).view(np.uint8)

    def staging(self, size: int) -> NDArray[np.uint8]:
        """See :meth:`kvtier.tiers.DeviceBackend.staging`."""
        memory = self._cupy.cuda.alloc_pinned_memory(size)  # which CuPy keeps for the next one
        return np.frombuffer(memory, np.uint8, size)

    def deliver(self, deliveries: Sequence[Delivery], stream: Any = None) -> Copying:
        """See :meth:`kvtier.tiers.DeviceBackend.deliver`."""
        self._sweep()
        with self._lock, self._cupy.cuda.Device(self._device):
            check_deliveries(deliveries, closed=self._pool is None)
            pairs = [(_address(target), _address(source), target.nbytes) for source, target in deliveries]
            default = self._cupy.cuda.runtime.memcpyDefault  # the driver knows which side lies where
            return self._copy(pairs, default, _stream(self._cupy, self._device, stream), tuple(deliveries))

    def scatter(
        self, blocks: Sequence[Any], planes: Sequence[Any], slots: Sequence[ArrayLike], stream: Any = None
    ) -> Copying:
        """See :meth:`kvtier.tiers.DeviceBackend.scatter`."""
        return self._spread(blocks, planes, slots, stream, True)

    def gather(
        self, blocks: Sequence[Any], planes: Sequence[Any], slots: Sequence[ArrayLike], stream: Any = None
    ) -> Copying:
        """See :meth:`kvtier.tiers.DeviceBackend.gather`."""
        return self._spread(blocks, planes, slots, stream, False)

    def _spread(
        self, blocks: Sequence[Any], planes: Sequence[Any], slots: Sequence[ArrayLike], stream: Any, inward: bool
    ) -> _Event:
        cupy = self._cupy
        rows = [rows_of(self._plane(plane)) for plane in planes]
        where = check_slots(blocks, rows, slots)
        table, before = [], 0
        for plane in rows:
            _, page_tokens, heads, row = plane.shape
            table.append([plane.data.ptr, *plane.strides[:3], page_tokens, heads, row, before])
            before += heads * row
        bases = [block.data.ptr for block in blocks]
        firsts = np.cumsum([0, *map(len, where)])
        most = max((len(each) for each in where), default=0) * max((p.shape[2] * p.shape[3] for p in rows), default=0)
        self._sweep()
        with self._lock, cupy.cuda.Device(self._device), _stream(cupy, self._device, stream) as queue:
            if self._pool is None:
                raise ClosedError(CLOSED)
            if most == 0:
                return self._event(queue, ())
            # Tokens a page and heads are counts; everything else is an address, or bytes.
            common = math.gcd(*bases, *(value for line in table for value in (*line[:4], *line[6:])))
            width = next(width for width in (16, 4, 1) if common % width == 0)
            grid = (len(blocks), len(rows), min(64, -(-most // (width * _THREADS))))
            with self._queueing(queue):
                arguments = (
                    cupy.asarray(np.array(bases, np.uint64)),
                    cupy.asarray(firsts.astype(np.int64)),
                    cupy.asarray(np.concatenate(where)),
                    cupy.asarray(np.array(table, np.int64)),
                )
                kernel = self._module.get_function(f"spread{width}")
                kernel(grid, (_THREADS,), (*arguments, np.int32(inward)))
                return self._event(queue, (tuple(blocks), rows, arguments))

    def _plane(self, plane: Any) -> Any:
        """A plane as CuPy knows it: as bytes where it is torch's, some dtypes of which CuPy has not."""
        if hasattr(plane, "data_ptr"):
            import torch

            if plane.stride(-1) != 1:
                raise InvalidBlockError(
                    f"a plane of strides {plane.stride()} was given; its last axis is contiguous: transpose it"
                )
            plane = plane.detach().view(torch.uint8)
        return self._cupy.asarray(plane)

    def _forget(self, event: _Event) -> None:
        with self._lock:
            self._under_way.discard(event)

    def view(self, at: int, size: int, keep: Any = None) -> Any:
        """See :meth:`kvtier.tiers.DeviceBackend.view`."""
        pool = self._pool
        if pool is None:
            raise ClosedError(CLOSED)
        check_place(at, size, self.capacity)
        memory = self._cupy.cuda.UnownedMemory(pool.ptr + at, size, (pool, keep), self._device)
        return self._cupy.ndarray((size,), np.uint8, self._cupy.cuda.MemoryPointer(memory, 0))

    def close(self) -> None:
        """See :meth:`kvtier.tiers.DeviceBackend.close`."""
        with self._lock:
            pool, self._pool = self._pool, None
            events = tuple(self._under_way)
        if pool is None:
            return
        runtime = self._cupy.cuda.runtime
        for event in events:
            with contextlib.suppress(StorageError):
                event.wait()
        with self._cupy.cuda.Device(self._device):
            # The memory before whoever owns it unmaps it, also where the device is lost.
            for work in (
                *(stream.synchronize for stream in self._streams),
                *(partial(runtime.hostUnregister, at) for at in self._registered),
            ):
                with contextlib.suppress(runtime.CUDARuntimeError):
                    work()
        self._registered.clear()
        self._under_way.clear()
