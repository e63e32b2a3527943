"""The script that measures other stores beside kvtier."""

from __future__ import annotations

import contextlib
import datetime
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "peers.py"


def test_each_peer_has_a_row_or_is_named_as_absent() -> None:
    ran = subprocess.run(
        [sys.executable, SCRIPT, "--mib", "2", "--pairs", "2", "arena", "lmdb"],
        text=True,
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    rows = [line for line in ran.stdout.splitlines() if line.startswith("| ")]
    assert len(rows[0].split("|")) == 7
    assert any(row.startswith("| arena + numpy copy |") and row.count("**") == 4 for row in rows)
    assert any(row.startswith("| lmdb") for row in rows) != ("Absent: lmdb" in ran.stdout)


def test_a_store_that_gives_other_bytes_is_not_measured() -> None:
    names: dict[str, Any] = runpy.run_path(str(SCRIPT))

    class Liar(names["Floor"]):  # type: ignore[misc]
        name = "liar"

        def get(self, key: int, out: np.ndarray) -> None:
            np.copyto(out, self.slots[0])

    source, target = names["random_buffer"](2 << 20), names["huge_buffer"](2 << 20)
    with contextlib.ExitStack() as stack:
        ours, honest = (names[kind](source, target, stack) for kind in ("Kvtier", "Floor"))
        assert len(list(names["measured"](ours, honest, 2))) == 4
        with pytest.raises(ValueError, match="liar gave other bytes"):
            list(names["measured"](ours, Liar(source, target, stack), 2))


def test_the_page_keeps_its_section() -> None:
    names: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "benchmarks.py"))
    assert names["_page"]([], datetime.datetime.now(datetime.UTC), 5).endswith(names["BESIDE"])
    assert names["PAGE"].read_text().endswith(names["BESIDE"])


def test_a_row_of_the_page_is_the_median_of_all_runs() -> None:
    names: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "benchmarks.py"))

    def run(get: float, cpu: float) -> list[dict[str, Any]]:
        common = {"unit": "GB/s", "bound": 10.0, "bound_name": "bound", "spread": 0.1}
        return [
            {"name": "dram_get_64k", "value": get * 10, "ratio": get, **common},
            {"name": "nvme_read_64k_cpu_s_per_gib", "value": cpu, "ratio": 1 / cpu, **common},
        ]

    rows = names["_combined"]([run(0.95, 0.11), run(0.80, 0.10), run(0.91, 0.15)])
    assert [row["value"] for row in rows] == [9.1, 0.11]
    assert [row["range"] for row in rows] == [(0.80, 0.95), (0.10, 0.15)]
    page = names["_page"](rows, datetime.datetime.now(datetime.UTC), 3)
    assert "| `dram_get_64k` | 9.1 GB/s | 10 (bound) | 0.91 | 10% | 0.80 to 0.95 | >= 0.9 | met |" in page
