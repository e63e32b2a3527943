"""What a command found out about the machine, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rich.padding import Padding

from kvtier.cli.output import console, emit

__all__ = ["Finding", "show"]


@dataclass(frozen=True)
class Finding:
    """One thing. ``ok`` is None where there is nothing to judge."""

    name: str
    value: Any
    ok: bool | None
    shown: str
    advice: str = ""


def show(findings: Iterable[Finding], as_json: bool) -> None:
    """Print findings, for people or as JSON Lines."""
    for finding in findings:
        if as_json:
            emit({key: value for key, value in asdict(finding).items() if key != "shown"})
            continue
        mark = "[green]✓[/]" if finding.ok else "[yellow]-[/]"
        console.print(f"{mark} {finding.name}: {finding.shown}")
        if finding.advice:
            console.print(Padding(finding.advice, (0, 0, 0, 4)), style="dim")
