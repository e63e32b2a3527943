"""Options that several commands have."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kvtier.scratch import DEFAULT

__all__ = ["NewFile", "cache_option", "directory_option"]

_Command = TypeVar("_Command", bound=Callable[..., object])


class NewFile(click.Path):
    """A file to write at the end, refused at the start where its directory is missing or takes none."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False, writable=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not os.access(path.parent, os.W_OK | os.X_OK):
            self.fail(
                f"{path.parent} is not there, or takes no files: give a place in a directory that does", param, ctx
            )
        return path


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
