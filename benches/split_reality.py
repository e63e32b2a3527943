"""The split executed, against its prediction: K, T and link rate, as the engine decides them.

    python benches/split_reality.py MODEL_DIRECTORY [--cached 256 512] [--rates 0.006 0.012 0.024] [--new 32] [--runs 7]

Prints a line of a Markdown table each. The prediction is the engine's own, before the run, from the runs before; a measurement is the
median of interleaved runs. Rates are GB/s, emulated.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from kvtier.bench.prefill import Bench, Sweep, interval
from kvtier.cli import model as models
from kvtier.prefill import PrefillReport

HEAD = "| K | T | link, MB/s (emulated) | load only | compute only | split | computed | predicted | off by | better of the two |"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--cached", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.006, 0.012, 0.024])
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--runs", type=int, default=7)
    asked = parser.parse_args()
    model, _ = models.load(asked.model)
    print(HEAD)
    print("|---" * HEAD.count(" | ") + "|---|", flush=True)
    for cached in asked.cached:
        bench = Bench(model, Sweep(cached, asked.new, (cached, asked.new), 32))
        tokens = bench.tokens[: cached + asked.new]
        for rate in asked.rates:
            found: list[list[PrefillReport]] = [[], [], []]
            with bench.engine(rate, cached, 32) as engine:
                for i in range(-1, asked.runs):
                    for j in range(3):
                        which = (i + j) % 3
                        front = (0, cached, None)[which]
                        report = engine.run(tokens, front=front).report
                        if i >= 0:  # the first ones measure
                            found[which].append(report)
            load, compute, split = (statistics.median(r.ttft_s for r in reports) for reports in found)
            predicted = statistics.median(r.predicted["ttft_s"] for r in found[2])
            errors = [abs(r.predicted["ttft_s"] / r.ttft_s - 1) for r in found[2]]
            over = [r.ttft_s / min(a.ttft_s, b.ttft_s) for a, b, r in zip(*found, strict=True)]
            front = statistics.median(r.tokens_front for r in found[2])
            low, high = interval(over)
            print(
                f"| {cached} | {asked.new} | {rate * 1e3:g} | {load:.2f} s | {compute:.2f} s | {split:.2f} s | {front:.0f} | {predicted:.2f} s | "
                f"{statistics.median(errors):.0%} | {statistics.median(over):.2f} ({low:.2f} to {high:.2f}) |",
                flush=True,
            )


if __name__ == "__main__":
    main()
