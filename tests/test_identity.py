"""`kvtier.identity`: everything that changes the meaning of the bytes changes the identity.

One test for each bug of this kind that users of other stores reported.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from kvtier import canonical
from kvtier.errors import ConfigError
from kvtier.identity import Identity, digest_directory, digest_model
from kvtier.layout import KVLayout

LAYOUT = KVLayout(2, "gqa", 1, 8)
CONFIG = {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
BASE: dict[str, Any] = {
    "weights": b"w" * 32,
    "revision": "r1",
    "config": CONFIG,
    "kv_dtype": "bf16",
    "tp_rank": 0,
    "tp_size": 2,
    "pp_rank": 0,
    "pp_size": 2,
    "lora": b"adapter",
    "salt": b"tenant",
}


def differs(**changes: Any) -> bool:
    return Identity(**BASE).to_bytes(LAYOUT) != Identity(**(BASE | changes)).to_bytes(LAYOUT)


def test_the_same_is_the_same() -> None:
    shuffled = {key: CONFIG[key] for key in reversed(CONFIG)}
    assert not differs(config=shuffled)


def test_another_adapter_of_the_same_name_or_none() -> None:
    assert differs(lora=b"adapter, trained further")
    assert differs(lora=None)
    assert differs(lora=b"")


def test_another_kv_dtype() -> None:
    assert differs(kv_dtype="fp8_e4m3")
    assert differs(kv_dtype=None)


def test_other_weights_under_the_same_name() -> None:
    assert differs(weights=b"v" * 32)


def test_another_rope() -> None:
    assert differs(config={**CONFIG, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}})
    assert differs(config={**CONFIG, "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}})
    assert differs(config=None)


def test_another_revision_or_none() -> None:
    assert differs(revision="r2")
    assert differs(revision=None)
    assert differs(revision="")


def test_another_tenant() -> None:
    assert differs(salt=b"another tenant")
    assert differs(salt=None)
    assert differs(salt=b"")


def test_another_parallel_slice() -> None:
    seen = {
        Identity(**(BASE | {"tp_rank": tr, "tp_size": ts, "pp_rank": pr, "pp_size": ps})).to_bytes(LAYOUT)
        for tr, ts, pr, ps in [(0, 1, 0, 1), (0, 2, 0, 1), (1, 2, 0, 1), (0, 1, 0, 2), (0, 1, 1, 2), (0, 2, 0, 2)]
    }
    assert len(seen) == 6


def test_another_layout() -> None:
    identity = Identity(**BASE)
    assert identity.to_bytes(LAYOUT) != identity.to_bytes(KVLayout(2, "gqa", 1, 8, block_tokens=32))
    assert identity.to_bytes(LAYOUT) != identity.to_bytes(KVLayout(2, "gqa", 1, 8, dtype="fp16"))


def test_a_value_moved_to_another_field() -> None:
    first = Identity(weights=b"w", lora=b"x").to_bytes(LAYOUT)
    assert first != Identity(weights=b"w", salt=b"x").to_bytes(LAYOUT)
    assert first != Identity(weights=b"wx").to_bytes(LAYOUT)


def test_where_a_model_came_from_is_not_what_it_is() -> None:
    assert not differs(config={**CONFIG, "_name_or_path": "somewhere", "transformers_version": "9", "use_cache": False})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": b""}, "digest_directory"),
        ({"weights": "llama"}, "must be bytes"),
        ({"lora": "name"}, "lora is a str"),
        ({"salt": "name"}, "salt is a str"),
        ({"kv_dtype": "float64"}, "allowed are"),
        ({"tp_rank": 2}, "tp_rank=2"),
        ({"pp_rank": -1}, "pp_rank=-1"),
        ({"tp_size": 0}, "tp_size=0"),
    ],
)
def test_bad_fields_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Identity(**(BASE | changes))


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
values = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12)


def typed(value: Any) -> Any:
    """The value with its types, so that `1`, `1.0` and `True` compare as the different things they are."""
    if isinstance(value, list):
        return ("list", [typed(item) for item in value])
    if isinstance(value, dict):
        return ("dict", {key: typed(item) for key, item in value.items()})
    return (type(value).__name__, repr(value))


@given(values, values)
def test_encodings_are_equal_only_for_equal_values(a: Any, b: Any) -> None:
    assert (canonical.encode(a) == canonical.encode(b)) == (typed(a) == typed(b))


@given(st.lists(st.binary()), st.lists(st.binary()))
def test_fields_do_not_run_into_each_other(a: list[bytes], b: list[bytes]) -> None:
    assert (canonical.encode(list(a)) == canonical.encode(list(b))) == (a == b)


@pytest.mark.parametrize("value", [object(), {1: "a"}, {"a": {2: 3}}, [{1, 2}], 1j])
def test_what_has_no_encoding_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="part of a digest"):
        canonical.encode(value)


def checkpoint(folder: Path, value: float = 1.0, *, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"a": torch.full((4, 4), value)}, folder / "model-00001.safetensors")
    save_file({"b": torch.zeros(3, dtype=torch.bfloat16)}, folder / "model-00002.safetensors")
    (folder / "config.json").write_text(json.dumps(config or CONFIG))
    return folder


def test_a_directory_is_known_by_its_content(tmp_path: Path) -> None:
    first = Identity.from_model(checkpoint(tmp_path / "a"), revision="r1")
    same = Identity.from_model(checkpoint(tmp_path / "b"), revision="r1")
    other = Identity.from_model(checkpoint(tmp_path / "c", 1.0000001), revision="r1")
    rope = Identity.from_model(checkpoint(tmp_path / "d", config={**CONFIG, "rope_theta": 5}), revision="r1")
    prints = [identity.to_bytes(LAYOUT) for identity in (first, same, other, rope)]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3
    assert first.config == CONFIG


def test_an_adapter_is_known_by_its_content(tmp_path: Path) -> None:
    digests = {digest_directory(checkpoint(tmp_path / str(value), value)) for value in (1.0, 2.0)}
    assert len(digests) == 2


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.json is not here: give a loaded model, or the directory"):
        Identity.from_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="safetensors"):
        Identity.from_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="list"):
        Identity.from_model(tmp_path)


def test_a_loaded_model_is_known_by_its_content() -> None:
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    before = digest_model(model)
    assert digest_model(model) == before
    assert Identity.from_model(model).kv_dtype == "fp32"
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 3] += 1e-6
    assert digest_model(model) != before
    assert digest_model(model.to(torch.bfloat16)) != before


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="a int was given; allowed are a model's directory, or a loaded model"):
        Identity.from_model(3)
