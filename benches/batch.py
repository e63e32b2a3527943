"""Prompts computed in one pass, beside the same prompts one after the other: seconds until the last one's logits.

    python benches/batch.py MODEL_DIRECTORY [--cached 256] [--new 32] [--batches 2 4 8] [--pairs 9]

Prints a line of a Markdown table each; about a minute on two cores. Their KV lies in memory and is loaded whole.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from pathlib import Path

from kvtier.bench.figures import alternate
from kvtier.bench.prefill import Bench, Sweep, with_interval
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

        def alone(count: int) -> float:
            begun = time.perf_counter()
            for _ in range(count):
                engine.run(prompt, front=0)
            return time.perf_counter() - begun

        def together(count: int) -> float:
            begun = time.perf_counter()
            engine.run_batch([prompt] * count, front=0)
            return time.perf_counter() - begun

        for count in asked.batches:
            ways = partial(alone, count), partial(together, count)
            alternate(1, *ways)  # warms up
            pairs = alternate(asked.pairs, *ways)
            one, all_of_them = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
            ratio = with_interval([joined / single for single, joined in pairs])
            print(f"| {count} | {one:.2f} s | {all_of_them:.2f} s | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
