"""What a prefill costs: floating-point operations, bytes of KV to load, bytes of weights to stream.

K cached tokens, T new ones. A multiplication and its addition count as two operations. Every function takes whole
numbers (and gives exact ones) or arrays, which broadcast (and gives float64).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kvtier.kappa.model import LayerKind, ModelSpec
from kvtier.kappa.number import clip, larger, scalar, smaller, tokens

__all__ = [
    "Flops",
    "Form",
    "depth_slope",
    "experts_touched",
    "flops",
    "kv_bytes",
    "pair_flops",
    "pairs",
    "weight_bytes",
]

Form = Literal["heads", "absorbed", "decompressed"]


@dataclass(frozen=True)
class Flops:
    """The operations of one prefill, each a number or an array of the broadcast shape of K and T."""

    projections: Any
    """Attention projections: 2·T·L·(their parameters)."""
    ffn: Any
    """Feed-forward parts of the layers without experts: 2·T·3·h·f a layer."""
    experts: Any
    """Experts that each token takes, and shared ones: 2·T·3·h·(k·f + shared) a layer."""
    router: Any
    """2·T·h·E a layer with experts."""
    attention: Any
    """Scores and values of all query-context pairs, in the cheaper form."""
    latent_up: Any
    """Latent attention, decompressed: rebuilding the keys and values of the K cached tokens. Else 0."""
    head: Any
    """Output head, for the last token only: 2·h·V; 0 for a part of a prompt that needs no logits."""
    absorbed: Any
    """Whether latent attention ran absorbed; False for heads."""

    @property
    def linear(self) -> Any:
        """All that grows with T alone: 2·T·N_act."""
        return self.projections + self.ffn + self.experts + self.router

    @property
    def total(self) -> Any:
        """All of it."""
        return self.linear + self.attention + self.latent_up + self.head


def pairs(cached: Any, new: Any, window: int | None = None) -> Any:
    """Query-context pairs, P.

    T·K + T(T+1)/2; with a window w, Σ_{i=1..T} min(K+i, w): the first clip(w-K, 0, T) queries see all, the rest w.

    Args:
        cached: K, tokens.
        new: T, tokens.
        window: w, tokens that a query sees, itself included. Default None, all.

    Raises:
        ConfigError: for what is no number of tokens.
    """
    cached, new = tokens(cached, "cached"), tokens(new, "new")
    if window is None:
        return new * cached + new * (new + 1) // 2
    growing = clip(window - cached, 0, new)
    return growing * cached + growing * (growing + 1) // 2 + (new - growing) * window


def pair_flops(model: ModelSpec) -> dict[Form, int]:
    """Operations for one query-context pair in one layer, in each form of execution.

    Heads: 4·n_q·d. Latent, decompressed: 2·n_q·(d_n+d_r+d_v); absorbed: 2·n_q·(2r+d_r) (DeepSeek-V2, section 2.1: the
    up-projection is folded into queries and output, so that attention runs over the latents themselves).
    """
    if model.latent is None:
        return {"heads": 4 * model.heads * model.head_dim}
    at = model.latent
    return {
        "absorbed": 2 * model.heads * (2 * at.kv_rank + at.rope_dim),
        "decompressed": 2 * model.heads * (at.nope_dim + at.rope_dim + at.v_dim),
    }


def up_flops(model: ModelSpec) -> int:
    """Operations to rebuild one cached token's keys and values in one layer from its latent: 2·r·n_q·(d_n+d_v); else 0."""
    at = model.latent
    return 0 if at is None else 2 * at.kv_rank * model.heads * (at.nope_dim + at.v_dim)


def flops(model: ModelSpec, cached: Any, new: Any, *, head: bool = True) -> Flops:
    """The operations of a prefill of T new tokens behind K cached ones.

    Args:
        model: the model.
        cached: K, tokens.
        new: T, tokens.
        head: whether the last token's logits are computed. Default True.

    Raises:
        ConfigError: for what is no number of tokens.

    Sources: the standard count of a decoder's matrix products; for latent attention the cheaper of its two forms.
    """
    cached, new = tokens(cached, "cached"), tokens(new, "new")
    with_experts = sum(model.expert_layers)
    routed = model.experts.per_token if model.experts else 0
    inner = model.ffn_params(True, routed) - model.router_params if with_experts else 0
    per_pair = pair_flops(model)
    if model.latent is None:
        attention: Any = 0
        for kind, count in model.counted:
            attention = attention + count * per_pair["heads"] * pairs(cached, new, kind.window)
        up, absorbed = attention * 0, np.zeros(np.shape(attention), bool) if not scalar(attention) else False
    else:
        count = pairs(cached, new) * model.layers
        short, long = per_pair["absorbed"] * count, per_pair["decompressed"] * count
        up = model.layers * up_flops(model) * cached * smaller(new, 1)
        absorbed = short < long + up
        if scalar(count):
            attention, up = (short, 0) if absorbed else (long, up)
        else:
            attention, up = np.where(absorbed, short, long), np.where(absorbed, 0, up)
    return Flops(
        projections=2 * new * model.layers * model.attention_params,
        ffn=2 * new * (model.layers - with_experts) * int(model.ffn_params(False, 0)),
        experts=2 * new * with_experts * int(inner),
        router=2 * new * with_experts * model.router_params,
        attention=attention,
        latent_up=up,
        head=2 * model.head_params * smaller(new, 1) if head else 0 * new,
        absorbed=absorbed,
    )


