"""Measurements in slices: each point is a line of a file, and what is there is not measured again."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

AGAIN = 3
"""The exit status of a slice after which there is more to measure."""
DOCS = Path(__file__).parent.parent / "docs"
_TICKS = os.sysconf("SC_CLK_TCK")


def arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """The options of a script that measures in slices."""
    default = Path(__file__).parent / "results" / f"{name}.jsonl"
    parser.add_argument("--out", type=Path, default=default, help="JSON Lines (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=90, help="begin no point after so many (default: %(default)s)")
    parser.add_argument("--fresh", action="store_true", help="forget what the file has")
    parser.add_argument("--docs", type=Path, default=DOCS, help="where the page is that is written at the end")


class Slices:
    """The points of a file, and what is missing.

    Args:
        asked: what :func:`arguments` gave.
    """

    def __init__(self, asked: argparse.Namespace) -> None:
        self.path: Path = asked.out
        self._until = time.monotonic() + asked.seconds
        if asked.fresh:
            self.path.unlink(missing_ok=True)
        lines = self.path.read_text().splitlines() if self.path.is_file() else []
        self.records: dict[str, dict[str, Any]] = {record["name"]: record for record in map(json.loads, lines)}

    def due(self, names: Sequence[str]) -> Iterator[str]:
        """The points to measure now, one at a time."""
        for name in names:
            if name not in self.records and time.monotonic() < self._until:
                yield name

    def complete(self, names: Sequence[str]) -> bool:
        """Whether all are there."""
        return all(name in self.records for name in names)

    @contextmanager
    def point(self, name: str) -> Iterator[dict[str, Any]]:
        """A record to fill in, which is kept, with how busy others had the machine meanwhile."""
        record: dict[str, Any] = {"name": name, "date": datetime.date.today().isoformat()}
        begun, before = time.perf_counter(), _busy_s() - _own_s()
        yield record
        spent = (time.perf_counter() - begun) * (os.cpu_count() or 1)
        others = (_busy_s() - _own_s() - before) / spent
        record["others"] = round(min(max(others, 0.0), 1.0), 3)  # clocks tick
        self.records[name] = record
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def _busy_s() -> float:
    """CPU seconds since the machine began that were not idle, time that its host took included."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    return sum(int(field) for at, field in enumerate(fields) if at not in (3, 4)) / _TICKS


def _own_s() -> float:
    return sum(os.times()[:4])


def quiet(records: Sequence[dict[str, Any]]) -> str:
    """How quiet the machine was, in words."""
    others = [record["others"] for record in records]
    days = sorted({record["date"] for record in records})
    return (
        f"Measured on {' and '.join(days)}; other processes took {statistics.median(others):.0%} of the CPU in the median point, "
        f"{max(others):.0%} in the worst."
    )


def rewrite(page: Path, mark: str, lines: Sequence[str]) -> None:
    """Put lines between the marks ``<!-- mark -->`` and ``<!-- end -->`` of a page."""
    begin, end = f"<!-- {mark} -->\n", "<!-- end -->"
    head, rest = page.read_text(encoding="utf-8").split(begin)
    _, tail = rest.split(end, 1)
    page.write_text(head + begin + "\n".join(lines) + "\n" + end + tail, encoding="utf-8")
