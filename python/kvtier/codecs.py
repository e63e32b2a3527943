"""Codecs by hand: KV arrays to fewer bytes and back, without a store.

>>> from kvtier import codecs
>>> frames = codecs.encode("int8", kv)            # kv: [layers, 2, tokens, heads, dim]  # doctest: +SKIP
>>> back = codecs.decode(frames)                                                        # doctest: +SKIP

A *segment* is one layer, ``[keys, values][token][head][dim]``, and becomes one frame, which says all that is needed to
decode it. ``docs/CODECS.md`` has the format, what each codec saves and what it loses.

======================= ============================================================================================
``zstd``                byte planes and zstd; every bit comes back
``int8``                keys: 8 bits, a scale and a minimum for each channel of min(16, tokens) tokens; values: as below
``int8_token``          8 bits, a scale for each token and head
``fp8_e4m3 fp8_e5m2``   ``float8_e4m3fn`` or ``float8_e5m2``, a scale for each token and head
``int4``                keys: 4 bits, a scale and a minimum for each channel of min(32, tokens) tokens; values: 4 bits, a
                        scale for each token and 32 channels of a head
``…+zstd``              any of the lossy ones, and zstd over its result
======================= ============================================================================================

**What is lost.** With s the scale (a half) of a number x and u half a unit in the last place of the array's dtype at the
result (2⁻⁸ · |x| for bf16, 2⁻¹¹ · |x| + 2⁻²⁵ for fp16, 2⁻²⁴ · |x| for fp32), what comes back differs from x by at most

- ``int8``, ``int8_token``, ``int4``: 0.5002 · s + u. By token, s ≤ 1.07 · (max - min) / n + 2⁻¹⁹ where max and min are
  those of the group, or zero if that is beyond them; by channel, s ≤ 1.001 · (max - min + 2⁻¹⁰ · |min|) / n + 2⁻²³. n is
  255 for 8 bits, 15 for 4. Proof: x / s + zero, computed with an error below 2⁻¹³, is rounded to the next whole number, which is within 0 and n because s
  was rounded up; decoding is exact (by channel: rounded once) before it is rounded to the dtype.
- ``fp8_e4m3``: max(2⁻⁴ · |x|, 2⁻¹⁰ · s) · 1.0001 + u; ``fp8_e5m2``: max(2⁻³ · |x|, 2⁻¹⁷ · s) · 1.0001 + u. s ≤ 1.001 ·
  max|x| / 448 (57,344) + 2⁻²³. Proof: rounding to nearest of p bits of mantissa loses at most 2⁻ᵖ⁻¹ of a normal number,
  and half the least subnormal of a smaller one.

A segment with NaN, an infinity or a number too large for such a scale (above about 8 million by token, 65,504 by channel)
is not made lossy at all, and neither is one that a codec does not make smaller: :func:`frames` says so, and every bit of it
comes back. A negative zero may come back as a positive one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier import _kvtier, buffers
from kvtier.errors import ConfigError, InvalidBlockError
from kvtier.layout import DTYPES, KVLayout, Span, dtype_name, span_of

__all__ = [
    "LOSSY",
    "NAMES",
    "Frame",
    "check",
    "decode",
    "element",
    "encode",
    "frames",
    "from_fp8",
    "segment_dims",
    "to_fp8",
]

NAMES: tuple[str, ...] = tuple(name for name, _, _ in _kvtier.codec_list())
"""The names of all codecs."""

LOSSY: frozenset[str] = frozenset(name for name, _, lossy in _kvtier.codec_list() if lossy)
"""The names of those that lose something."""

_NUMPY = {"fp32": "float32", "fp16": "float16", "uint8": "uint8"}


class Frame(NamedTuple):
    """What a frame says of itself."""

    offset: int
    """Its first byte."""
    size: int
    """Its bytes, 32 of them a header."""
    method: str
    """``plain``, ``planes``, or the lossy codec that was used."""
    zstd: bool
    """Whether that was compressed: the bytes behind the header are a standard zstd frame."""
    dtype: str
    """``bf16``, ``fp16``, ``fp32`` or ``uint8``."""
    dims: tuple[int, int, int, int]
    """``(planes, tokens, heads, dim)``."""


def _dims(shape: Sequence[int]) -> tuple[int, int, int, int]:
    match tuple(shape):
        case (planes, tokens, heads, dim) | (_, planes, tokens, heads, dim):
            return planes, tokens, heads, dim
        case (_, tokens, width):
            return 1, tokens, 1, width
    raise InvalidBlockError(
        f"an array of shape {tuple(shape)} was given; allowed are [2, tokens, heads, dim], [layers, 2, tokens, heads, dim] "
        "and [layers, tokens, width]: reshape it, or give its layout"
    )


def segment_dims(layout: KVLayout, tokens: int) -> tuple[tuple[int, int, int, int], ...]:
    """``(planes, tokens, heads, dim)`` of each layer of a block, as codecs see it.

    A latent (``mla``) is one plane; rank and rope have scales of their own where their greatest common divisor allows.
    """
    if layout.kind == "mla":
        width = layout.rank + layout.rope_dim
        part = int(np.gcd(layout.rank, layout.rope_dim))
        part = part if part >= 32 else width
        return ((1, tokens, width // part, part),) * layout.layers
    if layout.kind == "opaque":
        return ((1, tokens, 1, 1),)
    return tuple((2, tokens, heads, dim) for heads, dim in layout.heads)


def check(codec: str | None, layout: KVLayout) -> None:
    """Raise ConfigError where a codec is not known, or lossy and the layout's elements are no bf16, fp16 or fp32."""
    if codec is not None and codec not in NAMES:
        raise ConfigError(f"codec={codec!r} is not known; allowed are {', '.join(NAMES)}, or None")
    if codec in LOSSY and element(layout.dtype) == "uint8":
        raise ConfigError(
            f'codec={codec!r} was given for elements of {layout.dtype}; lossy codecs take bf16, fp16 and fp32: use "zstd"'
        )


