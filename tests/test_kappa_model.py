"""`kvtier.kappa`'s models, hardware and links: the catalog, Hugging Face configurations, a user's own TOML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.kappa import HardwareSpec, KVFormat, LinkSpec, ModelSpec, catalog
from kvtier.kappa.catalog import _data

DATA: dict[str, Any] = _data("catalog.json")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


@pytest.mark.parametrize("name", DATA["models"])
def test_the_catalogs_models_have_the_sizes_that_stand_beside_them(name: str) -> None:
    model, derived = ModelSpec.named(name), DATA["models"][name]["derived"]
    assert model.n_total == derived["total_params"]
    assert model.n_active == derived["active_matmul_params_no_embed_head"]
    assert model.head_params == derived["lm_head_params"]
    assert model.kv_bytes_per_token == derived["kv_bytes_bf16"]
    assert model.source


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Llama-3.1-405B", 405.85),
        ("Llama-3.1-70B", 70.55),
        ("Llama-3.1-8B", 8.03),
        ("Qwen3-235B-A22B", 235.1),
        ("DeepSeek-V3", 671.0),
    ],
)
def test_parameter_counts_are_the_known_ones(name: str, billions: float) -> None:
    assert ModelSpec.named(name).n_total == pytest.approx(billions * 1e9, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("Llama-3.1-405B", 516_096),
        ("Llama-3.1-70B", 327_680),
        ("Llama-3.1-8B", 131_072),
        ("Qwen3-235B-A22B", 192_512),
        ("DeepSeek-V3", 70_272),
    ],
)
def test_kv_bytes_a_token(name: str, size: int) -> None:
    assert ModelSpec.named(name).kv_bytes_per_token == size


def test_quantised_kv_counts_its_scales() -> None:
    deep, small = ModelSpec.named("DeepSeek-V3"), ModelSpec.named("Llama-3.1-8B")
    packed = deep.with_kv("fp8")
    assert packed.layer_kv_bytes == 656
    assert deep.kv_bytes_per_token / packed.kv_bytes_per_token == pytest.approx(1.76, abs=0.005)
    assert small.with_kv("fp8").kv_bytes_per_token == 65_536
    assert small.with_kv("int8").kv_bytes_per_token == 32 * 2 * 8 * (128 + 4)
    assert small.with_kv(KVFormat("int8", group=48, scale_bytes=2)).layer_kv_bytes == 2 * 8 * (128 + 3 * 2)
    assert small.with_kv("fp32").kv_bytes_per_token == 2 * 131_072
    with pytest.raises(ConfigError, match="give both, or neither"):
        KVFormat("int8", group=32)
    with pytest.raises(ConfigError, match="allowed are"):
        small.with_kv("int3")


def test_windows_of_the_catalog() -> None:
    oss, mistral = ModelSpec.named("gpt-oss"), ModelSpec.named("Mistral-7B")
    assert oss.windows.count(128) == 18
    assert oss.windows[0] == 128
    assert oss.growing_kv_bytes == 36_864
    assert mistral.windows == (4096,) * 32
    assert mistral.growing_kv_bytes == 0


def test_a_directory_with_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for where in (tmp_path, tmp_path / "config.json"):
        model = ModelSpec.from_config(where)
        assert (model.layers, model.hidden, model.head_dim, model.ffn) == (2, 64, 16, 160)
        assert model.name == tmp_path.name
    assert ModelSpec.find(str(tmp_path)) == ModelSpec.from_config(tmp_path)
    assert ModelSpec.from_config({"text_config": LLAMA}).kv_heads == 2
    tied = ModelSpec.from_config({**LLAMA, "tie_word_embeddings": True})
    assert ModelSpec.from_config(LLAMA).n_total - tied.n_total == 64 * 100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba2"}, "'mamba2' is not known.*layers, hidden, vocab, heads, kv_heads, head_dim"),
        ({"model_type": None, "vocab_size": None}, "has no model_type, vocab_size"),
        ({"num_key_value_heads": None, "vocab_size": None}, "has no vocab_size, num_key_value_heads"),
        ({"model_type": "qwen3_moe"}, "num_experts_per_tok, num_experts"),
        (
            {"model_type": "deepseek_v3"},
            "n_routed_experts.*kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim",
        ),
        ({"hidden_size": 66}, "no head_dim"),
        ({"hidden_size": "64"}, "hidden_size='64' is not a whole number"),
        ({"index_topk": 2048}, "sparse attention"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"layer_types": ["full_attention"]}, "1 entries for 2 layers"),
        ({"layer_types": ["sliding_attention"] * 2}, "no sliding_window"),
        ({"sliding_window": 8}, "no layer_types"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}, "max_window_layers"),
    ],
)
def test_nothing_is_guessed(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelSpec.from_config({key: value for key, value in {**LLAMA, **changes}.items() if value is not None})


def test_what_is_no_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    for bad, message in (
        (tmp_path, "no JSON object"),
        (tmp_path / "none", "cannot be read"),
        (3, "not a configuration"),
    ):
        with pytest.raises(ConfigError, match=message):
            ModelSpec.from_config(bad)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        ModelSpec.from_config(tmp_path)


def test_which_layers_have_experts_and_windows() -> None:
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    base = {**LLAMA, **moe, "model_type": "qwen3_moe", "num_hidden_layers": 4}
    assert ModelSpec.from_config(base).expert_layers == (True,) * 4
    assert ModelSpec.from_config({**base, "decoder_sparse_step": 2}).expert_layers == (False, True, False, True)
    assert ModelSpec.from_config({**base, "mlp_only_layers": [1]}).expert_layers == (True, False, True, True)
    qwen = {**LLAMA, "model_type": "qwen2", "sliding_window": 8, "max_window_layers": 1}
    assert ModelSpec.from_config(qwen).windows == (None, None)
    assert ModelSpec.from_config({**qwen, "use_sliding_window": True}).windows == (None, 8)


def test_names_fit_by_beginning_or_part_but_never_by_chance() -> None:
    assert HardwareSpec.named("h100").name == "H100-SXM"
    assert HardwareSpec.named("B200").name == "B200-SXM(HGX)"
    assert LinkSpec.named("pcie 5").name == "PCIe5 x16"
    assert ModelSpec.named("405b").name == "Llama-3.1-405B"
    for bad, message in (
        ("NVLink", "may be NVLink-C2C GH200"),
        ("carrier pigeon", "not in the catalog"),
        ("", "not in"),
    ):
        with pytest.raises(ConfigError, match=message):
            LinkSpec.named(bad)
    assert len(catalog().models) == 14
    assert len(catalog().hardware_names) == 6
    assert len(catalog().links) == 10


def test_every_figure_of_the_catalog_has_a_source() -> None:
    for name in catalog().hardware_names:
        gpu = HardwareSpec.named(name)
        assert all(gpu.sources[field] for field in ("dense_flops", "hbm_bandwidth", "hbm_bytes"))
    for name in catalog().links:
        link = LinkSpec.named(name)
        assert link.source
        assert all(source for _, source in link.measured)


def test_a_link_by_its_rate() -> None:
    assert LinkSpec.named("55GB/s").read == 55e9
    assert LinkSpec.named("1.5 TB/s").read == 1.5e12
    assert LinkSpec.named("13GB/s").write_rate == 13e9


def test_rates_and_their_limits() -> None:
    gpu = HardwareSpec.named("H100")
    assert gpu.with_mfu(0.5).flops() == gpu.dense_flops / 2
    assert gpu.with_mfu(0.5).flops("paper") == gpu.sparse_flops
    link = LinkSpec("x", read=50e9, both=83e9)
    assert link.contended == pytest.approx((41.5e9, 41.5e9))
    assert LinkSpec("x", read=50e9).contended == (50e9, 50e9)
    for make, message in (
        (lambda: gpu.with_mfu(1.1), "more than the peak"),
        (lambda: HardwareSpec.named("GH200").flops("paper"), "no sparse_flops"),
        (lambda: LinkSpec("x", read=50e9, both=40e9), "does not fit"),
        (lambda: LinkSpec("x", read=0), "above 0"),
        (lambda: LinkSpec("x", read=float("nan")), "finite"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()


def test_a_users_own_toml(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(
        """
        [model.tiny]
        layers = 2
        hidden = 64
        vocab = 100
        heads = 4
        kv_heads = 2
        head_dim = 16
        ffn = 160
        kv = "int8"
        windows = [0, 8]
        [hardware.card]
        dense_flops = 1e14
        hbm_bandwidth = 1e12
        [link.wire]
        read = 1e10
        both = 1.5e10
        """
    )
    own = catalog().extended(path)
    assert own.model("tiny").windows == (None, 8)
    assert own.model("tiny").kv.dtype == "int8"
    assert own.hardware("card").flops() == 1e14
    assert own.link("wire").write_rate == 1e10
    assert own.model("DeepSeek-V3") == ModelSpec.named("DeepSeek-V3")
    for text, message in (
        ("[model.tiny]\nlayers = 2", "has no head_dim, heads, hidden, kv_heads, vocab"),
        ("[hardware.card]\nflops = 1", "unknown key flops"),
        ("[hardware.card]\ndense_flops = 1e14", "has no hbm_bandwidth"),
        ("[link.wire]\nread = -1", "above 0"),
        ("[cable.wire]\nread = 1", "unknown table cable"),
        ("[link", "not TOML"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            catalog().extended(path)


@pytest.mark.parametrize("name", DATA["models"])
def test_a_model_survives_its_description(name: str) -> None:
    for kv in ("bf16", "int8"):
        model = ModelSpec.named(name).with_kv(kv)
        assert ModelSpec.from_fields(model.describe()) == model
