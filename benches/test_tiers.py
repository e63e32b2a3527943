"""The throughput of the tiers beside the machine's own: ``pytest benches/`` prints the ratios.

Nothing here depends on how fast the machine is: what is asserted is that the bytes came from where they should.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.bench import QUICK, Row
from kvtier.bench.suite import disk_rows, memory_rows

PLACE = Path(os.environ.get("KVTIER_BENCH_DIR", Path(__file__).parent.parent / ".benchmarks"))
"""A directory on the drive to measure."""


def show(rows: Iterator[Row], capsys: pytest.CaptureFixture[str]) -> dict[str, Row]:
    """Print the rows as they come; returns them by name."""
    seen: dict[str, Row] = {}
    for row in rows:
        assert row.name not in seen
        assert row.value is not None
        assert row.bound is not None
        assert row.ratio is not None
        assert row.value > 0
        seen[row.name] = row
        with capsys.disabled():
            print(
                f"\n{row.name:32} {row.value:10.4g} {row.unit:6} {row.ratio:6.2f} x {row.bound:.4g} ({row.bound_name})",
                end="",
            )
    return seen


def test_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """Verified reads into the caller's memory, and puts that evict, beside memcpy."""
    rows = show(memory_rows(QUICK), capsys)
    assert {f"dram_{verb}_{size}" for verb in ("get", "put") for size in ("64k", "1m", "4m")} <= rows.keys()


def test_nvme(capsys: pytest.CaptureFixture[str]) -> None:
    """Cold reads and steady writes, beside a bare io_uring loop on the same drive."""
    PLACE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=PLACE) as folder:
        rows = show(disk_rows(QUICK, Path(folder)), capsys)
    assert {f"nvme_{verb}_{size}" for verb in ("read", "write") for size in ("64k", "256k", "1m", "4m")} <= rows.keys()
