"""The order of the store suite."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from kvtier.bench.dram import MemoryBench
from kvtier.bench.figures import Row
from kvtier.bench.index import index_size, lookups, restart
from kvtier.bench.mixed import event_loop, reads_beside_writes, writes_beside_copies
from kvtier.bench.nvme import DiskBench
from kvtier.bench.plan import Plan
from kvtier.bench.threads import idle, victim
from kvtier.errors import KvtierError, StorageError
from kvtier.scratch import home, scratch

__all__ = ["disk_rows", "memory_rows", "store_suite"]


def memory_rows(plan: Plan) -> Iterator[Row]:
    """The rows of blocks in memory."""
    with closing(MemoryBench(plan)) as bench:
        yield from bench.rows()


def disk_rows(plan: Plan, directory: Path) -> Iterator[Row]:
    """The rows of blocks on NVMe; ``directory`` lies on the drive to measure, and is emptied afterwards."""
    with closing(DiskBench(plan, directory)) as bench:
        yield from bench.rows()
        yield from writes_beside_copies(bench)
        yield from reads_beside_writes(bench)
    _empty(directory)


def _restart_rows(plan: Plan, directory: Path) -> Iterator[Row]:
    yield from restart(plan, directory)
    _empty(directory)


def store_suite(plan: Plan, directory: Path, say: Callable[[str], None] = lambda _: None) -> Iterator[Row]:
    """The rows of the store suite, as they are measured. Blocks for as long as that takes.

    Args:
        plan: how much is measured.
        directory: on the drive to measure; a new folder in it is used, and removed.
        say: told what is measured next.

    Raises:
        ConfigError: a directory that is not there and cannot be made.
        StorageError: not enough room on the drive.
    """
    free = os.statvfs(home(directory))
    if free.f_bavail * free.f_frsize < plan.disk_bytes * 1.1:
        raise StorageError(
            f"{directory} has {free.f_bavail * free.f_frsize} bytes free, and the bench needs {int(plan.disk_bytes * 1.1)}: "
            "give another --dir, or --quick"
        )
    with scratch(directory, "kvtier-bench-") as place:
        parts: list[tuple[str, str, Callable[[], Iterator[Row]]]] = [
            ("memory", "dram", lambda: memory_rows(plan)),
            ("NVMe", "nvme", lambda: disk_rows(plan, place)),
            ("lookups", "lookups", lambda: lookups(plan)),
            ("the index's size", "index_bytes_per_block", lambda: index_size(plan)),
            ("restarts", "restart_s_per_million", lambda: _restart_rows(plan, place)),
            ("a computing thread beside transfers", "victim_share", lambda: victim(plan)),
            ("an event loop beside reads", "asyncio_tick", lambda: event_loop(plan)),
            ("an idle store", "idle_cpu_share", lambda: idle(plan, place)),
        ]
        for what, name, rows in parts:
            say(what)
            try:
                yield from rows()
            except (KvtierError, OSError) as error:
                # The other parts can still be measured; this one says why it cannot.
                yield Row(name, None, "", note=f"not measured: {error}")
                _empty(place)


def _empty(directory: Path) -> None:
    for entry in directory.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
