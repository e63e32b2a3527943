"""The scripts that measure in slices: what is there is not measured again, and the page says what the points say."""

from __future__ import annotations

import argparse
import importlib
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from kvtier.bench.figures import Row
from kvtier.bench.prefill import Point

BENCHES = Path(__file__).parent.parent / "benches"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHES))
    return importlib.import_module


def asked(place: Path, **changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"out": place / "some" / "points.jsonl", "seconds": 1e6, "fresh": False} | changes)


def test_a_slice_goes_on_where_the_last_one_ended(script: Any, tmp_path: Path) -> None:
    slices, names = script("slices"), ["a", "b", "c"]
    first = slices.Slices(asked(tmp_path))
    for name in first.due(names):
        if name == "c":
            break  # its time is over
        with first.point(name) as record:
            record["value"] = name * 2
    with pytest.raises(RuntimeError), first.point("c"):
        raise RuntimeError("it failed")
    second = slices.Slices(asked(tmp_path))
    assert list(slices.Slices(asked(tmp_path, seconds=0)).due(names)) == []
    assert list(second.due(names)) == ["c"]
    assert not second.complete(names)
    with second.point("c"):
        pass
    assert second.complete(names)
    third = slices.Slices(asked(tmp_path))
    assert [third.records[name].get("value") for name in names] == ["aa", "bb", None]
    assert all(0 <= record["others"] <= 1 for record in third.records.values())
    assert "other processes took" in slices.quiet(list(third.records.values()))
    assert list(slices.Slices(asked(tmp_path, fresh=True)).due(names)) == names


def page(place: Path) -> Path:
    text = "before\n<!-- sweep -->\nold\n<!-- end -->\nbetween\n<!-- reality -->\nold\n<!-- end -->\nafter\n"
    (place / "PREFILL.md").write_text(text)
    return place / "PREFILL.md"


def test_the_sweep_becomes_a_table_and_a_plot(script: Any, tmp_path: Path) -> None:
    sweep = script("prefill_sweep")
    common = {"date": "2026-01-02", "others": 0.03}
    records = {
        # Nine samples each: at the last rate the split is 1.2 times the ideal one, and of the better of the two.
        str(factor): common
        | asdict(Point(factor, 4.0, 3.0, 2.0, 1.0, 1.0, [last] * 9, [0.7 if last == 1 else last] * 9, [0.05] * 9, 0.02))
        for factor in sweep.FACTORS
        for last in [1.2 if factor == sweep.FACTORS[-1] else 1.0]
    }
    row = Row("ttft_pipelined", 1.1, "s", 1.0, "max(load, compute), each alone", 1.1, 0.1, 9, "a note")
    records["pipelined"] = common | {"row": asdict(row)}
    text = page(tmp_path)
    sweep.write(records, tmp_path)
    lines = text.read_text().splitlines()
    assert sum(line.startswith("| ") for line in lines) == 1 + len(sweep.FACTORS)
    whole = text.read_text()
    assert "at 8 of 9 rates" in whole
    assert "at 1 (the largest lower end is 1.20)" in whole
    assert "2026-01-02; other processes took 3%" in whole
    assert lines[0] == "before"
    assert lines.count("old") == 1  # the other part is as it was
    svg = " ".join(ElementTree.fromstring((tmp_path / "prefill_sweep.svg").read_text()).itertext())
    assert "ideal split" in svg


def test_the_splits_become_a_table(script: Any, tmp_path: Path) -> None:
    reality = script("split_reality")
    assert len(reality.NAMES) >= 20
    times = {"rate": 0.01, "load": 3.0, "compute": 2.0, "split": 1.0, "front": 96, "predicted": 1.1}
    record = times | {"model": "wide", "cached": 256, "date": "2026-01-02", "others": 0.5}
    better = [record | {"errors": [error] * 5, "over_better": [0.5] * 5} for error in (0.1, 0.2, 0.3)]
    text = page(tmp_path)
    reality.write([*better, record | {"errors": [0.1] * 5, "over_better": [1.1] * 5}], tmp_path)
    whole = text.read_text()
    assert "| wide | 256 | 10.0 | 3.00 s | 2.00 s | 1.00 s | 96 | 1.10 s | 30% | 0.50 (0.50 to 0.50) |" in whole
    assert "4 points: the prediction is off by 15% in the median and by 30% at worst" in whole
    assert "of its 5 runs at 1." in whole
