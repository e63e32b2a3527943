"""How much is measured."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.errors import ConfigError

__all__ = ["FULL", "QUICK", "SIZES", "Plan", "label"]

_MIB = 1 << 20

SIZES = {"dram": (64 << 10, _MIB, 4 * _MIB), "nvme": (64 << 10, 256 << 10, _MIB, 4 * _MIB)}
"""Bytes of the blocks that are measured, by tier."""


def label(size: int) -> str:
    """``64k``, ``1m``: a block size in the names of rows."""
    return f"{size >> 10}k" if size < _MIB else f"{size >> 20}m"


@dataclass(frozen=True)
class Plan:
    """The sizes of a run; all in bytes unless named otherwise.

    Attributes:
        pairs: pairs of samples a row.
        region: data in memory, and what one lap of a memory row moves: many times the processor's cache.
        file: the NVMe tier, and the bare loop's file.
        front: the DRAM tier in front of it, much smaller than the data.
        lap: what one lap of an NVMe row moves.
        batch: what one call of a batched row moves.
        restart_blocks: blocks that a restart finds.
        index_blocks: blocks whose share of the index is taken.
        spin_s: seconds of one lap of the computing thread.
        idle_s: seconds of one look at an idle store.
    """

    pairs: int = 9
    region: int = 256 * _MIB
    file: int = 1024 * _MIB
    front: int = 256 * _MIB
    lap: int = 256 * _MIB
    batch: int = 32 * _MIB
    restart_blocks: int = 120_000
    index_blocks: int = 40_000
    spin_s: float = 0.2
    idle_s: float = 1.0

    def __post_init__(self) -> None:
        if self.lap > self.file // 2 or self.front > self.file // 4 or self.batch > min(self.lap, self.region):
            raise ConfigError(
                f"{self} does not fit together: a lap takes at most half of the file, the front a quarter, a batch a lap"
            )

    @property
    def restart_bytes(self) -> int:
        """The file of the restart: an NVMe tier takes a block for every 16 KiB of its size."""
        return self.restart_blocks * (16 << 10) * 21 // 20 + 64 * _MIB

    @property
    def disk_bytes(self) -> int:
        """Disk space that the run uses at most."""
        return max(2 * self.file, self.restart_bytes)


QUICK = Plan()
"""Seen to take 2 min 11 s on two cores beside other work; under 3 GiB of disk and of memory."""

FULL = Plan(
    pairs=15,
    region=1024 * _MIB,
    file=4096 * _MIB,
    lap=1024 * _MIB,
    restart_blocks=1_000_000,
    index_blocks=100_000,
    spin_s=0.5,
)
"""Several minutes; under 18 GiB of disk and 5 GiB of memory."""
