"""The codecs by hand: equal to a reference, within their bounds, and as good on real KV as is said."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import reference
from kvtier import KVLayout, codecs
from kvtier.errors import ConfigError, CorruptError, InvalidBlockError

SHARED = Path(os.environ.get("KVTIER_SHARED") or Path(__file__).parents[2] / "shared")
SAMPLE = SHARED / "data" / "kv_sample_L30x2x3x128x64_bf16.zst"
HEADER = 32
LOSSY = sorted(codecs.LOSSY)
Array = NDArray[Any]


def same(a: Array, b: Array) -> bool:
    """Bit for bit, but for the sign of a zero."""
    bits = f"u{a.itemsize}"
    return bool(np.all((a.view(bits) == b.view(bits)) | ((a == 0) & (b == 0))))


def exact(a: Array, b: Array) -> bool:
    return a.tobytes() == b.tobytes()


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    """[planes, tokens, heads, dim] of numbers of many kinds."""
    planes, heads = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    tokens, dim = draw(st.integers(1, 40)), draw(st.sampled_from([1, 2, 7, 16, 31, 32, 33, 64, 65, 100, 128]))
    dtype = draw(st.sampled_from(sorted(reference.DTYPES)))
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    x = random.normal(size=(planes, tokens, heads, dim)) * 2.0 ** draw(st.integers(-26, 8))
    kind = draw(st.sampled_from(["plain", "equal", "zero", "positive", "outliers", "denormal", "sparse"]))
    match kind:
        case "equal":
            x[:] = x.flat[0]
        case "zero":
            x[:] = 0
        case "positive":
            x = np.abs(x) + 3 * np.abs(x).max()
        case "outliers":
            x[..., dim // 2] *= 150
        case "denormal":
            x *= 2.0**-120 if dtype != "fp16" else 2.0**-18
        case "sparse":
            x[random.random(x.shape) < 0.9] = 0
    return x.astype(reference.DTYPES[dtype])


@st.composite
def parts(draw: st.DrawFn, tokens: int) -> tuple[int, int]:
    start = draw(st.integers(0, tokens))
    return start, draw(st.integers(start, tokens))


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_lossy_codecs_equal_the_reference_and_their_bounds_hold(data: st.DataObject) -> None:
    array, codec = data.draw(arrays()), data.draw(st.sampled_from(LOSSY))
    frames = codecs.encode(codec, array)
    back = codecs.decode(frames)[0]
    frame = codecs.frames(frames)[0]
    if frame.method in ("plain", "planes"):
        assert exact(back, array)
        # Only what has too few tokens or channels to be worth it.
        assert min(array.shape[1], array.shape[3]) < 8 or np.abs(array.astype(np.float32)).max() > 60000
    else:
        assert same(back, reference.lossy(codec, array))
        assert np.all(np.abs(back.astype(np.float64) - array.astype(np.float64)) <= bound(codec, array))
    start, stop = data.draw(parts(array.shape[1]))
    assert exact(codecs.decode(frames, tokens=(start, stop))[0], back[:, start:stop])


def bound(codec: str, array: Array) -> NDArray[np.float64]:
    """What the docstring of kvtier.codecs promises, from the array alone."""
    x = array.astype(np.float64)
    relative, least = {"bfloat16": (2**-8, 0), "float16": (2**-11, 2**-25), "float32": (2**-24, 0)}[array.dtype.name]
    loss = np.empty_like(x)
    for p, plane in enumerate(x):
        if codec.startswith("fp8"):
            e4m3 = codec.startswith("fp8_e4m3")
            largest, rel, small = (448, 2**-4, 2**-10) if e4m3 else (57344, 2**-3, 2**-17)
            s = 1.001 * np.abs(plane).max(-1, keepdims=True) / largest + 2**-23
            loss[p] = np.maximum(rel * np.abs(plane), small * s) * 1.0001
        elif len(x) == 2 and p == 0 and not codec.startswith("int8_token"):
            group, n = (16, 255) if codec.startswith("int8") else (32, 15)
            for at in range(0, len(plane), group):
                part = plane[at : at + group]
                low = part.min(0, keepdims=True)
                s = 1.001 * (part.max(0, keepdims=True) - low + 2**-10 * np.abs(low)) / n + 2**-23
                loss[p, at : at + group] = 0.5002 * s
        else:
            width, n = (plane.shape[-1], 255) if codec.startswith("int8") else (32, 15)
            for at in range(0, plane.shape[-1], width):
                part = plane[..., at : at + width]
                span = np.maximum(part.max(-1, keepdims=True), 0) - np.minimum(part.min(-1, keepdims=True), 0)
                loss[p, ..., at : at + width] = 0.5002 * (1.07 * span / n + 2**-19)
    return loss + relative * (np.abs(x) + loss) + least


@settings(max_examples=100, deadline=None)
@given(arrays())
def test_zstd_brings_every_bit_back(array: Array) -> None:
    frames = codecs.encode("zstd", array)
    assert exact(codecs.decode(frames)[0], array)
    assert len(frames) <= array.nbytes + HEADER


@pytest.mark.parametrize("codec", codecs.NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", sorted(reference.DTYPES))
def test_what_is_not_finite_comes_back_bit_for_bit(codec: str, bad: float, dtype: str) -> None:
    array = np.random.default_rng(1).normal(size=(2, 16, 2, 64)).astype(reference.DTYPES[dtype])
    array[1, 15, 1, 63] = bad
    frames = codecs.encode(codec, np.stack([array, np.zeros_like(array)]))
    assert exact(codecs.decode(frames)[0], array)
    assert codecs.frames(frames)[0].method in ("plain", "planes")
    assert codecs.frames(frames)[1].method not in ("plain",)


@pytest.mark.parametrize(("name", "kind", "largest"), [
    ("fp8_e4m3", ml_dtypes.float8_e4m3fn, 448),
    ("fp8_e5m2", ml_dtypes.float8_e5m2, 57344),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_fp8_equals_ml_dtypes_and_saturates(name: str, kind: type, largest: float, dtype: str) -> None:
    x = np.arange(1 << 16, dtype=np.uint16).view(reference.DTYPES[dtype])
    value = x.astype(np.float32)
    got = codecs.to_fp8(x, name)
    inside = np.abs(value) <= largest
    assert np.array_equal(got[inside], x[inside].astype(kind).view(np.uint8))
    beyond = ~inside & ~np.isnan(value)
    assert np.array_equal(codecs.from_fp8(got, name)[beyond], np.copysign(largest, value[beyond]))
    assert np.isnan(codecs.from_fp8(got, name)[np.isnan(value)]).all()
    every = np.arange(256, dtype=np.uint8)
    assert np.array_equal(codecs.from_fp8(every, name), every.view(kind).astype(np.float32), equal_nan=True)


LAYOUTS = [
    KVLayout(3, "gqa", 2, 64, dtype="bf16"),
    KVLayout(2, "gqa", (1, 3), (128, 40), dtype="fp16", block_tokens=8),
    KVLayout(2, "mla", rank=512, rope_dim=64, dtype="bf16"),
    KVLayout(2, "mla", rank=40, rope_dim=7, dtype="fp32"),
    KVLayout(2, "gqa", 2, 32, dtype="fp8_e4m3"),
]


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(LAYOUTS), st.sampled_from(codecs.NAMES), st.data())
def test_layouts_and_their_layers_and_tokens(layout: KVLayout, codec: str, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, layout.block_tokens))
    random = np.random.default_rng(tokens)
    kind = reference.DTYPES.get(layout.dtype)
    count = tokens * layout.bytes_per_token // layout.itemsize
    block = random.normal(size=count).astype(kind) if kind else random.integers(0, 9, count, np.uint8)
    frames = codecs.encode(codec, block, layout=layout)
    found = codecs.frames(frames)
    assert [frame.dims for frame in found] == list(codecs.segment_dims(layout, tokens))
    back = np.empty(block.nbytes, np.uint8)
    codecs.decode(frames, out=back)
    at = 0
    for i, frame in enumerate(found):
        size = int(np.prod(frame.dims)) * layout.itemsize
        segment = block.view(np.uint8)[at : at + size]
        if codec in codecs.LOSSY and frame.method not in ("plain", "planes"):
            assert kind is not None
            want = reference.lossy(codec, segment.view(kind).reshape(frame.dims))
            assert same(back[at : at + size].view(kind), want.reshape(-1))
        else:
            assert exact(back[at : at + size], segment)
        alone = codecs.decode(frames, layers=(i, i + 1))
        assert alone.tobytes() == back[at : at + size].tobytes()
        assert codecs.decode(frames[frame.offset : frame.offset + frame.size]).tobytes() == alone.tobytes()
        at += size
    assert codecs.decode(frames, layers=(1, 1)).size == 0


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(codecs.NAMES), st.data())
def test_altered_and_cut_frames_are_errors(codec: str, data: st.DataObject) -> None:
    array = np.random.default_rng(2).normal(size=(2, 2, 5, 2, 32)).astype(np.float16)
    frames = bytearray(codecs.encode(codec, array))
    out = np.empty_like(array)
    at = data.draw(st.integers(0, len(frames) - 1))
    frames[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises((CorruptError, InvalidBlockError)):
        codecs.decode(frames, out=out)
    cut = codecs.encode(codec, array)[: data.draw(st.integers(1, len(frames) - 1))]
    with pytest.raises((CorruptError, InvalidBlockError)):
        codecs.decode(cut, out=out)


def test_equal_layers_go_to_the_threads_together(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    code = codecs._kvtier.codec_encode

    def watch(codec: str, dtype: str, dims: Any, data: Any, threads: int) -> bytes:
        sizes.append(len(data))
        return code(codec, dtype, dims, data, threads)

    monkeypatch.setattr(codecs._kvtier, "codec_encode", watch)
    layout = KVLayout(layers=6, kv_heads=2, head_dim=16, dtype="bf16")
    codecs.encode("int8", bytes(layout.block_bytes), layout=layout, threads=2)
    assert sizes == [layout.block_bytes]


def test_torch_and_threads() -> None:
    tensor = torch.randn(24, 2, 64, 4, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    for codec in codecs.NAMES:
        frames = codecs.encode(codec, tensor)
        assert codecs.encode(codec, tensor, threads=3) == frames
        out, other = torch.empty_like(tensor), torch.empty_like(tensor)
        assert codecs.decode(frames, out=out) is out
        codecs.decode(frames, out=other, threads=4)
        assert torch.equal(out, other)
        assert torch.equal(out, tensor) or codec in codecs.LOSSY


def test_what_is_wrong_is_said() -> None:
    array = np.zeros((2, 16, 2, 8), np.float16)
    with pytest.raises(ConfigError, match=r"gzip.*allowed are zstd"):
        codecs.encode("gzip", array)
    with pytest.raises(InvalidBlockError, match="shape"):
        codecs.encode("int8", array[0, 0])
    with pytest.raises(InvalidBlockError, match="layout"):
        codecs.encode("int8", array.tobytes())
    with pytest.raises(InvalidBlockError, match="block of this layout"):
        codecs.encode("int8", array.tobytes(), layout=LAYOUTS[0])
    frames = codecs.encode("int8", array)
    with pytest.raises(InvalidBlockError, match="layers"):
        codecs.decode(frames, layers=(0, 2))
    with pytest.raises(InvalidBlockError, match="tokens"):
        codecs.decode(frames, tokens=(3, 17))
    for out in (None, np.empty(64, np.uint8)):
        for part in ((-1, 1), (0, 1, 2), (0.5, 1), (2, 1)):
            for what in ("layers", "tokens"):
                with pytest.raises(InvalidBlockError, match=what):
                    codecs.decode(frames, out=out, **{what: part})
    with pytest.raises(InvalidBlockError, match="another size"):
        codecs.decode(frames, out=np.empty(5, np.uint8))


@pytest.fixture(scope="module")
def sample() -> Array:
    """[layers, blocks, 2, tokens, heads, dim], blocks of 16 tokens."""
    if not SAMPLE.exists():
        pytest.skip(f"{SAMPLE} is not there")
    raw = zstandard.ZstdDecompressor().decompress(SAMPLE.read_bytes())
    kv = np.frombuffer(raw, ml_dtypes.bfloat16).reshape(30, 2, 3, 8, 16, 64)
    return np.ascontiguousarray(kv.transpose(0, 3, 1, 4, 2, 5))


# What must be saved of the bytes, headers and scales counted, and the largest relative L2 error of keys and values.
AIMS = {
    "zstd": (0.29, 0.0, 0.0),
    "int8": (0.42, 0.0025, 0.0065),
    "int8_token": (0.48, 0.0085, 0.0065),
    "fp8_e4m3": (0.48, 0.022, 0.025),
    "int4": (0.66, 0.035, 0.09),
}


@pytest.mark.parametrize("codec", AIMS)
def test_real_keys_and_values(sample: Array, codec: str) -> None:
    saved, keys, values = AIMS[codec]
    blocks = sample.reshape(-1, *sample.shape[2:])
    frames = codecs.encode(codec, blocks)
    assert 1 - len(frames) / blocks.nbytes >= saved
    x, y = blocks.astype(np.float32), codecs.decode(frames).astype(np.float32)
    for plane, aim in ((0, keys), (1, values)):
        error = np.linalg.norm(x[:, plane] - y[:, plane]) / np.linalg.norm(x[:, plane])
        assert error <= aim
    if codec in ("int8_token", "int4"):
        assert len(codecs.encode(f"{codec}+zstd", blocks)) <= 0.95 * len(frames)


def test_the_body_is_a_standard_frame_over_byte_planes(sample: Array) -> None:
    segment = sample[5, 3]
    frames = codecs.encode("zstd", segment)
    planes = zstandard.ZstdDecompressor().decompress(frames[HEADER:])
    want = segment.view(np.uint8).reshape(2, -1, 2).transpose(0, 2, 1)
    assert planes == np.ascontiguousarray(want).tobytes()
    assert zstandard.get_frame_parameters(frames[HEADER:]).content_size == segment.nbytes
