"""The ``kvtier`` command."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from signal import SIGHUP, SIGTERM

import click

from kvtier.cli.bench import bench
from kvtier.cli.check import check, stats
from kvtier.cli.codec import codec
from kvtier.cli.demo import demo, demo_restart
from kvtier.cli.doctor import doctor
from kvtier.cli.info import info
from kvtier.cli.kappa import kappa
from kvtier.cli.output import Failure
from kvtier.cli.replay import replay
from kvtier.errors import KvtierError

__all__ = ["main"]


class _Group(click.Group):
    """Turns kvtier's own errors into one line and exit code 2, and a signal to end into an orderly end."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            with _orderly():
                return super().invoke(ctx)
        except KvtierError as error:
            raise Failure(str(error)) from error


@contextmanager
def _orderly() -> Iterator[None]:
    """Meanwhile SIGTERM and SIGHUP end the process as an exception does, so that what it wrote for a while is removed."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)  # what a shell says of a process that the signal ended

    # Python has handlers in the main thread only; who ignores a signal (nohup) is left alone.
    here = threading.current_thread() is threading.main_thread()
    taken = [s for s in (SIGTERM, SIGHUP) if here and signal.getsignal(s) == signal.SIG_DFL]
    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvtier")
def main() -> None:
    """Keep the KV cache of LLM inference in DRAM, CXL memory and NVMe, and serve it back verified."""


for command in (demo, demo_restart, bench, info, doctor, check, stats, kappa, codec, replay):
    main.add_command(command)
