"""A model's sizes from its Hugging Face configuration. An architecture that is not listed here is refused, not guessed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError
from kvtier.kappa.model import Experts, Latent, ModelSpec

__all__ = ["KNOWN", "read"]

KNOWN: Mapping[str, str] = {
    "deepseek_v2": "latent",
    "deepseek_v3": "latent",
    "glm4_moe": "heads",
    "gpt_oss": "heads",
    "kimi_k2": "latent",
    "llama": "heads",
    "mistral": "heads",
    "mixtral": "heads",
    "olmo2": "heads",
    "phi3": "heads",
    "qwen2": "heads",
    "qwen3": "heads",
    "qwen3_moe": "heads",
}
"""Every ``model_type`` that can be read, and its kind of attention. All have gated feed-forward parts."""

_NEEDED = (
    "num_hidden_layers",
    "hidden_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
)
_BY_HAND = "layers, hidden, vocab, heads, kv_heads, head_dim, ffn"


def read(config: object, name: str = "") -> ModelSpec:
    """A model from a configuration; see :meth:`ModelSpec.from_config`.

    Where ``head_dim`` is absent it is ``hidden_size / num_attention_heads``, and where ``tie_word_embeddings`` is absent
    the head is not tied: the defaults of these architectures in transformers.
    """
    fields, origin = _fields(config)
    read = _Fields(fields, origin)
    kind = read.text("model_type")
    if kind not in KNOWN:
        raise ConfigError(
            f"{origin}: the architecture {kind!r} is not known; known are {', '.join(sorted(KNOWN))}. Describe the model by "
            f"hand, in a [model.NAME] table with {_BY_HAND} (and latent, experts, windows where it has them)"
        )
    if read.get("index_topk") is not None:
        raise ConfigError(f"{origin}: sparse attention (index_topk) is not modelled: describe the model by hand")
    return _model(read, kind, name or read.name())


def _model(read: _Fields, kind: str, name: str) -> ModelSpec:
    expert_width = "moe_intermediate_size" if read.get("moe_intermediate_size") is not None else "intermediate_size"
    count = read.first("num_experts", "n_routed_experts", "num_local_experts")
    needs = [field for field in _NEEDED if field != "intermediate_size" or count is None]
    if kind in ("qwen3_moe", "glm4_moe", "deepseek_v2", "deepseek_v3", "kimi_k2", "mixtral", "gpt_oss"):
        needs += ["num_experts_per_tok", expert_width]
        if count is None:
            needs.append(
                {"qwen3_moe": "num_experts", "mixtral": "num_local_experts", "gpt_oss": "num_local_experts"}.get(
                    kind, "n_routed_experts"
                )
            )
    if kind in ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe"):
        needs += ["first_k_dense_replace", "n_shared_experts"]
    if KNOWN[kind] == "latent":
        needs += ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"]
    read.require(needs)

    layers, hidden, heads = (read.whole(field) for field in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    if read.get("head_dim") is None and hidden % heads and KNOWN[kind] == "heads":
        raise ConfigError(
            f"{read.origin} has no head_dim, and hidden_size={hidden} is no multiple of {heads} heads: add it"
        )
    latent = None
    if KNOWN[kind] == "latent":
        rank = read.get("q_lora_rank")
        latent = Latent(
            kv_rank=read.whole("kv_lora_rank"),
            nope_dim=read.whole("qk_nope_head_dim"),
            rope_dim=read.whole("qk_rope_head_dim"),
            v_dim=read.whole("v_head_dim"),
            q_rank=None if rank is None else read.whole("q_lora_rank"),
        )
    experts, flags = None, (False,) * layers
    if count is not None:
        shared = (read.get("n_shared_experts") or 0) * read.whole(expert_width)
        experts = Experts(count, read.whole("num_experts_per_tok"), read.whole(expert_width), shared)
        flags = _expert_layers(read, layers)
    return ModelSpec(
        name=name,
        layers=layers,
        hidden=hidden,
        vocab=read.whole("vocab_size"),
        heads=heads,
        kv_heads=read.whole("num_key_value_heads"),
        head_dim=read.whole("head_dim") if read.get("head_dim") is not None else max(1, hidden // heads),
        ffn=0 if all(flags) else read.whole("intermediate_size"),
        latent=latent,
        experts=experts,
        expert_layers=flags,
        windows=_windows(read, kind, layers),
        tied=bool(read.get("tie_word_embeddings") or False),
        source=str(read.get("source") or read.origin),
    )


def _expert_layers(read: _Fields, layers: int) -> tuple[bool, ...]:
    """Which layers have experts: those after the first dense ones, every ``decoder_sparse_step``-th, not ``mlp_only_layers``."""
    first = read.get("first_k_dense_replace") or 0
    step = read.get("decoder_sparse_step") or read.get("moe_layer_freq") or 1
    plain = set(read.get("mlp_only_layers") or ())
    if not isinstance(step, int):
        raise ConfigError(f"{read.origin}: moe_layer_freq={step!r} is not a whole number: describe the model by hand")
    phase = 0 if read.get("moe_layer_freq") else 1
    return tuple(i >= first and i not in plain and (i + phase) % step == 0 for i in range(layers))


def _windows(read: _Fields, kind: str, layers: int) -> tuple[int | None, ...]:
    window = read.get("sliding_window")
    types = read.get("layer_types")
    if types is not None:
        strange = sorted(set(types) - {"full_attention", "sliding_attention"})
        if strange or len(types) != layers:
            raise ConfigError(
                f"{read.origin}: layer_types has {len(types)} entries for {layers} layers, of types "
                f"{', '.join(sorted(set(types)))}; modelled are full_attention and sliding_attention"
            )
    if window is None or (kind.startswith("qwen") and not read.get("use_sliding_window")):
        if types is not None and "sliding_attention" in types:
            raise ConfigError(f"{read.origin} has sliding layers but no sliding_window: add it")
        return (None,) * layers
    if types is not None:
        return tuple(window if each == "sliding_attention" else None for each in types)
    if kind.startswith("qwen"):
        read.require(["max_window_layers"])
        return tuple(window if i >= read.whole("max_window_layers") else None for i in range(layers))
    if kind in ("mistral", "mixtral", "phi3"):  # every layer slides
        return (window,) * layers
    raise ConfigError(f"{read.origin} has sliding_window={window} but no layer_types: add it, one entry a layer")


def _fields(config: object) -> tuple[Mapping[str, Any], str]:
    if isinstance(config, str | Path):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read ({error.strerror}): give a model's directory or config.json"
            ) from error
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON: {error}") from error
        if not isinstance(fields, Mapping):
            raise ConfigError(f"{path} holds no JSON object: give a model's config.json")
        return _text_part(fields), str(path)
    if isinstance(config, Mapping):
        return _text_part(config), "the configuration"
    if hasattr(config, "to_dict"):
        return _text_part(config.to_dict()), "the configuration"
    raise ConfigError(f"{config!r} is not a configuration: give a path, a mapping or a PretrainedConfig")


def _text_part(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    part = fields.get("text_config")
    return part if isinstance(part, Mapping) and part else fields


class _Fields:
    """Reads fields, and says where they should have been."""

    def __init__(self, fields: Mapping[str, Any], origin: str) -> None:
        self._fields = fields
        self.origin = origin

    def get(self, field: str) -> Any:
        return self._fields.get(field)

    def first(self, *names: str) -> int | None:
        return next((self.whole(name) for name in names if self._fields.get(name) is not None), None)

    def name(self) -> str:
        given = self._fields.get("_name_or_path")
        return given if isinstance(given, str) and given else Path(self.origin).parent.name or self.origin

    def text(self, field: str) -> str:
        value = self._fields.get(field)
        if isinstance(value, str):
            return value
        missing = [name for name in ("model_type", *_NEEDED) if self._fields.get(name) is None]
        raise ConfigError(f"{self.origin} has no {', '.join(missing)}: give a decoder's config.json, or add the fields")

    def require(self, names: list[str]) -> None:
        missing = list(dict.fromkeys(name for name in names if self._fields.get(name) is None))
        if missing:
            raise ConfigError(
                f"{self.origin} has no {', '.join(missing)}: add {'it' if len(missing) == 1 else 'them'} "
                "(without grouped heads num_key_value_heads equals num_attention_heads)"
            )

    def whole(self, field: str) -> int:
        value = self._fields[field]
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(f"{self.origin}: {field}={value!r} is not a whole number")
        return value
