"""How fast the codecs are beside ``memcpy`` and the zstd library, and what they save on real keys and values."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from kvtier import _kvtier, codecs
from kvtier.bench.figures import Pair, Row, alternate, compared
from kvtier.bench.memory import Bytes, huge_buffer
from kvtier.bench.plan import Plan

__all__ = ["SAMPLE_DIMS", "codec_suite", "kv_sample"]

_Dims = tuple[int, int, int, int]

_WIDE: _Dims = (2, 16, 8, 128)
"""A layer of 16 tokens of a model with 8 KV heads of 128: 64 KiB in bf16."""

SAMPLE_DIMS: _Dims = (2, 16, 3, 64)
"""A layer of 16 tokens of the sample's model."""

_BOUND = "libc memcpy of the same bytes, 1 thread, huge pages"
_NAMES = {"int8": "int8", "int8_token": "int8_token", "fp8": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2", "int4": "int4"}
_FILE = "kv_sample_L30x2x3x128x64_bf16.zst"
_SHAPE = (30, 2, 3, 128, 64)


def kv_sample() -> Bytes | None:
    """Real keys and values, ``uint8`` of ``[layer x block][k, v][16 tokens][3 heads][64]`` in bf16.

    ``None`` where ``$KVTIER_SHARED/data`` (default ``../shared/data``) does not have them.
    """
    path = Path(os.environ.get("KVTIER_SHARED") or "../shared") / "data" / _FILE
    if not path.exists():
        return None
    raw = _kvtier.codec_unzstd(path.read_bytes(), int(np.prod(_SHAPE)) * 2)
    layers, planes, heads, tokens, dim = _SHAPE
    kv = np.frombuffer(raw, np.uint16).reshape(layers, planes, heads, tokens // 16, 16, dim)
    return np.ascontiguousarray(kv.transpose(0, 3, 1, 4, 2, 5)).reshape(-1).view(np.uint8)


def _normal(size: int) -> Bytes:
    """Numbers in bf16 with the spread of a normal distribution."""
    numbers = np.random.default_rng(1).normal(size=1 << 20).astype(np.float32)
    return np.resize((numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8), size)


def codec_suite(plan: Plan, say: Callable[[str], None] = lambda _: None) -> Iterator[Row]:
    """The rows of the codec suite, as they are measured. Blocks for as long as that takes."""
    sample = kv_sample()
    wide = _Lap(plan, _WIDE, None, plan.region)
    for name, codec in _NAMES.items():
        say(name)
        yield from wide.rows(name, codec)
    say("planes")
    yield from wide.rows("planes", "planes")
    del wide
    say("zstd")
    narrow = _Lap(plan, SAMPLE_DIMS, sample, plan.region // 8)
    yield from narrow.zstd_rows()
    say("the KV sample")
    for codec in codecs.NAMES:
        yield _saved(codec, sample)


def _saved(codec: str, sample: Bytes | None) -> Row:
    name = f"saved_{codec.replace('+', '_')}"
    if sample is None:
        return Row(name, None, "1", note=f"not measured: set KVTIER_SHARED to the folder that has data/{_FILE}")
    frames = _kvtier.codec_encode(codec, "bf16", SAMPLE_DIMS, sample, 1)
    return Row(
        name,
        1 - len(frames) / sample.nbytes,
        "1",
        samples=1,
        note="real KV, blocks of 16 tokens, headers and scales counted",
    )


class _Lap:
    """Buffers of arrays of one shape, and one lap over them."""

    def __init__(self, plan: Plan, dims: _Dims, data: Bytes | None, region: int) -> None:
        self.plan, self.dims = plan, dims
        self.raw = int(np.prod(dims)) * 2
        count = max(1, region // self.raw)
        self.size = count * self.raw
        self.src, self.dst = huge_buffer(self.size), huge_buffer(self.size)
        self.src[:] = np.resize(_normal(self.size) if data is None else data, self.size)
        self.coded = huge_buffer(count * _kvtier.CodecBench("zstd", "bf16", dims).room)
        self.real = data is not None

    def memcpy(self) -> float:
        return self.size / _kvtier.bound_memcpy(self.dst, self.src, self.raw) / 1e9

    def note(self) -> str:
        data = "real KV" if self.real else "normal numbers"
        return f"{data} in bf16, a frame each [k, v]{list(self.dims[1:])} of {self.raw} bytes; {_kvtier.codec_kernel()}"

    def rows(self, name: str, codec: str) -> Iterator[Row]:
        bench = _kvtier.CodecBench(codec, "bf16", self.dims)
        _, sizes = bench.encode(self.src, self.coded)

        def encode() -> float:
            return self.size / bench.encode(self.src, self.coded)[0] / 1e9

        def decode() -> float:
            return self.size / bench.decode(self.coded, sizes, self.dst) / 1e9

        for verb, lap in (("encode", encode), ("decode", decode)):
            pairs = alternate(self.plan.pairs, self.memcpy, lap)
            yield compared(f"{name}_{verb}", "GB/s", pairs, _BOUND, self.note())

    def zstd_rows(self) -> Iterator[Row]:
        bench = _kvtier.CodecBench("zstd", "bf16", self.dims)
        pairs: dict[str, list[Pair]] = {"encode": [], "decode": []}
        for _ in range(self.plan.pairs):
            library = bench.library(self.src)
            took, sizes = bench.encode(self.src, self.coded)
            own = (took, bench.decode(self.coded, sizes, self.dst))
            for verb, theirs, mine in zip(pairs, library, own, strict=True):
                pairs[verb].append((self.size / theirs / 1e9, self.size / mine / 1e9))
        for verb, samples in pairs.items():
            bound = "the zstd library on the same planes, level 1, 1 thread"
            yield compared(f"zstd_planes_{verb}", "GB/s", samples, bound, self.note())
