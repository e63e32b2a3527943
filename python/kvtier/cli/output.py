"""What the commands print: tables for people, JSON Lines for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

__all__ = ["Failure", "console", "emit", "json_option", "pairs", "seconds", "size", "time", "write"]

console = Console(highlight=False)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON Lines: SI units, infinity as null.")


class Failure(click.ClickException):
    """An error that ends a command with exit code 2."""

    exit_code = 2


def emit(record: Mapping[str, Any]) -> None:
    """Print one record as a line of JSON; infinities and NaN become null."""
    click.echo(json.dumps(_finite(record), allow_nan=False))


def write(path: Path, text: str) -> None:
    """Write a file that was asked for, and say where it is; not on stdout, which may be JSON."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Failure(f"{path} cannot be written: {error.strerror}") from error
    click.echo(f"written to {path.absolute()}", err=True)


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
    return value


def size(count: float) -> str:
    """Bytes for people, in powers of 1000: ``1.5 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def seconds(count: float) -> str:
    """Seconds for people: ``12.3 s``, ``45 ms``."""
    return f"{count:.2f} s" if count >= 1 else f"{count * 1000:.0f} ms"


def time(count: float) -> str:
    """Seconds for people, three digits: ``1.23 s``, ``45.6 ms``, ``7.89 µs``."""
    if count >= 1 or count == 0:
        return f"{count:.3g} s"
    return f"{count * 1e3:.3g} ms" if count >= 1e-3 else f"{count * 1e6:.3g} µs"


def pairs(rows: Iterable[tuple[str, str]]) -> Table:
    """Names and what belongs to them, in two columns."""
    table = Table(show_header=False, box=None)
    for row in rows:
        table.add_row(*row)
    return table
