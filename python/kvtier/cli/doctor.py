"""``kvtier doctor``: whether a deployment is set up as the cost model assumes."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from kvtier import machine
from kvtier.cli.findings import Finding, show
from kvtier.cli.options import directory_option
from kvtier.cli.output import json_option, size
from kvtier.errors import ConfigError, KvtierError
from kvtier.kappa import LinkSpec, Measured, ModelSpec, kv_bytes
from kvtier.kappa.catalog import catalog
from kvtier.layout import dtype_name
from kvtier.rates import drive_rate
from kvtier.scratch import home
from kvtier.tiers import cuda as gpu

__all__ = ["doctor"]

_LINK_SHARE = 0.75  # pinned copies reach 50 to 57 of 64 GB/s on an H100
_DRIVE_SHARE = 0.75
_VRAM_SHARE = 0.9  # the rest is activations, workspaces and fragments
_READ = 256 << 20
_NEEDS = {"bf16": (8, 0), "fp16": (5, 3), "fp32": (0, 0), "fp8_e4m3": (8, 9), "fp8_e5m2": (8, 9), "int8": (6, 1)}
"""The CUDA compute capability from which a GPU computes with a dtype (NVIDIA, CUDA C++ programming guide)."""


@click.command()
@click.argument("model", required=False)
@click.option("--kv", default="bf16", show_default=True, help="The KV dtype: bf16, fp8, int8.")
@click.option("--context", default=8192, show_default=True, help="Tokens of one request, cached, new and generated.")
@click.option("--batch", default=8, show_default=True, help="Requests on the GPU at the same time.")
@click.option("--gpus", default=1, show_default=True, help="Tensor-parallel GPUs.")
@click.option("--weight-bytes", default=2.0, show_default=True, help="Bytes of one parameter.")
@click.option("--hw", "hardware", help="The GPU, from the catalog; default: the one that is here.")
@click.option("--measured", type=click.Path(path_type=Path, dir_okay=False), help="A file of `kvtier kappa calibrate`.")
@click.option("--link", help='What the drive should deliver, from the catalog or a rate: "6.5GB/s".')
@directory_option(
    "A directory on the drive of the NVMe tier (default: here); what is written there is removed again.", Path()
)
@json_option
@click.pass_context
def doctor(
    ctx: click.Context,
    model: str | None,
    kv: str,
    context: int,
    batch: int,
    gpus: int,
    weight_bytes: float,
    hardware: str | None,
    measured: Path | None,
    link: str | None,
    directory: Path,
    as_json: bool,
) -> None:
    """Check a deployment of MODEL (a name in the catalog, or a directory): links, KV dtype, batch size, counters.

    Ends with exit code 1 where something is not as it should be.
    """
    if min(context, batch, gpus) < 1:
        raise ConfigError(f"--context {context}, --batch {batch} and --gpus {gpus} are not allowed; each is at least 1")
    cuda = _Cuda.here()
    findings = [
        *_links(cuda, directory, measured, link),
        _hbm(),
        _kv_dtype(dtype_name(kv), cuda, hardware),
        _batch(model, kv, context, batch, gpus, weight_bytes, cuda, hardware),
        _counters(cuda),
    ]
    show(findings, as_json)
    ctx.exit(1 if any(finding.ok is False for finding in findings) else 0)


class _Cuda:
    """The first GPU that torch can use."""

    def __init__(self) -> None:
        import torch

        self.name = torch.cuda.get_device_name(0)
        self.capability = torch.cuda.get_device_capability(0)
        self.free, self.memory = torch.cuda.mem_get_info(0)

    @classmethod
    def here(cls) -> _Cuda | None:
        """It, or None where there is none, or no torch."""
        try:
            import torch
        except ImportError:
            return None
        return cls() if torch.cuda.is_available() else None

    def rates(self) -> tuple[float, float]:
        """Bytes/s of pinned copies to the GPU and back, the best of five each, by CUDA events."""
        import torch

        host = torch.empty(_READ, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(_READ, dtype=torch.uint8, device="cuda")

        def rate(into: Any, source: Any) -> float:
            times = []
            for _ in range(5):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                into.copy_(source, non_blocking=True)
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) / 1e3)
            return float(_READ / min(times))

        return rate(there, host), rate(host, there)


def _links(cuda: _Cuda | None, directory: Path, measured: Path | None, nominal: str | None) -> Iterator[Finding]:
    links = machine.pci_links()
    for link in links:
        slow = link.now < 0.99 * link.best
        idle = "; an idle GPU lowers its link, look again under load" if link.kind == "gpu" else ""
        yield Finding(
            f"{link.kind} link",
            {"address": link.address, "now_bytes_per_s": link.now, "best_bytes_per_s": link.best},
            not slow,
            f"{link.address} runs at {size(link.now)}/s one way, of {size(link.best)}/s",
            f"it may sit in a slot with fewer lanes, behind a switch, or be badly seated{idle}" if slow else "",
        )
    if cuda is None:
        names = machine.gpus()
        yield Finding(
            "link to the GPU",
            None,
            None,
            f"not measured: torch cannot use {', '.join(names)}"
            if names
            else "no GPU here, so there is none to measure",
            "pip install a torch with CUDA" if names else "",
        )
    else:
        best = max((link.best for link in links if link.kind == "gpu"), default=None)
        up, down = cuda.rates()
        yield _delivers(f"link to {cuda.name}", up, best, _LINK_SHARE, f", {size(down)}/s back (pinned copies)")
    best = max((link.best for link in links if link.kind == "nvme"), default=None)
    if nominal is not None:
        best = LinkSpec.named(nominal).read
    yield _delivers("drive", _drive(directory), best, _DRIVE_SHARE, f" from {directory} (O_DIRECT, 16 MiB in flight)")
    for tier in Measured.from_toml(measured).tiers if measured else ():
        mark = ", emulated" if tier.emulated else ""
        limit = best if tier.kind == "nvme" else None
        yield _delivers(f"tier {tier.kind}", tier.read_bytes_per_s, limit, _DRIVE_SHARE, f" as the store saw it{mark}")


def _delivers(name: str, rate: float, nominal: float | None, least: float, how: str) -> Finding:
    """A rate beside the nominal one, where that is known."""
    value = {"bytes_per_s": rate, "nominal_bytes_per_s": nominal}
    if nominal is None:
        return Finding(name, value, None, f"{size(rate)}/s{how}; its nominal rate is not known here")
    good = rate >= least * nominal
    return Finding(
        name,
        value,
        good,
        f"{size(rate)}/s{how}, {rate / nominal:.0%} of the nominal {size(nominal)}/s",
        "" if good else f"at least {least:.0%} is usual: look for other load, a slow slot, or an IOMMU in between",
    )


def _drive(directory: Path) -> float:
    """Bytes/s of large reads past the page cache."""
    if shutil.disk_usage(home(directory)).free < 2 * _READ:
        raise KvtierError(f"{directory} has less than {2 * _READ >> 20} MiB free: give another --dir")
    return drive_rate(directory, _READ, 16, 3)


def _hbm() -> Finding:
    """Where an ``Hbm`` tier would lie. It is nobody's duty to have one, so there is nothing to judge."""
    missing = gpu.missing()
    if missing is None:
        return Finding("an Hbm tier", "cuda", None, "on the GPU")
    return Finding(
        "an Hbm tier",
        "host",
        None,
        f"in memory of the process: {missing}",
        'Hbm(..., backend="cuda") refuses to open like this',
    )