def encode(codec: str, array: Any, *, layout: KVLayout | None = None, threads: int = 1) -> bytes:
    """Code an array.

    Args:
        codec: one of :data:`NAMES`.
        array: C-contiguous ``[layers, 2, tokens, heads, dim]``, ``[2, tokens, heads, dim]`` or ``[layers, tokens, width]``
            of bf16, fp16 or fp32 (NumPy, ml_dtypes, torch on the CPU, DLPack); fp8, int8 and uint8 are only compressed.
            With ``layout``: a block of it, in any shape.
        layout: says what the bytes mean.
        threads: at most so many share the segments. The GIL is released.

    Returns:
        One frame a layer, one after another. Blocks while it computes.

    Raises:
        ConfigError: for an unknown codec or dtype.
        InvalidBlockError: for a shape or a size that is none of these.
    """
    if isinstance(array, bytes | bytearray | memoryview):
        data = memoryview(array)
    else:
        data = buffers.export(array, layout.dtype if layout else None, None, 0, False)
    if layout is not None and layout.kind == "opaque":
        view = memoryview(data).cast("B")
        return _kvtier.codec_encode(codec, "uint8", (1, 1, 1, view.nbytes), view, threads)
    if layout is None:
        name = dtype_name(_dtype_of(array))
        return _kvtier.codec_encode(codec, element(name), _dims(array.shape), data, threads)
    view = memoryview(data).cast("B")
    tokens, rest = divmod(view.nbytes, layout.bytes_per_token) if layout.bytes_per_token else (0, 1)
    if rest or not 1 <= tokens <= layout.block_tokens:
        raise InvalidBlockError(
            f"{view.nbytes} bytes were given; a block of this layout has {layout.block_bytes}, or those of fewer tokens. "
            "Check layout and dtype"
        )
    parts = []
    at = 0
    # Equal layers go together, so that threads can share them.
    for dims, layers in groupby(segment_dims(layout, tokens)):
        size = int(np.prod(dims)) * layout.itemsize * len(list(layers))
        parts.append(_kvtier.codec_encode(codec, element(layout.dtype), dims, view[at : at + size], threads))
        at += size
    return b"".join(parts)


def frames(data: Any) -> list[Frame]:
    """What each frame of the result of :func:`encode` says of itself. Nothing is verified.

    Raises:
        CorruptError: where the bytes are not whole frames.
    """
    return [Frame(*row) for row in _kvtier.codec_frames(data)]


