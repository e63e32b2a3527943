"""The prefill suite of the bench, on a small model: what it compares, not how fast it is."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner

from kvtier.bench.prefill import Point, Sweep, _ideal, interval, prefill_suite, sweep_chart
from kvtier.cli import main
from kvtier.integrations.reference import DictNamespace
from kvtier.prefill import Event, PrefillEngine, layout_of
from test_prefill import build, llama

TINY = Sweep(cached=128, new=8, pipelined=(160, 32), chunk=32, pairs=3, factors=(0.5, 1.0))


@pytest.fixture(scope="module")
def model() -> Any:
    return build(llama())


def test_the_rows_compare_what_they_say(model: Any) -> None:
    points: list[Point] = []
    rows = {row.name: row for row in prefill_suite(model, TINY, points=points)}
    assert list(rows) == ["ttft_pipelined", "ttft_split_0.5", "ttft_split", "ttft_split_vs_better"]
    for row in rows.values():
        assert row.unit == "s"
        assert row.value
        assert row.bound
        assert row.ratio
        assert row.samples == 3
        assert "emulated" in row.note
        assert "95 % interval" in row.note
    assert points[1].rate == pytest.approx(2 * points[0].rate)
    worst = max(statistics.median(point.over_better) for point in points)
    assert rows["ttft_split_vs_better"].ratio == worst
    svg = ElementTree.fromstring(sweep_chart(points, "a title"))
    text = " ".join(svg.itertext())
    assert all(name in text for name in ("load only", "compute only", "pipelined", "split", "ideal split", "a title"))


def test_the_command_prints_the_ratios_and_draws_the_sweep(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.cli.model.fetch", lambda cache, _: cache)
    monkeypatch.setattr("kvtier.cli.model.load", lambda _: (model, None))
    monkeypatch.setattr("kvtier.bench.prefill.QUICK_SWEEP", TINY)
    chart = tmp_path / "sweep.svg"
    words = ["bench", "--suite", "prefill", "--quick", "--json", "--dir", str(tmp_path), "--chart", str(chart)]
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {"ttft_pipelined", "ttft_split", "ttft_split_vs_better"} <= {row["name"] for row in rows}
    assert all(row["ratio"] > 0 for row in rows)
    assert "ideal split" in " ".join(ElementTree.parse(chart).getroot().itertext())


def test_the_ideal_split_is_where_both_end_together(model: Any) -> None:
    with PrefillEngine(model, DictNamespace(layout_of(model, 16)), chunk_tokens=32) as engine:
        report = engine.run(list(range(40))).report
    # Four chunks of 32 tokens take 1, 2, 3 and 4 s; loading all takes 8 s, and the new tokens 0.5 s.
    events = tuple(Event("compute", 0, (i * 32, i * 32 + 32), 0.0, i + 1.0) for i in range(4))
    compute = replace(report, timeline=events)
    load = replace(report, measured={"load_s": 8.0, "new_s": 0.5})
    # After 2 chunks and a third of the next: 1 + 2 + 3 x = 8 (1 - (2 + x) / 4), so x = 0.2.
    assert _ideal(load, compute, TINY) == pytest.approx(3.6 + 0.5, abs=0.01)


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    assert interval([float(i) for i in range(9)]) == (1.0, 7.0)  # the 2nd and the 8th: 96 %
    assert interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    random = np.random.default_rng(1)
    hits = 0
    for _ in range(2000):
        low, high = interval(random.exponential(size=15).tolist())
        hits += low <= np.log(2) <= high
    assert hits / 2000 >= 0.945
