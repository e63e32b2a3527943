"""The ``kvtier`` command."""

from __future__ import annotations

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
    """Turns kvtier's own errors into one line and exit code 2."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KvtierError as error:
            raise Failure(str(error)) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvtier")
def main() -> None:
    """Keep the KV cache of LLM inference in DRAM, CXL memory and NVMe, and serve it back verified."""


for command in (demo, demo_restart, bench, info, doctor, check, stats, kappa, codec, replay):
    main.add_command(command)
