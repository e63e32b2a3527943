"""What copies into a pool on a GPU and out of it reach, of pinned and of pageable memory, beside the plain cudaMemcpyAsync.

    python scripts/gpu_copies.py

Needs CuPy and a GPU. Prints a line each: GB/s in blocks of 1 MiB, those of one plain copy of as many bytes, and how the two
compare, medians of nine interleaved pairs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvtier.tiers import Copy, Copying
from kvtier.tiers.cuda import CupyBackend

PAIRS = 9


def lines(size: int = 256 << 20, block: int = 1 << 20) -> Iterator[str]:
    """Measure ``size`` bytes a copy."""
    import cupy

    backend = CupyBackend(size)
    runtime, stream, device = cupy.cuda.runtime, cupy.cuda.Stream(non_blocking=True), cupy.cuda.Memory(size)
    for kind in ("pageable", "pinned"):
        host, other = np.ones(size, np.uint8), np.ones(size, np.uint8)
        if kind == "pinned":
            backend.register(host)
            runtime.hostRegister(other.ctypes.data, size, 1)  # in one piece: the driver copies over no edge of two
        blocks = [Copy(at, host[at : at + block]) for at in range(0, size, block)]
        ways = {
            "H2D": (backend.copy_in, (device.ptr, other.ctypes.data), runtime.memcpyHostToDevice),
            "D2H": (backend.copy_out, (other.ctypes.data, device.ptr), runtime.memcpyDeviceToHost),
        }
        for way, (batch, ends, direction) in ways.items():

            def ours(batch: Callable[[Sequence[Copy]], Copying] = batch, blocks: Sequence[Copy] = blocks) -> None:
                batch(blocks).wait()

            def plain(ends: tuple[int, int] = ends, direction: int = direction) -> None:
                runtime.memcpyAsync(*ends, size, direction, stream.ptr)
                stream.synchronize()

            taken, bound, ratio = _compared(ours, plain)
            yield f"{way} {kind}: {size / taken / 1e9:.1f} GB/s in blocks, plain {size / bound / 1e9:.1f} GB/s, ratio {ratio:.2f}"
        if kind == "pinned":
            runtime.hostUnregister(other.ctypes.data)
    backend.close()


def _compared(ours: Callable[[], object], bound: Callable[[], object]) -> tuple[float, float, float]:
    """Median seconds of each, and the median of the second over the first."""
    pairs = []
    for turn in range(PAIRS + 1):
        seconds = {}
        for work in (ours, bound) if turn % 2 else (bound, ours):
            begun = time.perf_counter()
            work()
            seconds[work] = time.perf_counter() - begun
        pairs.append((seconds[ours], seconds[bound]))
    warm = pairs[1:]  # the first one touches the memory
    medians = [statistics.median(values) for values in zip(*warm, strict=True)]
    return medians[0], medians[1], statistics.median(b / a for a, b in warm)


if __name__ == "__main__":
    for line in lines():
        print(line, flush=True)
