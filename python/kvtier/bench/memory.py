"""The caller's side of a measurement: buffers on huge pages, and keys."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bytes", "Keys", "chunks", "huge_buffer", "random_buffer", "split"]

Bytes = NDArray[np.uint8]

_HUGE = 2 << 20
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)


def huge_buffer(size: int) -> Bytes:
    """``uint8[size]`` at a 2 MiB boundary, on huge pages where the kernel gives them, and touched."""
    area = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if _ADVICE is not None:
        area.madvise(_ADVICE)
    whole = np.frombuffer(area, np.uint8)
    shift = -whole.ctypes.data % _HUGE
    buffer = whole[shift : shift + size]
    buffer.fill(1)
    return buffer


def random_buffer(size: int) -> Bytes:
    """As :func:`huge_buffer`, with bytes that neither a disk nor a test takes for another block's."""
    buffer = huge_buffer(size)
    random = np.random.default_rng(1)
    for part in split(buffer, min(size, 16 << 20)):
        part[:] = random.integers(0, 256, part.size, np.uint8)
    return buffer


def split(buffer: Bytes, size: int) -> list[Bytes]:
    """Views of ``size`` bytes each, one after another."""
    return [buffer[at : at + size] for at in range(0, buffer.size - size + 1, size)]


def chunks(count: int, size: int) -> Iterator[slice]:
    """``range(count)`` in slices of at most ``size``, at least 1."""
    step = max(1, size)
    return (slice(at, min(at + step, count)) for at in range(0, count, step))


class Keys:
    """Keys of 32 bytes, never the same twice."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def take(self, count: int) -> list[bytes]:
        """``count`` new ones."""
        return [number.to_bytes(32, "little") for number in itertools.islice(self._numbers, count)]
