"""``kvtier check`` and ``kvtier stats``: what an NVMe tier's directory holds, read without opening a store on it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from kvtier import _kvtier
from kvtier.cli.output import console, emit, json_option, size

__all__ = ["check", "stats"]

_directory = click.argument("directory", type=click.Path(path_type=Path))


@click.command()
@_directory
@click.option("--repair", is_flag=True, help="Drop what is damaged, so that the rest is clean.")
@json_option
@click.pass_context
def check(ctx: click.Context, directory: Path, repair: bool, as_json: bool) -> None:
    """Verify every block of the NVMe tier in DIRECTORY.

    Exit code 0: clean. 1: damaged, and the damage is named (with --repair: it was, and is gone now). 2: unusable.
    """
    report = dict(_kvtier.check_dir(str(directory), repair))
    damaged = report.pop("damaged")
    if as_json:
        emit({**report, "damaged": damaged, "repaired": repair and bool(damaged)})
    else:
        console.print(f"{report['blocks']} blocks, {size(report['bytes'])}")
        for name in ("corrupt", "quarantined", "orphaned"):
            console.print(f"{name}: {report[name]}")
        for what in damaged:
            console.print(what, markup=False)
        if not damaged:
            console.print("clean")
        elif repair:
            console.print("repaired: the damaged blocks are dropped and will be misses")
        else:
            console.print("damaged: `kvtier check --repair` drops these blocks; reading them is a miss in any case")
    ctx.exit(1 if damaged else 0)


@click.command()
@_directory
@json_option
def stats(directory: Path, as_json: bool) -> None:
    """Show what the NVMe tier in DIRECTORY holds, from its journal; the blocks are not read."""
    report = _kvtier.inspect_dir(str(directory))
    if as_json:
        emit(report)
        return
    table = Table(show_header=False, box=None)
    for name, value in _flat(report):
        shown = f"{value} ({size(value)})" if "bytes" in name and isinstance(value, int) else str(value)
        table.add_row(name, shown)
    console.print(table)


def _flat(report: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in report.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{name}.")
        else:
            rows.append((prefix + name, value))
    return rows
