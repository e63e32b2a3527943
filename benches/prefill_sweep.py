"""TTFT over link rates across the one at which loading takes as long as computing: the table and the plot of docs/PREFILL.md.

    python benches/prefill_sweep.py MODEL_DIRECTORY

Measures in slices (status 3: run it again; a slice takes less than three minutes on two cores, all of them about seven) and writes the page
when all points are there. ``--fresh`` begins anew.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slices import AGAIN, Slices, arguments, quiet, rewrite

from kvtier.bench.prefill import Bench, Point, Sweep, interval, sweep_chart, with_interval
from kvtier.cli import model as models

FACTORS = (0.25, 0.35, 0.5, 0.71, 1.0, 1.41, 2.0, 2.83, 4.0)
SWEEP = Sweep(factors=FACTORS)
PIPELINED = "pipelined"
NAMES = [PIPELINED, *map(str, FACTORS)]
HEAD = (
    "| of κ_crit | link, MB/s | load only | compute only | pipelined | split | ideal split | split / ideal | split / better of the two | "
    "prediction off by |"
)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    arguments(parser, "prefill_sweep")
    asked = parser.parse_args()
    slices = Slices(asked)
    bench: Bench | None = None
    for name in slices.due(NAMES):
        bench = bench or Bench(models.load(asked.model)[0], SWEEP)
        with slices.point(name) as record:
            record |= {"row": asdict(bench.pipelined())} if name == PIPELINED else asdict(bench.point(float(name)))
        print(name, flush=True)
    if not slices.complete(NAMES):
        return AGAIN
    write(slices.records, asked.docs)
    return 0


def write(records: dict[str, dict[str, Any]], docs: Path) -> None:
    """The page's part, and the plot."""
    names = list(Point.__dataclass_fields__)
    points = {factor: Point(**{name: records[str(factor)][name] for name in names}) for factor in FACTORS}
    worst = max(interval(point.over_better)[0] for point in points.values())
    within = sum(statistics.median(point.over_bound) <= 1.15 for point in points.values())
    row = records[PIPELINED]["row"]
    lines = [
        f"K = {SWEEP.cached}, T = {SWEEP.new}, chunks of {SWEEP.chunk}; {SWEEP.pairs} interleaved samples a point, with 95 % intervals of the median:",
        "",
        HEAD,
        "|---" * HEAD.count(" | ") + "|---|",
        *(
            f"| {factor:g} | {p.rate * 1e3:.1f} | {p.load:.2f} s | {p.compute:.2f} s | {p.pipelined:.2f} s | {p.split:.2f} s | {p.bound:.2f} s | "
            f"{with_interval(p.over_bound)} | {with_interval(p.over_better)} | {statistics.median(p.errors):.0%} |"
            for factor, p in points.items()
        ),
        "",
        (
            f"The split is within 1.15 of the ideal one at {within} of {len(points)} rates, and worse than the better of loading and computing beyond the "
            f"interval at {sum(interval(p.over_better)[0] > 1 for p in points.values())} (the largest lower end is {worst:.2f}). Compute-only times spread "
            f"by {statistics.median(p.compute_spread for p in points.values()):.0%} (interquartile). {quiet(list(records.values()))}"
        ),
        "",
        (
            f"Layers that load while others are computed: {row['value']:.2f} s, {row['bound_name']} {row['bound']:.2f} s, ratio {row['ratio']:.3f} "
            f"(aim 1.10; {row['note']})."
        ),
    ]
    rewrite(docs / "PREFILL.md", "sweep", lines)
    title = f"TTFT of SmolLM2-135M on two cores, fp32, K = {SWEEP.cached}, T = {SWEEP.new}"
    (docs / "prefill_sweep.svg").write_text(sweep_chart(list(points.values()), title), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
