"""The HBM tier of a store: its pool on a device, the thread that copies into it, and reads that end on the device."""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier import _kvtier, buffers
from kvtier._kvtier import DEFAULT_TIMEOUT, show_bytes
from kvtier.config import Hbm
from kvtier.errors import ConfigError, DeadlineError, InvalidBlockError, StorageError
from kvtier.layout import KVLayout
from kvtier.results import Result, miss, results
from kvtier.tiers import cuda
from kvtier.tiers.backend import Copy, Copying, Delivery, DeviceBackend, no_thread, open_backend

__all__ = ["HbmTier", "Placed", "countdown", "open_tier", "resolved"]

_AT_ONCE = 64 << 20
"""Bytes of memory that a read pins at a time, and at most this part of DRAM."""
_PART = 4
_ROUNDS = 3
"""How often a lease brings blocks up that have left before they were taken."""

_Part = tuple[tuple[int, int] | None, tuple[int, int] | None]


class Placed:
    """Blocks in HBM that a :class:`kvtier.Lease` has taken over."""

    def __init__(self, blocks: list[Any | None], reasons: Sequence[str | None]) -> None:
        self._blocks = blocks
        self.reasons = reasons

    def blocks(self) -> list[Any | None]:
        """One array a key."""
        return list(self._blocks)

    def release(self) -> None:
        """Let go of them; arrays that were handed out keep theirs."""
        self._blocks = []


