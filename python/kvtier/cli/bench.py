"""``kvtier bench``: the store's speed beside the machine's own."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import click
from rich.table import Table

from kvtier import _kvtier
from kvtier.bench import FULL, QUICK, Row, codec_suite, store_suite
from kvtier.cli.output import console, emit, json_option
from kvtier.errors import UnsupportedError
from kvtier.scratch import DEFAULT

__all__ = ["bench"]

_SUITES = ("store", "codecs", "prefill")


@click.command()
@click.option("--suite", type=click.Choice(_SUITES), default="store", show_default=True, help="What to measure.")
@click.option("--quick", is_flag=True, help="Smaller data and fewer samples: about a minute instead of many.")
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=DEFAULT,
    show_default=True,
    help="A directory on the drive to measure; what is written there is removed again.",
)
@json_option
def bench(suite: str, quick: bool, directory: Path, as_json: bool) -> None:
    """Measure the store beside this machine's own speed, in the same run.

    The ratio is value / bound, the median over alternating samples of both: at least 1 is as fast as the machine, for
    rates and shares; for times, CPU and sizes, at most 1 is as good as the bound or the aim.
    """
    if suite == "prefill":
        raise UnsupportedError(f"--suite {suite} is not in this version; allowed are store and codecs")
    rows = []
    plan = QUICK if quick else FULL
    quiet = as_json or not sys.stderr.isatty()

    def say(what: str) -> None:
        if not quiet:
            click.echo(f"measuring {what}", err=True)

    measured = codec_suite(plan, say) if suite == "codecs" else store_suite(plan, directory, say)
    for row in measured:
        if as_json:
            emit(asdict(row))
        rows.append(row)
    if not as_json:
        console.print(_table(rows))
        console.print(
            f"copies: {_kvtier.copy_kernel()}; GB/s are 1e9 bytes a second; ratio = value / bound", style="dim"
        )


def _table(rows: list[Row]) -> Table:
    table = Table(box=None)
    for name in ("", "value", "bound", "ratio", "spread"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    table.add_column("of what", style="dim")
    for row in rows:
        share = None if row.spread is None else f"{row.spread:.0%}"
        ratio = None if row.ratio is None else f"{row.ratio:.2f}"
        of = "; ".join(text for text in (row.bound_name, row.note) if text)
        table.add_row(row.name, _figure(row.value, row.unit), _figure(row.bound, row.unit), ratio, share, of)
    return table


def _figure(value: float | None, unit: str) -> str | None:
    """``12.3 GB/s``, ``0.45 ms``: a figure for people."""
    if value is None:
        return None
    match unit:
        case "s" if value < 1e-3:
            return f"{value * 1e6:.3g} µs"
        case "s" if value < 1:
            return f"{value * 1e3:.3g} ms"
        case "1":
            return f"{value:.3f}"
    return f"{value:.3g} {unit}"
