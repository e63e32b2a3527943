"""Tensor parallelism: each GPU has a link of its own, and holds its part of heads, feed-forward width and vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from kvtier.errors import ConfigError
from kvtier.kappa.cost import kv_bytes
from kvtier.kappa.hardware import Convention, HardwareSpec, LinkSpec
from kvtier.kappa.model import ModelSpec
from kvtier.kappa.number import positive, tokens, whole
from kvtier.kappa.ttft import Compute, compute

__all__ = ["Latents", "Parallel", "shard", "tensor_parallel"]

Latents = Literal["replicated", "broadcast"]


@dataclass(frozen=True)
class Parallel:
    """One request on several GPUs. Times are in seconds, sizes in bytes, for one GPU where not said otherwise."""

    gpus: int
    """How many."""
    rank: ModelSpec
    """What one of them holds."""
    replicas: int
    """How many GPUs hold the same KV."""
    load_bytes: Any
    """Bytes over its own link."""
    total_bytes: Any
    """Bytes over all links together."""
    load: Any
    """Seconds of the load over the link."""
    exchange: Any
    """Seconds in which the GPUs pass each other's share of the latents on; 0 unless broadcast."""
    compute: Compute
    """The computation of one GPU's part."""
    reduce: Any
    """Seconds of the two all-reduces a layer; None without a fabric's rate: not counted."""

    @property
    def compute_s(self) -> Any:
        """Seconds of the computation, with the all-reduces where they are counted."""
        return self.compute.total + (0 if self.reduce is None else self.reduce)

    @property
    def load_s(self) -> Any:
        """Seconds until the prefix is where it is needed."""
        return self.load + self.exchange


def shard(model: ModelSpec, gpus: int) -> ModelSpec:
    """What one of ``gpus`` holds: its query heads, KV heads (at least one), width and vocabulary.

    The residual stream, the router and the down-projections of latent attention are on every GPU. Widths and vocabulary
    are rounded up.

    Args:
        model: the model.
        gpus: at least 1; it must divide the query heads, and divide or be a multiple of the KV heads.

    Raises:
        ConfigError: for a number of GPUs that does not fit.

    Source: Megatron-LM's column and row parallel layers; KV heads past n_kv are replicated.
    """
    whole("gpus", gpus)
    heads = model.kv_heads if model.latent is None else gpus
    if model.heads % gpus or (heads % gpus and gpus % heads):
        raise ConfigError(
            f"gpus={gpus} does not fit {model.name}: it must divide {model.heads} query heads, and divide or be a multiple of "
            f"{model.kv_heads} KV heads"
        )
    experts = model.experts and replace(
        model.experts,
        width=_part(model.experts.width, gpus),
        shared_width=_part(model.experts.shared_width, gpus),
    )
    mine = model.heads // gpus
    return replace(
        model,
        heads=mine,
        kv_heads=max(1, model.kv_heads // gpus) if model.latent is None else mine,
        vocab=_part(model.vocab, gpus),
        ffn=_part(model.ffn, gpus),
        experts=experts,
    )


def tensor_parallel(
    model: ModelSpec,
    hardware: HardwareSpec,
    link: LinkSpec,
    gpus: int,
    cached: Any,
    new: Any,
    *,
    latents: Latents = "replicated",
    fabric: float | None = None,
    convention: Convention = "dense",
) -> Parallel:
    """Load and computation of one request on several GPUs, each with its own link.

    Args:
        model: the whole model.
        hardware: one of the GPUs.
        link: one of the links.
        gpus: how many; see :func:`shard`.
        cached: K, tokens.
        new: T, tokens; broadcasts with ``cached``.
        latents: latent attention only. ``"replicated"`` (default): every GPU loads all latents over its own link.
            ``"broadcast"``: each loads its share, and they exchange the shares over the fabric.
        fabric: bytes/s one way between the GPUs. Default None: all-reduces are not counted, broadcast is refused.
        convention: what C is. Default ``"dense"``.

    Raises:
        ConfigError: for GPUs that do not fit, or a broadcast without a fabric or without latents.

    Sources: all-gather of n shares takes (n-1)/n of the bytes over the fabric, a ring all-reduce 2·(n-1)/n; there are
    two all-reduces of T·h activations in bf16 a layer.
    """
    rank = shard(model, gpus)
    if latents not in ("replicated", "broadcast"):
        raise ConfigError(f"latents={latents!r} is not known; allowed are replicated and broadcast")
    if fabric is not None:
        positive("fabric", fabric)
    replicas = gpus if model.latent is not None else gpus // min(gpus, model.kv_heads)
    size = kv_bytes(rank, cached)
    exchange: Any = 0 * size
    total = size * gpus
    if latents == "broadcast":
        if fabric is None or model.latent is None:
            raise ConfigError(
                "broadcast needs a model with latent attention, and fabric=, the bytes/s between the GPUs"
            )
        exchange = size * (gpus - 1) / gpus / fabric
        total, size = size, size / gpus
    done = compute(rank, hardware, cached, new, convention=convention)
    moved = 2 * (gpus - 1) / gpus * tokens(new, "new") * model.hidden * 2 * 2 * model.layers
    reduce = None if fabric is None else moved / fabric
    return Parallel(gpus, rank, replicas, size, total, size / link.read, exchange, done, reduce)


def _part(size: int, gpus: int) -> int:
    return -(-size // gpus)
