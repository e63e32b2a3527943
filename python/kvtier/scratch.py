"""Folders that are gone with the command that made them. What a killed one (SIGKILL) leaves, the next one removes."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from kvtier.errors import ConfigError

__all__ = ["DEFAULT", "home", "scratch"]

DEFAULT = Path.home() / ".cache" / "kvtier"
"""Where the commands work unless told otherwise."""


class _Lock:
    """A directory that is locked until this is closed, or the process ends."""

    def __init__(self, directory: Path, flags: int) -> None:
        self._fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._fd, flags)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._fd)


def home(directory: Path) -> Path:
    """Make the last part of ``directory``, and see whether it takes files. Returns it.

    Raises:
        ConfigError: where its parent is missing (a drive that is not mounted, say), or it takes no files.
    """
    try:
        directory.mkdir(parents=directory == DEFAULT, exist_ok=True)
    except FileNotFoundError:
        raise ConfigError(
            f"{directory} cannot be made, because {directory.parent} is not there: mount its drive, or make that first"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be made ({error.strerror}): give a directory that takes files"
        ) from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"{directory} takes no files from this user: give a directory that does")
    return directory


@contextmanager
def scratch(directory: Path, prefix: str) -> Iterator[Path]:
    """A new folder in ``directory`` (see :func:`home`), removed at the end, with those that a killed process left.

    Raises:
        ConfigError: as :func:`home`, or where the drive takes no more.
    """
    home(directory)
    try:
        with closing(_Lock(directory, fcntl.LOCK_EX)):  # nobody sees a new folder before it is locked
            _sweep(directory, prefix)
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=directory))
            lock = _Lock(folder, fcntl.LOCK_SH)
    except OSError as error:
        raise ConfigError(f"{directory} takes no files ({error.strerror}): give a directory that does") from error
    with closing(lock):
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _sweep(directory: Path, prefix: str) -> None:
    for left in directory.glob(f"{prefix}*"):
        # Those that are locked belong to a process that runs.
        with suppress(OSError), closing(_Lock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)):
            shutil.rmtree(left)
