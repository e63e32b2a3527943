"""TTFT of a prefix of which `retain` loads a part, beside that of all of it, over a link that is slowed on purpose.

    python benches/retain.py MODEL_DIRECTORY [--cached 1024] [--new 32] [--gbs 0.1] [--pairs 9] [--fractions 0.5 0.25]

Prints a line of a Markdown table each; about a minute on two cores. At 0.1 GB/s all of it is worth leaving out, at 20 nothing is,
as loading is done long before the computation. Real text, counted once with ``importance``; all that is to be
loaded is loaded (``front=0``). What it costs in quality says ``benches/quality.py``.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path

from kvtier import Dram, Store
from kvtier.bench.figures import alternate
from kvtier.bench.prefill import with_interval
from kvtier.cli import model as models
from kvtier.cli import prompt as prompts
from kvtier.identity import Identity
from kvtier.prefill import PrefillEngine, layout_of

HEAD = "| loaded | bytes | TTFT | of all | ratio |"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--cached", type=int, default=1024)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--gbs", type=float, default=0.1)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.5, 0.25])
    asked = parser.parse_args()
    model, tokenizer = models.load(asked.model)
    count = asked.cached + asked.new
    ids = prompts.build(tokenizer, prompts.python_topics(), "", count)[:count]
    layout = layout_of(model)
    with Store(Dram(layout.bytes_per_token * count * 2 + (64 << 20), emulate_gbs=asked.gbs)) as store:
        store.prefaulted(timeout=60)
        blocks = store.namespace(Identity(b"retain"), layout)
        with PrefillEngine(model, blocks, importance=True, timeout=None) as engine:
            engine.flush(engine.run(ids))
        print(HEAD)
        print("|---" * HEAD.count(" | ") + "|---|", flush=True)
        with PrefillEngine(model, blocks) as engine:
            sizes: dict[float, int] = {}

            def ttft(retain: float) -> float:
                report = engine.run(ids, front=0, retain=retain).report
                sizes[retain] = sum(report.bytes.values())
                return report.ttft_s

            for fraction in asked.fractions:
                ways = partial(ttft, 1.0), partial(ttft, fraction)
                alternate(1, *ways)  # warms up
                pairs = alternate(asked.pairs, *ways)
                of_all, of_some = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
                print(
                    f"| {fraction:.0%} | {sizes[fraction] / 1e6:.1f} MB | {of_some:.3f} s | {of_all:.3f} s | "
                    f"{with_interval([part / all_of_it for all_of_it, part in pairs])} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
