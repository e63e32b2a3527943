"""``kvtier bench``: the store's speed beside the machine's own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from kvtier import _kvtier
from kvtier.bench import FULL, QUICK, Row, codec_suite, store_suite
from kvtier.cli import model as models
from kvtier.cli.options import NewFile, directory_option
from kvtier.cli.output import console, emit, json_option, time, write
from kvtier.errors import ConfigError
from kvtier.scratch import home

__all__ = ["bench"]

_SUITES = ("store", "codecs", "prefill")


@click.command()
@click.option("--suite", type=click.Choice(_SUITES), default="store", show_default=True, help="What to measure.")
@click.option("--quick", is_flag=True, help="Smaller data, fewer samples: the store took 2 min 11 s beside other work.")
@directory_option(
    "A directory on the drive to measure; what is written there is removed again. The demo's model is kept there."
)
@click.option(
    "--chart",
    "svg",
    type=NewFile(),
    help="Write the sweep of the prefill suite there, as SVG.",
)
@json_option
def bench(suite: str, quick: bool, directory: Path, svg: Path | None, as_json: bool) -> None:
    """Measure the store beside this machine's own speed, in the same run.

    The ratio is value / bound, the median over alternating samples of both: at least 1 is as fast as the machine, for
    rates and shares; for times, CPU and sizes, at most 1 is as good as the bound or the aim.
    """
    if svg is not None and suite != "prefill":
        raise ConfigError(f"--chart draws the sweep of the prefill suite, not of {suite}: give --suite prefill with it")
    rows = []
    plan = QUICK if quick else FULL
    quiet = as_json or not sys.stderr.isatty()

    def say(what: str) -> None:
        if not quiet:
            click.echo(f"measuring {what}", err=True)

    if suite == "codecs":
        measured = codec_suite(plan, say)
    elif suite == "prefill":
        measured = _prefill(quick, directory, svg, say)
    else:
        measured = store_suite(plan, directory, say)
    for row in measured:
        if as_json:
            emit(asdict(row))
        rows.append(row)
    if not as_json:
        console.print(_table(rows))
        console.print(
            f"copies: {_kvtier.copy_kernel()}; GB/s are 1e9 bytes a second; ratio = value / bound", style="dim"
        )


def _prefill(quick: bool, directory: Path, svg: Path | None, say: Callable[[str], None]) -> Iterator[Row]:
    from kvtier.cli.demo import needs_torch

    needs_torch()
    from kvtier.bench.prefill import FULL_SWEEP, QUICK_SWEEP, Point, prefill_suite, sweep_chart

    home(directory)
    model, _ = models.load(models.fetch(directory, say))
    sweep = QUICK_SWEEP if quick else FULL_SWEEP
    points: list[Point] = []
    yield from prefill_suite(model, sweep, say, points)
    if svg is not None:
        title = f"TTFT of SmolLM2-135M on this CPU, fp32, K = {sweep.cached:,}, T = {sweep.new}"
        write(svg, sweep_chart(points, title))


def _table(rows: list[Row]) -> Group:
    """The figures, in 80 columns; what they are of stands below, by number."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in ("", "value", "bound", "ratio", "spread", "of"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    notes: dict[str, int] = {}
    for row in rows:
        share = None if row.spread is None else f"{row.spread:.0%}"
        ratio = None if row.ratio is None else f"{row.ratio:.2f}"
        of = "; ".join(text for text in (row.bound_name, row.note) if text)
        mark = str(notes.setdefault(of, len(notes) + 1)) if of else ""
        table.add_row(row.name, _figure(row.value, row.unit), _figure(row.bound, row.unit), ratio, share, mark)
    legend = Table(box=None, show_header=False, padding=(0, 1, 0, 0), style="dim")
    for text, number in notes.items():
        legend.add_row(str(number), escape(text))
    return Group(table, "", legend)


def _figure(value: float | None, unit: str) -> str | None:
    """``12.3 GB/s``, ``0.45 ms``: a figure for people."""
    if value is None:
        return None
    match unit:
        case "s":
            return time(value)
        case "1":
            return f"{value:.3f}"
    return f"{value:.3g} {unit}"