class HbmTier:
    """See the module.

    Args:
        core: the store's native half.
        feed: what is to be copied there.
        backend: its pool; this closes it.
        memory: bytes of the DRAM tier.
        verify: whether reads of other tiers on the way to the device are verified.
    """

    def __init__(
        self, core: _kvtier.Core, feed: _kvtier.Feed, backend: DeviceBackend, memory: int, verify: bool
    ) -> None:
        self._core = core
        self._feed = feed
        self._verify = verify
        self._at_once = min(_AT_ONCE, memory // _PART)
        self.backend = backend
        self._thread = threading.Thread(target=_serve, args=(feed, backend), name="kvtier-hbm", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise no_thread("kvtier-hbm", error) from None
        # Also before the interpreter ends: a thread must not come back from its wait after that.
        self._ended = weakref.finalize(self, _end, feed, self._thread)

    def close(self, timeout: float) -> bool:
        """End all copies and let go of the pool. Whether it was in time."""
        self._feed.stop()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @staticmethod
    def stream_of(arrays: Sequence[Any], stream: Any) -> Any:
        """The stream that was given, which may be 0, the default one. Without one that of torch, where the first array is
        torch's; else ``None``, which is the library's.
        """
        if stream is None and arrays and hasattr(arrays[0], "data_ptr"):
            import torch

            return torch.cuda.current_stream(arrays[0].device)
        return stream

    def arrays(self, outs: Sequence[Any], layout: KVLayout) -> list[Any] | None:
        """The callers' arrays as bytes if they lie on the device; ``None`` if none does."""
        arrays = []
        for out in outs:
            array = self.backend.array(out)
            if array is not None and layout.layers and hasattr(out, "dtype"):
                buffers.check(str(out.dtype), tuple(out.shape), layout.dtype, None, 0)
            arrays.append(array)
        on_device = sum(array is not None for array in arrays)
        if on_device == 0:
            return None
        if on_device < len(arrays):
            raise InvalidBlockError(
                f"{on_device} of {len(arrays)} buffers lie on {self.backend.name}, the others elsewhere: read each kind in "
                "a call of its own"
            )
        return arrays

    def holds(self, buffers: Sequence[Any], layout: KVLayout) -> bool:
        """Whether these buffers lie on the device."""
        return self.arrays(buffers, layout) is not None

    def get_into(
        self,
        space: _kvtier.Space,
        keys: Sequence[bytes],
        arrays: Sequence[Any],
        part: _Part,
        timeout: float | None,
        stream: Any,
    ) -> list[Result]:
        """Copy blocks into arrays on the device; see :meth:`kvtier.Namespace.get_into`."""
        left = countdown(timeout)
        sizes = self._core.sizes(space, keys, *part)
        if len(keys) != len(arrays):
            raise InvalidBlockError(f"{len(arrays)} buffers were given for {len(keys)} keys; one a key is needed")
        for size, array in zip(sizes, arrays, strict=True):
            if size not in (None, array.nbytes):
                raise InvalidBlockError(
                    f"a buffer of {array.nbytes} bytes was given for {size} bytes of a block. Give each key a buffer of "
                    "exactly that size"
                )
        found: list[Result] = []
        for some in self.spans(arrays):
            found += self._read(space, keys[some], arrays[some], part, left(), stream)
        return found

    def _read(
        self,
        space: _kvtier.Space,
        keys: Sequence[bytes],
        arrays: Sequence[Any],
        part: _Part,
        timeout: float,
        stream: Any,
        above: bool = True,
    ) -> list[Result]:
        left = countdown(timeout)
        placed = self._core.place(space, keys, *part, False) if above else [None] * len(keys)
        lease = self._core.lease(
            space, [key for key, place in zip(keys, placed, strict=True) if place is None], self._verify, timeout
        )
        below = iter(zip(lease.blocks(), lease.reasons, strict=True))
        outcome: list[Result] = []
        deliveries: list[Delivery] = []
        for place, array in zip(placed, arrays, strict=True):
            if place is not None:
                source: Any = self.backend.view(place.at, place.nbytes, place)
                outcome.append(results(_HBM)[0])
            else:
                block, reason = next(below)
                if block is None:
                    outcome.append(miss(reason))
                    continue
                source = np.asarray(memoryview(block))
                outcome.append(results(bytes((_kvtier.TIERS.index(block.tier),)))[0])
            at = 0
            for offset, size in space.pieces(source.nbytes, *part):
                deliveries.append(Delivery(source[offset : offset + size], array[at : at + size]))
                at += size
        lease.release()  # what is copied keeps itself
        if not deliveries:
            return outcome
        try:
            event = self.backend.deliver(deliveries, stream)
            # Who does not wait for loads still waits for the copy.
            ended = event.wait(left() if timeout else DEFAULT_TIMEOUT)
        except StorageError:
            if any(placed):
                self._feed.failed()
                return self._read(space, keys, arrays, part, left(), stream, above=False)
            return [miss("device") if result.hit else result for result in outcome]
        if not ended:
            return [miss("deadline") if result.hit else result for result in outcome]
        return outcome

    def spans(self, arrays: Sequence[Any]) -> Iterator[slice]:
        """Ranges of arrays that go through memory at a time: of a part of DRAM each, where one array has not more."""
        first = total = 0
        for i, array in enumerate(arrays):
            if i > first and total + array.nbytes > self._at_once:
                yield slice(first, i)
                first, total = i, 0
            total += array.nbytes
        if first < len(arrays):
            yield slice(first, len(arrays))

    def fetched(self, arrays: Sequence[Any], timeout: float | None, stream: Any) -> list[NDArray[np.uint8]]:
        """Copies of device arrays on the host, for a put. Blocks until they are there.

        Raises:
            StorageError: the device failed.
            DeadlineError: it was not done in time.
        """
        targets = [self.backend.staging(array.nbytes) for array in arrays]
        event = self.backend.deliver([Delivery(*pair) for pair in zip(arrays, targets, strict=True)], stream)
        # Who does not wait for room still waits for the copy.
        if not event.wait(timeout or DEFAULT_TIMEOUT):
            raise DeadlineError("the blocks did not come from the device in time: see what its stream waits for")
        return targets

    def lease(self, space: _kvtier.Space, keys: Sequence[bytes], timeout: float | None) -> Placed:
        """Blocks in HBM, taken over; see :meth:`kvtier.Namespace.lease`."""
        left = countdown(timeout)
        found: list[_kvtier.Placed | None] = [None] * len(keys)
        reasons: list[str | None] = ["absent"] * len(keys)
        for turn in range(_ROUNDS):
            missing = [i for i, place in enumerate(found) if place is None]
            wanted = [keys[i] for i in missing]
            for i, place in zip(missing, self._core.place(space, wanted, None, None, True), strict=True):
                found[i] = place
            missing = [i for i in missing if found[i] is None]
            if not missing or turn == _ROUNDS - 1:
                break
            wanted = [keys[i] for i in missing]
            job = self._core.prefetch(space, wanted, "hbm", left(), 1)
            job.wait(DEFAULT_TIMEOUT)  # it ends by its own deadline
            came = results(job.results() or b"")
            for i, result in zip(missing, came, strict=False):
                reasons[i] = result.reason or "full"  # if it is not there any more in the next turn
            if not any(came):
                break
        blocks = [None if p is None else self.backend.view(p.at, p.nbytes, p) for p in found]
        return Placed(blocks, [None if p is not None else reason for p, reason in zip(found, reasons, strict=True)])


_HBM = bytes((_kvtier.TIERS.index("hbm"),))


def countdown(timeout: float | None) -> Callable[[], float]:
    """What is left of a timeout, in seconds, at each call; ``None`` is the default of all verbs."""
    end = time.monotonic() + (DEFAULT_TIMEOUT if timeout is None else timeout)
    return lambda: max(0.0, end - time.monotonic())


def open_tier(config: Hbm) -> DeviceBackend:
    """The pool that a tier was configured with, see :func:`resolved`."""
    if isinstance(config.backend, str):
        return open_backend(config.size_bytes, "host" if config.backend == "host" else config.device)
    if config.backend.capacity < config.size_bytes:
        raise ConfigError(
            f"an hbm tier of {show_bytes(config.size_bytes)} was given with a pool of {show_bytes(config.backend.capacity)}: "
            "make them equal"
        )
    return config.backend


def resolved(config: Hbm) -> Hbm:
    """The tier with ``"auto"`` replaced by what it is on this machine; says so aloud where that is no GPU."""
    if config.backend != "auto":
        return config
    found = cuda.missing(config.device)
    if found is not None:
        logging.getLogger("kvtier").warning(
            "the hbm tier is %s of this process's memory, not of a GPU's: %s. "
            'Hbm(..., backend="cuda") refuses to open without a GPU, backend="host" is this without the warning',
            show_bytes(config.size_bytes),
            found,
        )
    return replace(config, backend="cuda" if found is None else "host")


def _end(feed: _kvtier.Feed, thread: threading.Thread) -> None:
    feed.stop()
    if thread is not threading.current_thread():
        thread.join(10 if feed.answers() else 0)  # one that the device holds may never end


def _serve(feed: _kvtier.Feed, backend: DeviceBackend) -> None:
    """The thread that copies: keeps one batch running while it looks after the one before."""
    memory = [(at, _memory(at, size)) for at, size in feed.host()]
    before: tuple[_kvtier.Batch, Copying] | None = None
    try:
        for _, tier in memory:
            _register(backend, tier)
        while (batch := feed.next(before is None)) is not None:
            begun = _begin(backend, memory, batch)
            if before is not None:
                _settle(*before)
            before = begun
    finally:
        feed.stop()  # whatever ended it: nobody may wait for this thread any more
        if before is not None:
            _settle(*before)
        del memory
        if not sys.is_finalizing():
            backend.close()


def _register(backend: DeviceBackend, tier: NDArray[np.uint8]) -> None:
    try:
        backend.register(tier)
    except Exception as error:  # a driver's own kind
        logging.getLogger("kvtier").warning(
            "%s does not take memory of the store (%s): copies go by way of the driver's, and slower",
            backend.name,
            error,
        )


def _begin(
    backend: DeviceBackend, memory: Sequence[tuple[int, NDArray[np.uint8]]], batch: _kvtier.Batch
) -> tuple[_kvtier.Batch, Copying] | None:
    copies = []
    for at, address, size in batch.copies():
        for first, tier in memory:
            if first <= address < first + tier.nbytes:
                copies.append(Copy(at, tier[address - first : address - first + size]))
    if not copies:
        return None
    try:
        event = backend.copy_in(copies)
    except Exception as error:  # nothing of it is under way
        logging.getLogger("kvtier").warning("%s refused %d copies: %s", backend.name, len(copies), error)
        batch.finish(False)
        return None
    batch.verify()
    return batch, event


def _settle(batch: _kvtier.Batch, event: Copying) -> None:
    try:
        event.wait()
    except Exception as error:  # a driver's own kind, too
        logging.getLogger("kvtier").warning("%s", error)
        batch.finish(False)
    else:
        batch.finish(True)


def _memory(at: int, size: int) -> NDArray[np.uint8]:
    """The bytes of a tier, which the feed keeps mapped."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(at))
