"""Measures a machine: how fast a store's tiers deliver, how fast a model computes there, and what a hit costs."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from kvtier import machine
from kvtier.errors import ConfigError
from kvtier.kappa.cost import flops, weight_bytes
from kvtier.kappa.measured import Measured, MeasuredTier
from kvtier.kappa.model import ModelSpec
from kvtier.kappa.passes import Passes
from kvtier.scratch import scratch

if TYPE_CHECKING:
    from kvtier.kappa.rig import Rig, RigTier

__all__ = ["calibrate", "measure"]


def calibrate(
    model: Any,
    directory: Path,
    *,
    tokens: int = 2048,
    chunk: int = 256,
    runs: int = 7,
    cxl_node: int | None = None,
    emulate_gbs: Mapping[str, float] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Measured:
    """Measure this machine with a model.

    Args:
        model: a loaded Hugging Face causal language model, on a CPU or a CUDA GPU.
        directory: on the drive of the NVMe tier. A few times the KV of ``tokens`` tokens are written there, and removed.
        tokens: the longest prefix to measure, a multiple of ``chunk``, at least two of them. Default 2048.
        chunk: tokens of one pass of the prefill. Default 256.
        runs: of everything, interleaved; medians count. Default 7, at least 1.
        cxl_node: also measure a CXL tier on this NUMA node; a node of plain memory works too. Default none.
        emulate_gbs: rate limits in GB/s by tier (``"dram"``, ``"cxl"``, ``"nvme"``), for what-if runs; the tier is then marked.
        say: told of each step, and of each round of passes, before it starts.

    Returns:
        What was measured. Blocks for about a minute with a model of 135M parameters on two CPU cores.

    Raises:
        ConfigError: for a model whose architecture is not known, or bad numbers.
    """
    from kvtier.kappa.rig import Rig

    if runs < 1:
        raise ConfigError(f"runs={runs} is not allowed; it must be at least 1")
    if tokens < 2 * chunk:
        raise ConfigError(f"tokens={tokens} is not allowed; it must be at least two chunks of {chunk}")
    allowed = ["dram", "nvme"] if cxl_node is None else ["dram", "cxl", "nvme"]
    if unknown := set(emulate_gbs or {}) - set(allowed):
        raise ConfigError(
            f"emulate_gbs has {', '.join(sorted(unknown))}; allowed are {', '.join(allowed)}; cxl goes with a cxl_node"
        )
    spec_of(model)  # refuses what is not known before anything is measured
    with scratch(directory, "calibrate-") as work:
        place = work / "kept"
        place.mkdir()
        say(f"computing the KV of {tokens} tokens")
        return measure(Rig(model, place, tokens, chunk=chunk, cxl_node=cxl_node), work, runs, emulate_gbs or {}, say)


def spec_of(model: Any) -> ModelSpec:
    """A loaded model's sizes, with its KV and its weights in the model's own dtype."""
    dtype = str(model.dtype).removeprefix("torch.")
    spec = ModelSpec.from_config(model.config)
    return replace(spec.with_kv(dtype), weight_bytes=float(model.dtype.itemsize))


def measure(rig: Rig, work: Path, runs: int, emulate_gbs: Mapping[str, float], say: Callable[[str], None]) -> Measured:
    """As :func:`calibrate`, with what was set up already; ``work`` is a directory to write in."""
    model = spec_of(rig.model)
    passes, pass_spread = _passes(rig, runs, say)
    copy = median([rig.copy(len(rig.keys)) for _ in range(runs)])
    size = rig.layout.block_bytes
    dram, hit_s = _dram(rig, runs, emulate_gbs.get("dram"), say)
    cxl = () if rig.cxl_node is None else (_cxl(rig, runs, emulate_gbs.get("cxl"), say),)
    nvme, first = _nvme(rig, work, runs, emulate_gbs.get("nvme"), say)
    nvme = replace(nvme, latency_s=max(0.0, first - hit_s - size / nvme.read_bytes_per_s))
    say("large matrix products")
    whole, one = passes.seconds[0][-1], passes.seconds[0][0]
    return Measured(
        model=model,
        flops_per_s=flops(model, 0, passes.chunk).total / whole,
        memory_bytes_per_s=weight_bytes(model, 1) / one,
        tiers=(dram, *cxl, nvme),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        hit_s=hit_s,
        copy_bytes_per_s=size * len(rig.keys) / copy,
        passes=passes,
        peak_flops_per_s=rig.peak(),
        flops_spread=pass_spread,
        machine=_machine(rig.model),
    )


def _passes(rig: Rig, runs: int, say: Callable[[str], None]) -> tuple[Passes, float]:
    """The table, and the spread of the longest pass behind nothing."""
    new = [length for length in (1, 2, 4, 8, 16, 32, 64, 128) if length < rig.chunk] + [rig.chunk]
    cached = sorted({0, rig.chunk, rig.tokens // 2 // rig.chunk * rig.chunk, rig.tokens})
    times: dict[tuple[int, int], list[float]] = {(k, t): [] for k in cached for t in new}
    say("passes of the prefill, a first round that does not count")
    once = sum(rig.compute(k, t) for k, t in times)  # with what torch does only once
    for turn in range(runs):
        say(f"passes of the prefill, round {turn + 1} of {runs}: about {once * (runs - turn):.0f} s to go")
        for (k, t), found in times.items():
            found.append(rig.compute(k, t))
    table = tuple(tuple(median(times[k, t]) for t in new) for k in cached)
    return Passes(tuple(cached), tuple(new), table), _spread(times[0, rig.chunk])


def _dram(rig: Rig, runs: int, gbs: float | None, say: Callable[[str], None]) -> tuple[MeasuredTier, float]:
    """The tier in memory, and the fixed seconds of a hit."""
    say("reads from memory")
    whole = rig.layout.block_bytes * len(rig.keys)
    with rig.holding("dram", gbs) as blocks:
        rig.fetch(blocks, rig.keys, "dram")
        reads = [rig.fetch(blocks, rig.keys, "dram") for _ in range(runs)]
        hits = [rig.hit(blocks) for _ in range(10 * runs)]
    say("writes to memory")
    writes = [rig.write("dram", Path()) for _ in range(runs)]
    return _tier("dram", whole, [whole / seconds for seconds in reads], writes, gbs), median(hits)


def _cxl(rig: Rig, runs: int, gbs: float | None, say: Callable[[str], None]) -> MeasuredTier:
    """The tier on a NUMA node; a write is a put that goes on through a small DRAM tier."""
    say(f"reads from NUMA node {rig.cxl_node}")
    with rig.holding("cxl", gbs) as blocks:
        rig.fetch(blocks, rig.keys, "cxl")
        reads = [rig.fetch(blocks, rig.keys, "cxl") for _ in range(runs)]
    say(f"writes to NUMA node {rig.cxl_node}")
    writes = [rig.write("cxl", Path()) for _ in range(runs)]
    whole = rig.layout.block_bytes * len(rig.keys)
    return _tier("cxl", whole, [whole / seconds for seconds in reads], writes, gbs)


def _nvme(rig: Rig, work: Path, runs: int, gbs: float | None, say: Callable[[str], None]) -> tuple[MeasuredTier, float]:
    """The tier on the drive, with as many blocks in flight as the store keeps, and the seconds of a first block alone."""
    say("reads from NVMe")
    rest = rig.layout.block_bytes * (len(rig.keys) - 1)
    firsts, rates = [], []
    for _ in range(runs):
        with rig.holding("nvme", gbs) as blocks:
            firsts.append(rig.fetch(blocks, rig.keys[:1], "nvme"))
            rates.append(rest / rig.fetch(blocks, rig.keys[1:], "nvme"))
    say("writes to NVMe")
    writes = []
    for _ in range(min(runs, 3)):
        place = work / "written"
        place.mkdir()
        writes.append(rig.write("nvme", place))
        shutil.rmtree(place)
    return _tier("nvme", rest + rig.layout.block_bytes, rates, writes, gbs), median(firsts)


def _tier(
    kind: RigTier, whole: int, rates: Sequence[float], writes: Sequence[float], gbs: float | None
) -> MeasuredTier:
    """A tier from the bytes/s of its reads, and the seconds of its writes of ``whole`` bytes."""
    written = whole / median(writes)
    return MeasuredTier(kind, median(rates), written, spread=_spread(rates), emulated=gbs is not None)


def _spread(values: Sequence[float]) -> float:
    """(highest - lowest) / median."""
    return (max(values) - min(values)) / median(values)


def _machine(model: Any) -> str:
    import torch

    if model.device.type == "cuda":
        return f"{torch.cuda.get_device_name(model.device)}, {model.dtype}"
    return f"{machine.cpu_name()}, {torch.get_num_threads()} threads, {str(model.dtype).removeprefix('torch.')}"
