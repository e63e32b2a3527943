"""``kvtier info``: what this machine offers, and what to do about what is missing."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import click

from kvtier import _kvtier, machine
from kvtier.cli.findings import Finding, show
from kvtier.cli.output import json_option, size
from kvtier.config import default_dram
from kvtier.errors import KvtierError
from kvtier.rates import choose, codec_rates, drive_rate
from kvtier.tiers import cuda

__all__ = ["info"]


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False), default=Path())
@json_option
def info(directory: Path, as_json: bool) -> None:
    """Show what this machine offers to a store whose NVMe tier would be in DIRECTORY (default: here)."""
    findings = [*_disk(directory), *_memory(), _gpu(), *_codecs(directory)]
    show(findings, as_json)


def _disk(directory: Path) -> list[Finding]:
    probe = _kvtier.probe(str(directory))
    uring, direct = bool(probe["io_uring"]), bool(probe["o_direct"])
    free = os.statvfs(directory)
    free_bytes = free.f_bavail * free.f_frsize
    return [
        Finding(
            "io_uring",
            uring,
            uring,
            "yes" if uring else f"no: {probe['io_uring_reason']}",
            ""
            if uring
            else "the slower thread engine is used. A container's seccomp profile often forbids io_uring: "
            "allow io_uring_setup, io_uring_enter and io_uring_register, or set sysctl kernel.io_uring_disabled=0",
        ),
        Finding(
            "O_DIRECT",
            probe["o_direct_alignment"] if direct else None,
            direct,
            f"yes, aligned to {probe['o_direct_alignment']} bytes" if direct else f"no: {probe['o_direct_reason']}",
            ""
            if direct
            else "put the NVMe tier on ext4 or XFS on a local drive, not on a network or overlay file system",
        ),
        Finding("free disk space", free_bytes, True, size(free_bytes)),
    ]


def _memory() -> list[Finding]:
    pages = machine.huge_pages()
    thp = pages.transparent in ("always", "madvise")
    memlock = machine.memlock_bytes()
    enough = memlock is None or memlock >= 1 << 30
    nodes = machine.numa_nodes()
    far = [node for node in nodes if not node.has_cpus]
    return [
        Finding(
            "transparent huge pages",
            pages.transparent,
            thp,
            pages.transparent,
            ""
            if thp
            else "they double the speed of disk reads: "
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root)",
        ),
        Finding(
            "reserved huge pages of 2 MiB",
            pages.reserved,
            True,
            f"{pages.reserved}, {pages.free} free",
            "" if pages.reserved else 'needed only for Dram(huge_pages="hugetlb"): sysctl vm.nr_hugepages=N',
        ),
        Finding(
            "memlock limit",
            memlock,
            enough,
            "unlimited" if memlock is None else size(memlock),
            ""
            if enough
            else "I/O buffers beyond it are not registered, which costs some CPU: ulimit -l unlimited, or "
            "LimitMEMLOCK=infinity in the service",
        ),
        Finding(
            "memory of a plain Store()",
            default_dram(),
            True,
            f"{size(default_dram())} of {size(machine.usable_memory())} usable",
        ),
        Finding(
            "NUMA nodes",
            [asdict(node) for node in nodes],
            True,
            ", ".join(f"{n.number}: {size(n.memory_bytes)}{'' if n.has_cpus else ' without CPUs'}" for n in nodes)
            or "none shown",
            f"CXL memory, it seems: Cxl(size, numa_node={far[0].number})" if far else "",
        ),
    ]


def _gpu() -> Finding:
    names, missing = machine.gpus(), cuda.missing()
    return Finding(
        "GPU",
        names,
        missing is None,
        ", ".join(names) or "none",
        "" if missing is None else f"not needed; an Hbm tier is memory of this process here: {missing}",
    )


def _codecs(directory: Path) -> list[Finding]:
    """Which codec each tier would use here, from a quick look at the drive and the codecs."""
    findings = [Finding("codec of memory tiers", None, True, "none: they are faster than any codec")]
    try:
        rate = drive_rate(directory) / 1e9
    except (KvtierError, OSError) as error:
        return [*findings, Finding("codec of an nvme tier", None, None, f"unknown, the drive cannot be tried: {error}")]
    for codec, what in (
        ("zstd", 'an nvme tier with codec="auto"'),
        ("int8", "an nvme tier, where a namespace asks for it"),
    ):
        choice = choose(codec_rates(codec), rate)
        findings.append(
            Finding(
                f"codec of {what}",
                choice.codec,
                True,
                f"{choice.codec or 'none'}: {choice.why}",
                ""
                if choice.codec
                else f"{codec} would slow reads here, but makes room for {1 / (1 - codec_rates(codec).saved):.2g} times the blocks",
            )
        )
    return findings
