"""What the machine offers: memory limits, huge pages, NUMA nodes, GPUs. Read from ``/proc`` and ``/sys``, nothing is
changed.
"""

from __future__ import annotations

import platform
import resource
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "HugePageSupport",
    "NumaNode",
    "PciLink",
    "cpu_flags",
    "cpu_name",
    "gpus",
    "huge_pages",
    "memlock_bytes",
    "numa_nodes",
    "pci_links",
    "usable_memory",
]

# cgroup v1 says "no limit" with a number near 2**63.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class HugePageSupport:
    """What the kernel offers: the mode of transparent huge pages (``always``, ``madvise``, ``never`` or ``absent``),
    and the reserved pages of 2 MiB, all and free.
    """

    transparent: str
    reserved: int
    free: int


@dataclass(frozen=True)
class NumaNode:
    """A NUMA node: its number, its memory in bytes, and whether it has CPUs (CXL memory shows as a node without)."""

    number: int
    memory_bytes: int
    has_cpus: bool


@dataclass(frozen=True)
class PciLink:
    """The PCIe link of a GPU or an NVMe drive: ``kind`` is ``"gpu"`` or ``"nvme"``, ``address`` the device's on the bus,
    ``now`` and ``best`` the bytes/s one way (after line coding) at which it runs and at which the device could.
    """

    kind: str
    address: str
    now: float
    best: float


def usable_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may use: the least of what is available, its cgroup's limits (v1 and v2, all
    levels), and its own address-space limit. Does not block.

    Args:
        root: where ``proc`` and ``sys`` are found.
    """
    limits = [_available(root / "proc/meminfo"), *_cgroup_limits(root)]
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft = resource.getrlimit(kind)[0]
        if soft != resource.RLIM_INFINITY:
            limits.append(soft)
    return min(limits)


def _available(meminfo: Path) -> int:
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    text = fields.get("MemAvailable") or fields["MemTotal"]
    return int(text.split()[0]) * 1024


def _cgroup_limits(root: Path) -> list[int]:
    """The limits of this process's cgroups and of all their parents."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, file = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may lie outside of what is mounted; the mounted root then holds the container's limit.
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            text = _text(top.joinpath(*parts[:depth], file))
            if text.isdigit() and int(text) < _NO_LIMIT:
                limits.append(int(text))
    return limits


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def memlock_bytes() -> int | None:
    """Bytes of memory that this process may lock (its soft ``RLIMIT_MEMLOCK``); ``None`` for no limit."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def huge_pages(root: Path = Path("/")) -> HugePageSupport:
    """What the kernel offers in huge pages of 2 MiB. Does not block."""
    modes = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = next((word.strip("[]") for word in modes.split() if word.startswith("[")), "absent")
    reserved = root / "sys/kernel/mm/hugepages/hugepages-2048kB"
    return HugePageSupport(
        chosen, int(_text(reserved / "nr_hugepages") or 0), int(_text(reserved / "free_hugepages") or 0)
    )


def numa_nodes(root: Path = Path("/")) -> list[NumaNode]:
    """The NUMA nodes, by number; empty where the kernel shows none. Does not block."""
    nodes = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        words = _text(folder / "meminfo").split()
        total = int(words[words.index("MemTotal:") + 1]) * 1024 if "MemTotal:" in words else 0
        nodes.append(NumaNode(int(folder.name[4:]), total, bool(_text(folder / "cpulist"))))
    return sorted(nodes, key=lambda node: node.number)


def gpus(root: Path = Path("/")) -> list[str]:
    """The names of the NVIDIA GPUs whose driver is loaded. Does not block, and loads no CUDA."""
    names = []
    for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        fields = dict(line.split(":", 1) for line in _text(path).splitlines() if ":" in line)
        names.append(fields.get("Model", "unknown").strip())
    return names


def pci_links(root: Path = Path("/")) -> list[PciLink]:
    """The links of NVIDIA GPUs and NVMe drives, by address; what the kernel does not tell is left out. Does not block."""
    found = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        number = _text(device / "class")
        if number.startswith("0x03") and _text(device / "vendor") == "0x10de":
            kind = "gpu"
        elif number.startswith("0x0108"):
            kind = "nvme"
        else:
            continue
        now, best = (
            _pcie(_text(device / f"{which}_link_speed"), _text(device / f"{which}_link_width"))
            for which in ("current", "max")
        )
        if now and best:
            found.append(PciLink(kind, device.name, now, best))
    return found


def _pcie(speed: str, width: str) -> float:
    """Bytes/s one way of a link such as ``32.0 GT/s PCIe`` and ``16``; 0 for what is not one."""
    try:
        transfers, lanes = float(speed.split()[0]), int(width)
    except (IndexError, ValueError):
        return 0.0
    coding = 8 / 10 if transfers < 8 else 128 / 130 if transfers < 64 else 1.0
    return transfers * 1e9 * lanes * coding / 8


def cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """The features of the first CPU, as the kernel names them. Does not block."""
    return frozenset(_cpu(root, "flags", "Features").split())


def cpu_name(root: Path = Path("/")) -> str:
    """The first CPU as its maker calls it, or its architecture where the kernel does not say. Does not block."""
    return _cpu(root, "model name") or platform.machine() or "an unknown processor"


def _cpu(root: Path, *names: str) -> str:
    """The first field of ``/proc/cpuinfo`` that begins so."""
    lines = _text(root / "proc/cpuinfo").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(names)), "")
