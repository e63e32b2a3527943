"""Prompts computed in one pass, beside the same prompts one after the other: seconds until the last one's logits.

    python benches/batch.py MODEL_DIRECTORY [--cached 256] [--new 32] [--batches 2 4 8] [--pairs 9]

Prints a line of a Markdown table each; about a minute on two cores. Their KV lies in memory and is loaded whole.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from kvtier.bench.prefill import Bench, Sweep, interval
from kvtier.cli import model as models

HEAD = "| prompts | one by one | together | ratio |"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--cached", type=int, default=256)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--pairs", type=int, default=9)
    asked = parser.parse_args()
    model, _ = models.load(asked.model)
    bench = Bench(model, Sweep(asked.cached, asked.new, (asked.cached, asked.new), 32))
    prompt = bench.tokens[: asked.cached + asked.new]
    print(HEAD)
    print("|---" * HEAD.count(" | ") + "|---|", flush=True)
    with bench.engine(None, asked.cached, 32) as engine:
        for count in asked.batches:
            seconds: dict[bool, list[float]] = {True: [], False: []}
            for i in range(-1, asked.pairs):  # the first pair warms up
                for together in (i % 2 == 0, i % 2 != 0):
                    begun = time.perf_counter()
                    if together:
                        engine.run_batch([prompt] * count, front=0)
                    else:
                        for _ in range(count):
                            engine.run(prompt, front=0)
                    if i >= 0:
                        seconds[together].append(time.perf_counter() - begun)
            ratios = [one / other for one, other in zip(seconds[True], seconds[False], strict=True)]
            low, high = interval(ratios)
            alone, joined = statistics.median(seconds[False]), statistics.median(seconds[True])
            print(
                f"| {count} | {alone:.2f} s | {joined:.2f} s | {statistics.median(ratios):.2f} ({low:.2f} to {high:.2f}) |",
                flush=True,
            )


if __name__ == "__main__":
    main()