def _kv_dtype(dtype: str, cuda: _Cuda | None, hardware: str | None) -> Finding:
    name = "KV dtype"
    if cuda is not None:
        needed = _NEEDS.get(dtype, (0, 0))
        good = cuda.capability >= needed
        have = ".".join(map(str, cuda.capability))
        advice = "" if good else f"it needs {'.'.join(map(str, needed))}: keep the KV in bf16 or int8"
        return Finding(name, dtype, good, f"{dtype} on {cuda.name}, compute capability {have}", advice)
    if hardware is not None:
        return Finding(name, dtype, None, f"{dtype}; ask again on the machine with the {hardware}")
    flags = machine.cpu_flags()
    native = {"bf16": {"avx512_bf16", "amx_bf16"}, "int8": {"avx512_vnni", "avx_vnni", "amx_int8"}}.get(dtype)
    if dtype == "fp32" or (native and flags & native):
        return Finding(name, dtype, True, f"{dtype} is native on this CPU (no GPU here)")
    return Finding(
        name,
        dtype,
        False,
        f"{dtype} is not native on this CPU (no GPU here): it is converted for every pass",
        "fp32 KV is faster to compute with here, and twice to four times as large to load",
    )


def _batch(
    model: str | None,
    kv: str,
    context: int,
    batch: int,
    gpus: int,
    weight_bytes: float,
    cuda: _Cuda | None,
    hardware: str | None,
) -> Finding:
    name = "batch size"
    if model is None:
        return Finding(name, None, None, "not checked: give a MODEL, and its --context and --batch")
    if hardware is not None:
        spec = catalog().hardware(hardware)
        memory, where = spec.hbm_bytes, spec.name
    elif cuda is not None:
        memory, where = float(cuda.memory), cuda.name
    else:
        return Finding(name, None, None, "not checked: no GPU here; give --hw for one of the catalog")
    if memory is None:
        raise ConfigError(f"{where} has no hbm_bytes in the catalog: add it")
    found = ModelSpec.find(model).with_kv(kv)
    weights = found.n_total * weight_bytes
    request = float(kv_bytes(found, context))
    fits = max(0, math.floor((_VRAM_SHARE * memory * gpus - weights) / request))
    value = {
        "batch": batch,
        "fits": fits,
        "weight_bytes": weights,
        "request_bytes": request,
        "memory_bytes": memory * gpus,
    }
    whose = f"{gpus} x {where}" if gpus > 1 else where
    return Finding(
        name,
        value,
        batch <= fits,
        f"{batch} requests of {context:,} tokens ({size(request)} each) beside {size(weights)} of weights on {whose}: {fits} fit "
        f"into {_VRAM_SHARE:.0%} of {size(memory * gpus)}",
        ""
        if batch <= fits
        else "fewer requests at a time, a smaller KV dtype, or more GPUs; else KV is evicted in the middle of a batch",
    )


def _counters(cuda: _Cuda | None) -> Finding:
    """Which counters to watch."""
    watch = {
        "nvidia-smi dmon -s put": "power, utilisation, and PCIe throughput: rxpci is the load, txpci the write-back",
        "NVML nvmlDeviceGetPcieThroughput": "the same, from a program",
        "DCGM 1004 and 1005": "tensor cores and memory active: which of products and streaming binds",
        "DCGM 1009 and 1010": "PCIe bytes out of and into the GPU",
        "iostat -x 1": "the drive's read rate and queue",
        "Store.stats()": "hits, loads and their latencies, a tier",
    }
    if cuda is None:
        watch = {name: what for name, what in watch.items() if name in ("iostat -x 1", "Store.stats()")}
        shown = "no GPU here, so no NVML and no nvidia-smi dmon"
    else:
        here = shutil.which("nvidia-smi") is not None
        shown = "nvidia-smi is here" if here else "nvidia-smi is not installed: install it to watch the GPU"
    advice = "; ".join(f"{name}: {what}" for name, what in watch.items())
    return Finding(
        "counters to watch", watch, None if cuda is None else shutil.which("nvidia-smi") is not None, shown, advice
    )
