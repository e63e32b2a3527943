"""The lossy codecs in NumPy, written from docs/CODECS.md and not from the code."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]
DTYPES = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32}
F32 = np.float32

# Every positive half, and every one whose last five bits are zero.
_HALVES = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16).astype(F32)
_COARSE = np.arange(32, 0x7C00, 32, dtype=np.uint16).view(np.float16).astype(F32)
_ALL = np.concatenate([-_HALVES[::-1], [F32(0)], _HALVES])


def _above(x: Values, table: Values) -> Values:
    """The least of a table that is not below x."""
    return table[np.searchsorted(table, x)]


def _below(x: Values) -> Values:
    """The greatest half that is not above x."""
    return _ALL[np.searchsorted(_ALL, x, side="right") - 1]


def by_token(x: Values, n: int) -> Values:
    """Over the last axis: x ≈ scale · (number - zero)."""
    low = np.minimum(x.min(-1, keepdims=True), F32(0))
    high = np.maximum(x.max(-1, keepdims=True), F32(0))
    step = F32((n + 1) / 64)
    with np.errstate(divide="ignore", invalid="ignore"):
        ideal = np.where(high > low, -low * F32(n) / (high - low), F32(0)).astype(F32)
        code = np.where(ideal <= n / 2, np.ceil(ideal / step), np.floor(ideal / step))
        code = np.where(high > 0, np.minimum(code, 63 if n == 255 else 59), code).astype(F32)
        zero = code * step
        scale = np.maximum(
            np.where(high > 0, high / (F32(n) - zero), F32(0)),
            np.where((low < 0) & (code > 0), -low / zero, F32(0)),
        ).astype(F32)
    scale = _above(scale, _COARSE)
    number = np.rint(x * (F32(1) / scale) + zero)
    assert number.min() >= 0
    assert number.max() <= n
    return scale * (number - zero)


def by_channel(x: Values, n: int) -> Values:
    """Over the first axis: x ≈ scale · number + least."""
    least = _below(x.min(0, keepdims=True))
    scale = _above((x.max(0, keepdims=True) - least) / F32(n), _HALVES)
    number = np.rint((x - least) * (F32(1) / scale))
    assert number.min() >= 0
    assert number.max() <= n
    return number * scale + least


def fp8(x: Values, kind: type, largest: float) -> Values:
    """Over the last axis: x ≈ scale · float8(x / scale)."""
    scale = _above(np.abs(x).max(-1, keepdims=True) / F32(largest), _HALVES)
    number = np.clip(x * (F32(1) / scale), -F32(largest), F32(largest)).astype(kind)
    return number.astype(F32) * scale


def lossy(codec: str, array: NDArray[np.generic]) -> NDArray[np.generic]:
    """What an array ``[planes, tokens, heads, dim]`` comes back as."""
    x = array.astype(F32)
    out = np.empty_like(x)
    for p, plane in enumerate(x):
        keys = len(x) == 2 and p == 0
        if codec.startswith("fp8"):
            e4m3 = codec.startswith("fp8_e4m3")
            kind = (ml_dtypes.float8_e4m3fn, 448.0) if e4m3 else (ml_dtypes.float8_e5m2, 57344.0)
            out[p] = fp8(plane, *kind)
        elif codec.startswith("int8_token") or (codec.startswith("int8") and not keys):
            out[p] = by_token(plane, 255)
        elif keys:
            group, n = (16, 255) if codec.startswith("int8") else (32, 15)
            for at in range(0, len(plane), group):
                out[p, at : at + group] = by_channel(plane[at : at + group], n)
        else:
            for at in range(0, plane.shape[-1], 32):
                out[p, ..., at : at + 32] = by_token(plane[..., at : at + 32], 15)
    if array.dtype == np.float16:
        out = np.clip(out, F32(-65504), F32(65504))
    return out.astype(array.dtype)