def decode(
    data: Any,
    *,
    out: Any = None,
    layers: Span = None,
    tokens: Span = None,
    threads: int = 1,
) -> Any:
    """Decode frames.

    Args:
        data: what :func:`encode` returned, or some whole frames of it.
        out: C-contiguous memory of the right size to decode into; default: a new array.
        layers: ``(start, stop)`` or a range: only these frames. The others are not looked at.
        tokens: ``(start, stop)`` or a range: only these tokens of each. Without zstd the others are not decoded.
        threads: at most so many share the frames. The GIL is released.

    Returns:
        ``out``, or an array ``[layers, planes, tokens, heads, dim]`` (bytes where the layers differ). NumPy knows no
        bfloat16: that comes as ``ml_dtypes.bfloat16`` where that package is there, else as ``uint16``. Blocks while it
        computes.

    Raises:
        CorruptError: for a frame that was altered or cut.
        InvalidBlockError: for a range outside, or an ``out`` of another size.
    """
    found = frames(data)
    part = span_of("tokens", tokens)
    first, last = span_of("layers", layers) or (0, len(found))
    if not first <= last <= len(found):
        raise InvalidBlockError(
            f"layers ({first}, {last}) were asked for; there are {len(found)} frames, counted from 0"
        )
    shapes = []
    for frame in found[first:last]:
        planes, count, heads, dim = frame.dims
        start, stop = part or (0, count)
        if not start <= stop <= count:
            raise InvalidBlockError(f"tokens ({start}, {stop}) were asked for; a frame has {count}, counted from 0")
        shapes.append((frame.dtype, planes, stop - start, heads, dim))
    size = sum(DTYPES[dtype] * int(np.prod(dims)) for dtype, *dims in shapes)
    result = np.empty(size, np.uint8) if out is None else buffers.export(out, None, None, 0, True)
    _kvtier.codec_decode(data, (first, last), part, result, threads)
    if out is not None:
        return out
    if len(set(shapes)) != 1:
        return result
    dtype, *dims = shapes[0]
    return result.view(_numpy_dtype(dtype)).reshape(len(shapes), *dims)


def to_fp8(array: Any, dtype: str) -> NDArray[np.uint8]:
    """Cast to 8 bits without a scale: nearest, half to even; what is too large, infinity too, becomes the largest.

    Args:
        array: bf16, fp16 or fp32, of any shape.
        dtype: ``"fp8_e4m3"`` or ``"fp8_e5m2"``, or another name of one of them.

    Returns:
        ``uint8`` of the same shape: the bits of ``float8_e4m3fn`` or ``float8_e5m2``. NaN stays NaN.

    Raises:
        InvalidBlockError: for another dtype.
    """
    name = dtype_name(_dtype_of(array))
    if name not in ("bf16", "fp16", "fp32"):
        raise InvalidBlockError(f"an array of {name} was given; bf16, fp16 and fp32 can be cast to 8 bits")
    data = buffers.export(array, None, None, 0, False)
    return np.frombuffer(_kvtier.codec_to_fp8(_fp8(dtype), name, data), np.uint8).reshape(tuple(array.shape))


def from_fp8(bits: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    """The numbers that 8 bits stand for, exactly.

    Args:
        bits: ``uint8`` of any shape.
        dtype: as for :func:`to_fp8`.
    """
    data = np.ascontiguousarray(bits, np.uint8)
    return np.frombuffer(_kvtier.codec_from_fp8(_fp8(dtype), data), np.float32).reshape(data.shape)


def _fp8(dtype: str) -> str:
    name = dtype_name(dtype)
    if not name.startswith("fp8_"):
        raise InvalidBlockError(f"dtype={dtype!r} is not allowed; give fp8_e4m3 or fp8_e5m2")
    return name


def _dtype_of(array: Any) -> object:
    dtype = getattr(array, "dtype", None)
    if dtype is None:
        raise InvalidBlockError(f"a {type(array).__name__} was given, which has no dtype and shape: give its layout")
    return getattr(dtype, "name", dtype)


def element(dtype: str) -> str:
    """What a codec makes of a dtype: whole bytes are only compressed."""
    return dtype if DTYPES[dtype] > 1 else "uint8"


def _numpy_dtype(dtype: str) -> Any:
    if dtype != "bf16":
        return _NUMPY[dtype]
    try:
        import ml_dtypes
    except ImportError:
        return np.uint16
    return ml_dtypes.bfloat16
