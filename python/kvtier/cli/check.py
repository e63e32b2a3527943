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
@click.argument("directories", metavar="DIRECTORY...", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--repair", is_flag=True, help="Drop what is damaged and what follows it.")
@json_option
@click.pass_context
def check(ctx: click.Context, directories: tuple[Path, ...], repair: bool, as_json: bool) -> None:
    r"""Verify every block of an NVMe tier. DIRECTORY: all its paths, since a block's parent may lie on another one.

    \b
    corrupt:     blocks whose bytes do not match their checksum; a read of one is a miss
    orphaned:    blocks whose parent, the block before them in their prompt, is on none
                 of the paths given, so that no prompt reaches them
    quarantined: room on the drive that failed once, and is not used again

    --repair drops corrupt blocks, and all that follow them in their prompts.

    Exit code 0: clean. 1: damaged, and the damage is named (with --repair: it was, and is gone now). 2: unusable.
    """
    reports = _kvtier.check_dirs([*directories], repair)
    for directory, report in zip(directories, reports, strict=True):
        if as_json:
            emit({"path": str(directory), **report, "repaired": repair and bool(report["damaged"])})
        else:
            _show(directory, report, repair)
    ctx.exit(1 if any(report["damaged"] for report in reports) else 0)


def _show(directory: Path, report: Mapping[str, Any], repair: bool) -> None:
    console.print(f"{directory}: {report['blocks']} blocks, {size(report['bytes'])}", markup=False)
    for name in ("corrupt", "quarantined", "orphaned"):
        console.print(f"{name}: {report[name]}")
    for what in report["damaged"]:
        console.print(what, markup=False)
    if not report["damaged"]:
        console.print("clean")
    elif repair:
        console.print(f"repaired: {report['dropped']} blocks are dropped, the corrupt ones and all that follow them")
    else:
        console.print("damaged: `kvtier check --repair` drops these blocks; reading them is a miss in any case")


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
