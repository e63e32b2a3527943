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
    """The lines of the table: what was measured, and the error of its prediction; below it what they sum up to."""
    names = ["own rate" if rate is None else f"{rate:g} GB/s, emulated" for rate in RATES]
    yield f"| K | T | tier | {' | '.join(names)} | compute all again |"
    yield "|---|---|---|" + "---|" * (len(RATES) + 1)
    found = {(r["new"], r["cached"], r["tier"], r["emulate_gbs"]): r for r in records}
    for new, cached, tier in sorted({key[:3] for key in found}):
        row = [found[new, cached, tier, rate] for rate in RATES]
        cells = [_cell(each["measured_s"], each["predicted_s"]) + MARKS[_verdict(each)] for each in row]
        again = _cell(row[0]["recompute_measured_s"], row[0]["recompute_predicted_s"])
        yield f"| {cached} | {new} | {tier} | {' | '.join(cells)} | {again} |"
    errors = [abs(r["predicted_s"] / r["measured_s"] - 1) for r in records]
    others = [
        abs(r["recompute_predicted_s"] / r["recompute_measured_s"] - 1)
        for r in {(r["cached"], r["new"]): r for r in records}.values()
    ]
    verdicts = [_verdict(r) for r in records]
    clear = len(records) - verdicts.count("near")
    yield ""
    yield (
        f"{len(records)} combinations: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}. Computing all again, "
        f"{len(others)}: median {statistics.median(others):.1%}, worst {max(others):.1%}. Decided right in {verdicts.count('right')} of "
        f"{clear} that are no near-ties."
    )
    for new, drift in sorted({(r["new"], r["drift"]) for r in records if "drift" in r}):
        yield f"T = {new}: the same pass took {drift:+.1%} since the calibration."


MARKS = {"right": "", "near": " ~", "wrong": " ✗"}
"""What the table adds to a cell: a near-tie, or a wrong decision."""


def _verdict(record: dict[str, Any]) -> str:
    load, again = record["measured_s"], record["recompute_measured_s"]
    if abs(load - again) <= NEAR * min(load, again):
        return "near"
    return "right" if (record["predicted_s"] <= record["recompute_predicted_s"]) == (load <= again) else "wrong"


def _cell(measured: float, predicted: float) -> str:
    return f"{measured * 1e3:.0f} ms {predicted / measured - 1:+.1%}"


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
