"""The split executed, against its prediction: models, K and link rates, as the engine decides them; the table of docs/PREFILL.md.

    python benches/split_reality.py MODEL_DIRECTORY

Measures in slices (status 3: run it again; a slice takes less than three minutes on two cores, all of them about ten) and writes the page
when all points are there. ``--fresh`` begins anew. The prediction is the engine's own, before the run, from the runs before; a
measurement is the median of interleaved runs. Rates are emulated, as multiples of the one at which loading K tokens takes as long as
computing them. Beside the demo's model two with random weights, which take the time of real ones: a wider one, and one with a latent (MLA).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from slices import AGAIN, Slices, arguments, quiet, rewrite

from kvtier.bench.prefill import Bench, Sweep, interval, with_interval
from kvtier.cli import model as models
from kvtier.prefill import PrefillReport

LENGTHS = {"SmolLM2-135M": (256, 512, 768), "wide": (256, 512), "MLA": (256, 512)}
FACTORS = (0.5, 1.0, 2.0)
NEW, CHUNK, RUNS = 32, 32, 5
NAMES = [f"{kind} {cached} {factor}" for kind, lengths in LENGTHS.items() for cached in lengths for factor in FACTORS]
HEAD = "| model | K | link, MB/s | load only | compute only | split | computed | predicted | off by | split / better of the two |"


def made(kind: str, directory: Path) -> Any:
    """A model by its name."""
    if kind == "SmolLM2-135M":
        return models.load(directory)[0]
    torch.manual_seed(1)
    common = {"vocab_size": 8192, "num_hidden_layers": 8, "max_position_embeddings": 4096}
    if kind == "wide":
        config: Any = transformers.Qwen3Config(
            **common,
            hidden_size=1024,
            intermediate_size=3072,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=64,
        )
    else:
        config = transformers.DeepseekV3Config(
            **common,
            hidden_size=1024,
            intermediate_size=3072,
            first_k_dense_replace=8,
            num_attention_heads=16,
            num_key_value_heads=16,
            kv_lora_rank=256,
            q_lora_rank=512,
            qk_rope_head_dim=32,
            qk_nope_head_dim=64,
            v_head_dim=64,
        )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def measured(bench: Bench, cached: int, factor: float) -> dict[str, Any]:
    """A point."""
    rate = factor * cached * bench.layout.bytes_per_token / bench.compute_s / 1e9
    tokens = bench.tokens[: cached + NEW]
    found: list[list[PrefillReport]] = [[], [], []]
    with bench.engine(rate, cached, CHUNK) as engine:
        for i in range(-1, RUNS):
            for j in range(3):
                which = (i + j) % 3
                report = engine.run(tokens, front=(0, cached, None)[which]).report
                if i >= 0:  # the first ones measure
                    found[which].append(report)
    load, compute, split = ([report.ttft_s for report in reports] for reports in found)
    return {
        "cached": cached,
        "rate": rate,
        "load": statistics.median(load),
        "compute": statistics.median(compute),
        "split": statistics.median(split),
        "front": statistics.median(report.tokens_front for report in found[2]),
        "predicted": statistics.median(report.predicted["ttft_s"] for report in found[2]),
        "errors": [abs(report.predicted["ttft_s"] / report.ttft_s - 1) for report in found[2]],
        "over_better": [s / min(a, b) for a, b, s in zip(load, compute, split, strict=True)],
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    arguments(parser, "split_reality")
    asked = parser.parse_args()
    slices = Slices(asked)
    model: Any = None
    bench: Bench | None = None
    last: list[str] = []
    for name in slices.due(NAMES):
        kind, cached, factor = name.split()
        if last[:1] != [kind]:
            bench = model = None  # one model in memory at a time
            model = made(kind, asked.model)
        if last != [kind, cached]:
            bench = Bench(model, Sweep(int(cached), NEW, (int(cached), NEW), CHUNK))
        last = [kind, cached]
        assert bench is not None
        with slices.point(name) as record:
            record |= {"model": kind} | measured(bench, int(cached), float(factor))
        print(name, flush=True)
    if not slices.complete(NAMES):
        return AGAIN
    write([slices.records[name] for name in NAMES], asked.docs)
    return 0


def write(records: list[dict[str, Any]], docs: Path) -> None:
    """The page's part."""
    lines = [
        HEAD,
        "|---" * HEAD.count(" | ") + "|---|",
        *(
            f"| {r['model']} | {r['cached']} | {r['rate'] * 1e3:.1f} | {r['load']:.2f} s | {r['compute']:.2f} s | {r['split']:.2f} s | {r['front']:.0f} | "
            f"{r['predicted']:.2f} s | {statistics.median(r['errors']):.0%} | {with_interval(r['over_better'])} |"
            for r in records
        ),
    ]
    errors = [statistics.median(r["errors"]) for r in records]
    worse = sum(interval(r["over_better"])[0] > 1 for r in records)
    lines += [
        "",
        (
            f"{len(records)} points: the prediction is off by {statistics.median(errors):.0%} in the median and by {max(errors):.0%} at worst; the split is worse than the "
            f"better of loading and computing beyond the range of its {RUNS} runs at {worse}. {quiet(records)}"
        ),
    ]
    rewrite(docs / "PREFILL.md", "reality", lines)


if __name__ == "__main__":
    sys.exit(main())
