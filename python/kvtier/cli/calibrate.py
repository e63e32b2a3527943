"""``kvtier kappa calibrate``: measures this machine with a model, for decisions on it."""

from __future__ import annotations

from pathlib import Path
from time import monotonic
from typing import Any

import click

from kvtier.cli import model as models
from kvtier.cli.demo import needs_torch
from kvtier.cli.options import NewFile, directory_option
from kvtier.cli.output import console, emit, json_option, pairs, size, time, write
from kvtier.errors import ConfigError
from kvtier.kappa.measured import Measured

__all__ = ["calibrate"]


@click.command()
@click.argument("model", type=click.Path(path_type=Path, exists=True, file_okay=False), required=False)
@click.option(
    "--out",
    type=NewFile(),
    default=Path("measured.toml"),
    show_default=True,
    help="The file to write; the default is in the current directory.",
)
@directory_option("A directory on the drive to measure; what is written there is removed again.")
@click.option("--device", help="Where the model runs: cpu, cuda, cuda:1. Default: a GPU if there is one.")
@click.option(
    "--dtype", default="auto", show_default=True, help="The model's dtype: float32, bfloat16, or the weights'."
)
@click.option("--tokens", default=2048, show_default=True, help="The longest prefix to measure.")
@click.option("--chunk-tokens", default=256, show_default=True, help="Grid of the prefill.")
@click.option("--runs", default=7, show_default=True, help="Runs of everything; medians count.")
@click.option("--cxl-node", type=click.IntRange(0), help="Also measure a CXL tier on this NUMA node.")
@click.option("--emulate", multiple=True, help='A rate limit in GB/s, for a what-if: "nvme=0.5". May be repeated.')
@json_option
def calibrate(
    model: Path | None,
    out: Path,
    directory: Path,
    device: str | None,
    dtype: str,
    tokens: int,
    chunk_tokens: int,
    runs: int,
    cxl_node: int | None,
    emulate: tuple[str, ...],
    as_json: bool,
) -> None:
    """Measure this machine with the model in the directory MODEL (default: the demo's): its tiers, its prefill, a hit.

    The result is a TOML file that kvtier.kappa.Measured.from_toml reads. Nearly all of the time goes into passes of the
    model, in rounds: each says what is left. Keep the machine idle meanwhile.
    """
    needs_torch()
    from kvtier.kappa.calibrate import calibrate as measure

    def say(line: str) -> None:
        click.echo(line, err=True)

    begun = monotonic()
    limits = dict(_limit(text) for text in emulate)
    net = _net(model or models.fetch(directory, say), dtype, device)
    found = measure(
        net,
        directory,
        tokens=tokens,
        chunk=chunk_tokens,
        runs=runs,
        cxl_node=cxl_node,
        emulate_gbs=limits,
        say=lambda line: say(f"{monotonic() - begun:6.1f} s  {line}"),
    )
    write(out, found.to_toml())
    if as_json:
        emit(record(found))
        return
    console.print(pairs(_rows(found)))


def record(found: Measured) -> dict[str, Any]:
    """What a measurement says, as one flat record."""
    return {
        "machine": found.machine,
        "model": found.model.name,
        "date": found.date,
        "emulated": found.emulated,
        "flops_per_s": found.flops_per_s,
        "peak_flops_per_s": found.peak_flops_per_s,
        "mfu": found.mfu,
        "spread": found.flops_spread,
        "memory_bytes_per_s": found.memory_bytes_per_s,
        "copy_bytes_per_s": found.copy_bytes_per_s,
        "hit_s": found.hit_s,
        "tiers": [vars(tier) for tier in found.tiers],
    }


def _net(directory: Path, dtype: str, device: str | None) -> Any:
    import torch

    return models.load_net(directory, dtype).to(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _limit(text: str) -> tuple[str, float]:
    tier, _, rate = text.partition("=")
    try:
        return tier, float(rate)
    except ValueError:
        raise ConfigError(f'--emulate {text} is not a limit; allowed is TIER=GB/s, such as "nvme=0.5"') from None


def _rows(found: Measured) -> list[tuple[str, str]]:
    rows = [("machine", found.machine), ("model", found.model.name)]
    if found.passes:
        k, t = found.passes.cached[-1], found.passes.chunk
        rows += [
            (f"a pass of {t} tokens", f"{time(found.passes.one(0, t))}; behind {k:,}: {time(found.passes.one(k, t))}"),
            ("a pass of one token", time(found.passes.one(0, 1))),
        ]
    share = "" if found.mfu is None else f", {found.mfu:.0%} of large matrix products (MFU)"
    rows += [("prefill", f"{found.flops_per_s / 1e12:.3g} TFLOP/s{share}, spread {found.flops_spread:.0%}")]
    if found.copy_bytes_per_s:
        rows += [("into the model's tensors", f"{size(found.copy_bytes_per_s)}/s")]
    for tier in found.tiers:
        written = "" if tier.write_bytes_per_s is None else f", written at {size(tier.write_bytes_per_s)}/s"
        limited = " [yellow]emulated[/]" if tier.emulated else ""
        rows += [
            (
                tier.kind,
                f"read at {size(tier.read_bytes_per_s)}/s (spread {tier.spread:.0%}){written}, latency {time(tier.latency_s)}{limited}",
            )
        ]
    return [*rows, ("a hit", f"{time(found.hit_s)} besides")]
