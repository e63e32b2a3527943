"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from kvtier.scratch import DEFAULT

__all__ = ["cache_option", "directory_option"]

_Command = TypeVar("_Command", bound=Callable[..., object])

cache_option = click.option(
    "--cache",
    type=click.Path(path_type=Path),
    default=DEFAULT,
    show_default=True,
    help="Keeps the demo model and, while it runs, the store: put it on a real drive.",
)


def directory_option(text: str, default: Path = DEFAULT) -> Callable[[_Command], _Command]:
    """``--dir``, a place on the drive to measure; the parameter is ``directory``.

    Args:
        text: the help.
        default: where nothing is given.
    """
    return click.option(
        "--dir",
        "directory",
        type=click.Path(path_type=Path, file_okay=False),
        default=default,
        show_default=default == DEFAULT,
        help=text,
    )