def depth_slope(model: ModelSpec, block_tokens: int) -> float:
    """What each block before it adds to the operations of computing a block, as a share of those of a chain's first.

    ``Store(policy=f"importance:{depth_slope(model, block_tokens)}")`` weighs blocks by it; of blocks of 512 tokens of
    Llama-3.1-8B it is about 1/60, which ``"importance"`` alone takes.

    Args:
        model: the model.
        block_tokens: tokens of a block.

    Raises:
        ConfigError: for what is no number of tokens.

    Source: :func:`flops`, without the head.
    """
    first, second = (flops(model, cached, block_tokens, head=False).total for cached in (0, block_tokens))
    return float(second / first - 1)


def layer_flops(model: ModelSpec, kind: LayerKind, cached: Any, new: Any, absorbed: Any) -> Any:
    """The operations of one layer of ``kind`` (no head), with latent attention in the form that ``absorbed`` says."""
    routed = model.experts.per_token if model.experts else 0
    linear = 2 * new * int(model.attention_params + model.ffn_params(kind.experts, routed))
    per_pair = pair_flops(model)
    if model.latent is None:
        return linear + per_pair["heads"] * pairs(cached, new, kind.window)
    count = pairs(cached, new)
    long = per_pair["decompressed"] * count + up_flops(model) * cached * smaller(new, 1)
    short = per_pair["absorbed"] * count
    return linear + ((short if absorbed else long) if scalar(count) else np.where(absorbed, short, long))


def kv_bytes(model: ModelSpec, cached: Any) -> Any:
    """Bytes of KV to load for K cached tokens: K·B, where a layer with window w needs only the last w - 1 of them.

    Args:
        model: the model.
        cached: K, tokens.

    Raises:
        ConfigError: for what is no number of tokens.
    """
    cached = tokens(cached, "cached")
    total: Any = 0
    for kind, count in model.counted:
        total = total + count * layer_kv_bytes(model, kind, cached)
    return total


def layer_kv_bytes(model: ModelSpec, kind: LayerKind, cached: Any) -> Any:
    """Bytes of KV to load for K cached tokens in one layer of ``kind``."""
    kept = cached if kind.window is None else smaller(cached, kind.window - 1)
    return kept * model.layer_kv_bytes


def experts_touched(count: int, per_token: int, new: Any) -> Any:
    """How many of E experts T tokens touch, under uniform routing: E·(1 - (1 - k/E)^T).

    Args:
        count: E.
        per_token: k.
        new: T, tokens.

    Returns:
        The expected number, a float or an array.
    """
    return count * (1 - (1 - per_token / count) ** new)


def weight_bytes(model: ModelSpec, new: Any, *, head: bool = True) -> Any:
    """Bytes of weights that a prefill of T tokens streams once from the GPU's memory.

    All layers' projections, dense parts and routers, the experts touched, the head, and the embedding rows of the new
    tokens (at most V; none apart from the head where the two are tied). 0 for T = 0.

    Args:
        model: the model.
        new: T, tokens.
        head: whether the output head is read too. Default True.

    Raises:
        ConfigError: for what is no number of tokens.
    """
    new = tokens(new, "new")
    total: Any = 0
    for kind, count in model.counted:
        total = total + count * layer_weight_bytes(model, kind, new)
    rows = 0 * new if head and model.tied else smaller(new, model.vocab) * model.hidden
    return total + (rows + (model.head_params * smaller(new, 1) if head else 0)) * model.weight_bytes


def layer_weight_bytes(model: ModelSpec, kind: LayerKind, new: Any) -> Any:
    """Bytes of one layer's weights that T tokens touch."""
    touched = experts_touched(model.experts.count, model.experts.per_token, new) if model.experts else 0
    params = model.attention_params + model.ffn_params(kind.experts, touched)
    return params * model.weight_bytes * smaller(larger(new, 0), 1)
