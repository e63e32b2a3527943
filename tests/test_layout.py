"""`kvtier.layout`: sizes, ranges and shapes of blocks, and layouts read from model configurations."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError, UnsupportedError
from kvtier.layout import DTYPES, KVLayout, Segment, dtype_name

numbers = st.integers(1, 6)


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    layers, tokens = draw(numbers), draw(st.integers(1, 40))
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    if draw(st.booleans()):
        return KVLayout(layers, "mla", rank=draw(numbers), rope_dim=draw(numbers), dtype=dtype, block_tokens=tokens)
    per_layer = st.lists(numbers, min_size=layers, max_size=layers).map(tuple)
    heads, dim = draw(numbers | per_layer), draw(numbers | per_layer)
    return KVLayout(layers, "gqa", heads, dim, dtype=dtype, block_tokens=tokens)


def test_the_demo_model() -> None:
    layout = KVLayout(30, "gqa", kv_heads=3, head_dim=64, dtype="bf16", block_tokens=16)
    assert layout.bytes_per_token == 23_040
    assert layout.block_bytes == 368_640
    assert layout.segments == (Segment(2, 384),) * 30
    assert layout.shape() == (30, 2, 16, 3, 64)
    assert layout.shape(5) == (30, 2, 5, 3, 64)
    assert layout.byte_range(1, (2, 4)) == ((12_288 + 768, 12_288 + 1536), (12_288 + 6144 + 768, 12_288 + 6144 + 1536))


def test_latent_attention_has_one_plane() -> None:
    layout = KVLayout(61, "mla", rank=512, rope_dim=64, dtype="bf16", block_tokens=64)
    assert layout.bytes_per_token == 61 * 1152
    assert layout.segments[0] == Segment(1, 1152)
    assert layout.shape(3) == (61, 3, 576)
    assert layout.byte_range(60) == ((60 * 64 * 1152, 61 * 64 * 1152),)


def test_layers_may_differ() -> None:
    layout = KVLayout(3, "gqa", kv_heads=(8, 8, 2), head_dim=(64, 64, 128), dtype="fp16", block_tokens=4)
    assert layout.segments == (Segment(2, 1024), Segment(2, 1024), Segment(2, 512))
    assert layout.offsets == (0, 8192, 16384, 20480)
    assert not layout.uniform
    assert layout.shape() == (layout.block_bytes,)


def test_opaque_blocks_have_any_length() -> None:
    layout = KVLayout.opaque(block_tokens=32)
    assert (layout.segments, layout.block_bytes, layout.block_tokens) == ((), 0, 32)
    with pytest.raises(ConfigError, match="opaque"):
        layout.shape()


@given(layouts(), st.data())
def test_ranges_tile_the_block(layout: KVLayout, data: st.DataObject) -> None:
    pieces = [piece for layer in range(layout.layers) for piece in layout.byte_range(layer)]
    assert pieces[0][0] == 0
    assert pieces[-1][1] == layout.block_bytes == layout.offsets[-1]
    assert all(left[1] == right[0] for left, right in pairwise(pieces))
    cut = data.draw(st.integers(0, layout.block_tokens))
    layer = data.draw(st.integers(0, layout.layers - 1))
    whole = layout.byte_range(layer)
    parts = [layout.byte_range(layer, part) for part in ((0, cut), (cut, layout.block_tokens)) if part[0] < part[1]]
    for plane, (start, stop) in enumerate(whole):
        assert parts[0][plane][0] == start
        assert parts[-1][plane][1] == stop
        assert sum(part[plane][1] - part[plane][0] for part in parts) == stop - start


@given(layouts(), st.data())
def test_shape_and_ranges_agree(layout: KVLayout, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, layout.block_tokens))
    size = int(np.prod(layout.shape(tokens))) * (layout.itemsize if layout.uniform else 1)
    assert size == tokens * layout.bytes_per_token


@given(layouts(), layouts())
def test_fingerprints_are_equal_only_for_equal_layouts(a: KVLayout, b: KVLayout) -> None:
    same = (a.kind, a.segments, a.heads, a.rank, a.rope_dim, a.dtype, a.block_tokens)
    other = (b.kind, b.segments, b.heads, b.rank, b.rope_dim, b.dtype, b.block_tokens)
    assert (a.fingerprint() == b.fingerprint()) == (same == other)


def test_the_same_bytes_with_another_meaning_are_another_layout() -> None:
    prints = {
        KVLayout(2, "gqa", 4, 64, dtype="bf16").fingerprint(),
        KVLayout(2, "gqa", 4, 64, dtype="fp16").fingerprint(),
        KVLayout(2, "gqa", 2, 128, dtype="bf16").fingerprint(),
        KVLayout(2, "gqa", 4, 64, dtype="bf16", block_tokens=32).fingerprint(),
        KVLayout(2, "mla", rank=448, rope_dim=64, dtype="bf16").fingerprint(),
        KVLayout(2, "mla", rank=384, rope_dim=128, dtype="bf16").fingerprint(),
    }
    assert len(prints) == 6
    assert KVLayout(2, "gqa", (4, 4), 64).fingerprint() == KVLayout(2, "gqa", 4, 64).fingerprint()


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.bfloat16, "bf16"),
        (torch.float8_e4m3fn, "fp8_e4m3"),
        (torch.float8_e5m2, "fp8_e5m2"),
        ("torch.float16", "fp16"),
        ("bfloat16", "bf16"),
        (np.float32, "fp32"),
        (np.dtype("float16"), "fp16"),
        (np.int8, "int8"),
        ("fp8_e4m3", "fp8_e4m3"),
    ],
)
def test_dtypes_by_any_name(dtype: object, name: str) -> None:
    assert dtype_name(dtype) == name


@pytest.mark.parametrize("dtype", ["float64", np.complex64, torch.bool, "", float, None])
def test_unknown_dtypes_are_refused(dtype: object) -> None:
    with pytest.raises(ConfigError, match="allowed are"):
        dtype_name(dtype)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": 0, "kv_heads": 1, "head_dim": 8}, "layers=0"),
        ({"layers": 2, "kv_heads": 1}, "head_dim=0"),
        ({"layers": 2, "kv_heads": True, "head_dim": 8}, "kv_heads=True"),
        ({"layers": 2, "kv_heads": (1, 2, 3), "head_dim": 8}, "3 entries for 2 layers"),
        ({"layers": 2, "kv_heads": (1, 0), "head_dim": 8}, "kv_heads=0"),
        ({"layers": 2, "kv_heads": 1, "head_dim": 8, "rank": 4}, "rank=4"),
        ({"layers": 2, "kind": "mla", "rank": 4, "rope_dim": 4, "kv_heads": 1}, "kv_heads=1"),
        ({"layers": (2,), "kv_heads": 1, "head_dim": 8}, "layers"),
        ({"layers": 2, "kind": "mamba"}, "allowed are gqa, mla, opaque"),
        ({"kind": "opaque", "layers": 3}, "layers=3"),
        ({"layers": 2, "kv_heads": 1, "head_dim": 8, "block_tokens": 0}, "block_tokens=0"),
        ({"layers": 100, "kv_heads": 128, "head_dim": 128, "block_tokens": 1024}, "at most 268435456"),
    ],
)
def test_impossible_layouts_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVLayout(**fields)


@pytest.mark.parametrize("layer", [-1, 2])
def test_a_layer_outside_is_refused(layer: int) -> None:
    with pytest.raises(ConfigError, match="2 layers"):
        KVLayout(2, "gqa", 1, 8).byte_range(layer)


@pytest.mark.parametrize("tokens", [(0, 17), (3, 3), (-1, 4), (5, 2)])
def test_tokens_outside_are_refused(tokens: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="<= 16"):
        KVLayout(2, "gqa", 1, 8).byte_range(0, tokens)


@pytest.mark.parametrize("tokens", [0, 17])
def test_a_block_of_too_few_or_many_tokens_is_refused(tokens: int) -> None:
    with pytest.raises(ConfigError, match="1 to 16"):
        KVLayout(2, "gqa", 1, 8).shape(tokens)


def test_from_a_llama() -> None:
    config = transformers.LlamaConfig(
        num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, hidden_size=576, dtype="float32"
    )
    assert KVLayout.from_config(config) == KVLayout(30, "gqa", 3, 64, dtype="fp32")
    assert KVLayout.from_config(config, dtype=torch.bfloat16, block_tokens=64) == KVLayout(
        30, "gqa", 3, 64, dtype="bf16", block_tokens=64
    )
    assert KVLayout.from_config(config.to_dict()) == KVLayout.from_config(config)


def test_from_a_deepseek() -> None:
    config = transformers.DeepseekV3Config(dtype="bfloat16")
    assert KVLayout.from_config(config) == KVLayout(61, "mla", rank=512, rope_dim=64, dtype="bf16")


def test_from_a_config_without_grouping_or_head_size() -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "torch_dtype": "float16"}
    assert KVLayout.from_config(config) == KVLayout(2, "gqa", 4, 16, dtype="fp16")
    gpt2 = {"n_layer": 2, "n_head": 4, "n_embd": 64, "dtype": "float32"}
    assert KVLayout.from_config(gpt2) == KVLayout(2, "gqa", 4, 16, dtype="fp32")


def test_from_a_multimodal_config() -> None:
    text = {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32, "dtype": "bfloat16"}
    assert KVLayout.from_config({"text_config": text}) == KVLayout(2, "gqa", 4, 32)


def test_from_a_config_whose_global_layers_are_wider() -> None:
    config = {
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "global_head_dim": 64,
        "num_global_key_value_heads": 2,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "dtype": "bfloat16",
    }
    assert KVLayout.from_config(config) == KVLayout(3, "gqa", (4, 4, 2), (32, 32, 64))


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("num_hidden_layers", "num_hidden_layers"),
        ("num_attention_heads", "num_attention_heads"),
        ("hidden_size", "hidden_size"),
        ("dtype", "dtype"),
    ],
)
def test_a_missing_field_is_named(missing: str, named: str) -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "dtype": "float16"}
    del config[missing]
    with pytest.raises(ConfigError, match=named):
        KVLayout.from_config(config)


def test_a_missing_rotary_size_is_named() -> None:
    with pytest.raises(ConfigError, match="qk_rope_head_dim"):
        KVLayout.from_config({"num_hidden_layers": 2, "kv_lora_rank": 8, "dtype": "bfloat16"})


@pytest.mark.parametrize(
    "fields",
    [
        {"layer_types": ["full_attention", "linear_attention"]},
        {"num_kv_shared_layers": 1},
        {"v_head_dim": 8},
    ],
)
def test_what_has_no_layout_is_refused(fields: dict[str, Any]) -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "dtype": "float16"}
    with pytest.raises(UnsupportedError):
        KVLayout.from_config(config | fields)
