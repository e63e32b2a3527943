"""κ against reality: calibrate this machine, predict TTFTs on it, measure them, and report every error.

    python benches/kappa_reality.py MODEL --dir DIR --new 64 --out a.jsonl     # one T, all K, tiers and rates: 2 to 3 minutes
    python benches/kappa_reality.py --table a.jsonl b.jsonl                    # the table of docs/KAPPA.md, and a summary

A prediction is what ``decide`` says from the calibration alone, with the tier's rate capped where the store's is
(``emulate_gbs``). A measurement is the median of interleaved runs: look up, load K tokens' KV from the tier into the model's
tensors, compute T tokens; or compute all K + T.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

CACHED = (256, 512, 1024)
TIERS = ("dram", "nvme")
RATES = (0.02, 0.06, 0.25, None)
"""GB/s; None is the tier's own. On two CPU cores, loading and computing the demo model's prefix break even near 0.03."""
NEAR = 0.05
"""Load and recompute closer than this are a near-tie."""


def measure(directory: Path, work: Path, new: int, runs: int) -> list[dict[str, Any]]:
    """A record for each K, tier and rate."""
    from kvtier.cli import model as models
    from kvtier.kappa import Request, Residency, decide
    from kvtier.kappa.calibrate import measure as calibrate
    from kvtier.kappa.rig import Rig

    model, _ = models.load(directory)
    (work / "kept").mkdir()
    rig = Rig(model, work / "kept", max(CACHED))
    machine = calibrate(rig, work, 5, {}, lambda _: None)
    combinations = [(cached, tier, rate) for cached in CACHED for tier in TIERS for rate in RATES]
    loads: dict[tuple[int, str, float | None], list[float]] = {each: [] for each in combinations}
    again: dict[int, list[float]] = {cached: [] for cached in CACHED}
    reference: list[float] = []  # one pass of a chunk: has the machine changed its speed since it was calibrated?
    with ExitStack() as stack:
        memory = {rate: stack.enter_context(rig.holding("dram", rate)) for rate in RATES}
        for _ in range(runs):
            reference.append(rig.compute(0, rig.chunk))
            for cached in CACHED:
                again[cached].append(rig.compute(0, cached + new))
            for cached, tier, rate in combinations:
                if tier == "dram":
                    taken = rig.serial(memory[rate], cached, new, tier)
                else:
                    with rig.holding("nvme", rate) as blocks:  # not in memory yet
                        taken = rig.serial(blocks, cached, new, tier)
                loads[cached, tier, rate].append(taken)
    records = []
    for (cached, tier, rate), times in loads.items():
        at = machine if rate is None else machine.emulating(tier, rate)
        size = rig.layout.bytes_per_token * cached
        told = decide(Request(cached, new), Residency({tier: size}), at)
        records.append(
            {
                "cached": cached,
                "new": new,
                "tier": tier,
                "emulate_gbs": rate,
                "emulated": at.emulated,
                "predicted_s": told.load_s,
                "measured_s": statistics.median(times),
                "recompute_predicted_s": told.recompute_s,
                "recompute_measured_s": statistics.median(again[cached]),
                "runs": runs,
                "spread": (max(times) - min(times)) / statistics.median(times),
                "drift": statistics.median(reference) / machine.prefill.prefix(rig.chunk) - 1,
                "machine": machine.machine,
            }
        )
    return records


def table(records: list[dict[str, Any]]) -> Iterable[str]:
    """The lines of the table, and below it what they sum up to."""
    yield "| K | T | tier | emulated GB/s | TTFT predicted | measured | error | recompute predicted | measured | error | faster | decided |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|"
    errors, others, right, ties = [], {}, 0, 0
    for record in sorted(records, key=lambda r: (r["new"], r["cached"], r["tier"], r["emulate_gbs"] or 1e9)):
        load, again = record["measured_s"], record["recompute_measured_s"]
        error = record["predicted_s"] / load - 1
        other = record["recompute_predicted_s"] / again - 1
        errors.append(abs(error))
        others[record["cached"], record["new"]] = abs(other)
        near = abs(load - again) <= NEAR * min(load, again)
        faster = "load" if load <= again else "recompute"
        chosen = "load" if record["predicted_s"] <= record["recompute_predicted_s"] else "recompute"
        ties += near
        right += not near and faster == chosen
        rate = "-" if record["emulate_gbs"] is None else f"{record['emulate_gbs']:g}"
        yield (
            f"| {record['cached']} | {record['new']} | {record['tier']} | {rate} | {_ms(record['predicted_s'])} | {_ms(load)} | {error:+.1%} | "
            f"{_ms(record['recompute_predicted_s'])} | {_ms(again)} | {other:+.1%} | {'near-tie' if near else faster} | {chosen} |"
        )
    yield ""
    clear = len(records) - ties
    yield (
        f"{len(records)} combinations: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}; recompute of {len(others)}: "
        f"median {statistics.median(others.values()):.1%}, worst {max(others.values()):.1%}; decided right in {right} of {clear} "
        f"({right / clear:.1%}), {ties} near-ties left out. Since the calibration the machine had slowed down by "
        + ", ".join(f"{drift:.1%}" for drift in dict.fromkeys(record["drift"] for record in records))
        + " (the same pass, in each run)."
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="a Hugging Face directory")
    parser.add_argument("--dir", type=Path, default=Path.home() / ".cache" / "kvtier", help="on the drive to measure")
    parser.add_argument("--new", type=int, default=64, help="T")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--out", type=Path, help="JSON Lines; default: printed")
    parser.add_argument("--table", type=Path, nargs="+", help="only tabulate these files")
    asked = parser.parse_args()
    if asked.table:
        records = [json.loads(line) for path in asked.table for line in path.read_text().splitlines()]
    else:
        asked.dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="kappa-", dir=asked.dir) as work:
            records = measure(asked.model, Path(work), asked.new, asked.runs)
        if asked.out:
            asked.out.write_text("".join(json.dumps(record) + "\n" for record in records))
    print("\n".join(table(records)))


if __name__ == "__main__":
    main()
