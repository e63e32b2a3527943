"""What a codec and a drive do on this machine, and whether a tier gains by being compressed."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvtier import _kvtier
from kvtier.config import Nvme
from kvtier.errors import KvtierError
from kvtier.scratch import scratch

__all__ = ["Choice", "CodecRates", "choose", "codec_of", "codec_rates", "drive_rate"]

_LOOK = 32 << 20
"""Bytes that a quick look at a drive reads."""

_DIMS = (2, 16, 8, 128)
"""A layer of 16 tokens of a model with 8 KV heads of 128: 64 KiB in bf16."""

_LAYERS = 128
"""Of these, 8 MiB, a codec's rates are taken."""


@dataclass(frozen=True)
class CodecRates:
    """What a codec does here on one thread, in GB/s (1e9 bytes) of the blocks as they are."""

    codec: str
    saved: float
    """The share of the bytes; of normal numbers in bf16, real keys and values save about as much."""
    encode_gbs: float
    decode_gbs: float


@dataclass(frozen=True)
class Choice:
    """Whether a tier is compressed."""

    codec: str | None
    """The codec, or ``None`` for blocks as they are."""
    why: str


def choose(rates: CodecRates, tier_gbs: float) -> Choice:
    """The rule: a tier that reads faster than one thread decodes is not compressed, as decoding would hold reads up.

    Args:
        rates: of the codec.
        tier_gbs: what the tier reads, in GB/s.
    """
    slower = tier_gbs < rates.decode_gbs
    text = f"{rates.codec} decodes {rates.decode_gbs:.2g} GB/s on one core and saves {rates.saved:.0%}, the tier reads {tier_gbs:.2g} GB/s"
    return Choice(rates.codec if slower else None, text)


@functools.cache
def codec_rates(codec: str) -> CodecRates:
    """A codec's rates on normal numbers in bf16: measured once a process, in well under a second."""
    bench = _kvtier.CodecBench(codec, "bf16", _DIMS)
    numbers = np.random.default_rng(1).normal(size=_LAYERS * int(np.prod(_DIMS))).astype(np.float32)
    source = (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    target = np.empty_like(source)
    coded = np.ones(_LAYERS * bench.room, np.uint8)
    encode_s = decode_s = 0.0
    sizes: list[int] = []
    for _ in ("warm", "measured"):
        encode_s, sizes = bench.encode(source, coded)
        decode_s = bench.decode(coded, sizes, target)
    size = source.nbytes
    return CodecRates(codec, 1 - sum(sizes) / size, size / encode_s / 1e9, size / decode_s / 1e9)


def drive_rate(directory: Path, size: int = _LOOK, depth: int = 4, laps: int = 1) -> float:
    """Bytes/s of reads of 1 MiB past the page cache, the best of some laps over a file that is removed again. Blocks.

    Args:
        directory: on the drive, see :func:`kvtier.scratch.scratch`.
        size: of the file, in bytes.
        depth: reads in flight.
        laps: how often it is read.

    Raises:
        ConfigError: for a directory that takes no files.
        StorageError: where the drive fails, or has no room for it.
    """
    with scratch(directory, "kvtier-drive-") as folder:
        disk = _kvtier.BareDisk(folder / "bare", size)
        return size / min(disk.run(False, 1 << 20, depth, 0, size >> 20, False)[0] for _ in range(laps))


def codec_of(tier: Nvme) -> Choice:
    """The codec that ``codec="auto"`` of this tier means here.

    The tier's rate is its ``emulate_gbs`` where that is given, else that of all its paths together, from a quick look at
    each. Blocks for as long as that takes. A tier that cannot be tried, such as a block device, is not compressed.
    """
    try:
        rate = tier.emulate_gbs or _rate_of(tier.paths)
    except (KvtierError, OSError) as error:
        return Choice(None, f"the tier's rate is unknown, as it cannot be tried: {error}")
    return choose(codec_rates("zstd"), rate)


def _rate_of(paths: Iterable[Path]) -> float:
    return sum(drive_rate(path) for path in paths) / 1e9
