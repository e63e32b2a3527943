"""Time to the first token of a request whose prefix is kept: loaded, computed again, or some of each.

Times are in seconds, rates in bytes/s and FLOP/s. Everything broadcasts, and gives its terms beside the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtier.errors import ConfigError
from kvtier.kappa.cost import flops, layer_flops, layer_kv_bytes, layer_weight_bytes, weight_bytes
from kvtier.kappa.hardware import Convention, HardwareSpec, LinkSpec
from kvtier.kappa.model import ModelSpec
from kvtier.kappa.number import positive, tokens, whole

__all__ = [
    "Compute",
    "Load",
    "Part",
    "Split",
    "Ttft",
    "WriteBack",
    "compute",
    "layer_times",
    "load",
    "pipelined",
    "recurrence",
    "serial",
    "split",
    "split_at",
    "write_back",
]


@dataclass(frozen=True)
class Compute:
    """The computation of a prefill."""

    flops: Any
    """Operations."""
    weight_bytes: Any
    """Bytes of weights streamed."""
    flops_s: Any
    """Operations over C."""
    stream_s: Any
    """Bytes of weights over the bandwidth of the GPU's memory."""

    @property
    def total(self) -> Any:
        """The longer of the two: products and streaming overlap (a roofline)."""
        return np.maximum(self.flops_s, self.stream_s)

    @property
    def streaming(self) -> Any:
        """Whether streaming the weights is what binds."""
        return np.asarray(self.stream_s) > np.asarray(self.flops_s)


class Part(NamedTuple):
    """What one tier holds of a request's prefix."""

    name: str
    bytes: float
    """Bytes to load from it."""
    rate: float
    """Bytes/s that it gives."""


@dataclass(frozen=True)
class Load:
    """The load of a prefix that lies in several tiers."""

    seconds: dict[str, float]
    """What each tier takes by itself."""
    shared_s: float
    """What all bytes take on the way that the tiers share; 0 without one."""
    total: float
    """All of it: the longest where tiers load at once, else the sum."""
    binds: str
    """The tier that takes longest, or ``"shared"``."""


@dataclass(frozen=True)
class Ttft:
    """A time to first token. ``total = load + compute - hidden``."""

    load: Any
    """Seconds that the link is busy."""
    compute: Any
    """Seconds that the GPU is busy."""
    total: Any
    """Seconds until the first token."""

    @property
    def hidden(self) -> Any:
        """Seconds in which both were busy."""
        return self.load + self.compute - self.total

    @property
    def exposed(self) -> Any:
        """Seconds that the load adds to the computation."""
        return self.total - self.compute


@dataclass(frozen=True)
class Split:
    """A prefix of which the front is computed while the rest is loaded; then the new tokens are computed."""

    at: Any
    """s: tokens computed from the front; 0 loads all, K computes all."""
    prefix_compute: Any
    """Seconds to compute the first s tokens (no logits)."""
    load: Any
    """Seconds to load the K - s others."""
    new_compute: Any
    """Seconds to compute the T new tokens behind them."""

    @property
    def total(self) -> Any:
        """Seconds: the longer of the first two, then the third."""
        return np.maximum(self.prefix_compute, self.load) + self.new_compute

    @property
    def idle(self) -> Any:
        """Seconds that the one which ends first waits for the other."""
        return np.abs(self.prefix_compute - self.load)


@dataclass(frozen=True)
class WriteBack:
    """The way back of the KV of a request's new and generated tokens."""

    bytes: Any
    """(T + O)·B."""
    seconds: Any
    """Seconds it takes on the link, alone."""
    added: Any
    """Seconds it adds to the TTFT: all when blocking, else what the load loses to contention."""
    load: Any
    """Seconds that the load takes beside it."""


def compute(
    model: ModelSpec,
    hardware: HardwareSpec,
    cached: Any,
    new: Any,
    *,
    head: bool = True,
    convention: Convention = "dense",
) -> Compute:
    """The time to compute T new tokens behind K cached ones: max(FLOPs / C, weight bytes touched / HBM bandwidth).

    Args:
        model: the model.
        hardware: gives C and the bandwidth.
        cached: K, tokens.
        new: T, tokens.
        head: whether the last token's logits are computed. Default True.
        convention: what C is. Default ``"dense"``.

    Raises:
        ConfigError: for what is no number of tokens.

    Source: the roofline model. KV read from the GPU's own memory by the attention is left out.
    """
    operations = flops(model, cached, new, head=head).total
    streamed = weight_bytes(model, new, head=head) + 0 * operations
    return Compute(operations, streamed, operations / hardware.flops(convention), streamed / hardware.hbm_bandwidth)


def load(parts: Sequence[Part], *, concurrent: bool = True, shared_rate: float | None = None) -> Load:
    """The time to load a prefix that lies in several tiers.

    Args:
        parts: what each tier gives; no bytes take no time.
        concurrent: whether the tiers deliver at the same time (default), or one after the other.
        shared_rate: bytes/s of a way that all of them share, such as the link to the GPU. Default None.

    Returns:
        Concurrent: max(longest tier, all bytes over the shared way). Else the sum over tiers of bytes over the slower
        of the tier and the shared way.

    Raises:
        ConfigError: for a negative size or a rate that is not above 0.
    """
    for part in parts:
        positive(f"the bytes in {part.name}", part.bytes, zero=True)
        positive(f"the rate of {part.name}", part.rate)
    if shared_rate is not None:
        positive("shared_rate", shared_rate)
    cap = np.inf if shared_rate is None else shared_rate
    seconds = {part.name: part.bytes / (part.rate if concurrent else min(part.rate, cap)) for part in parts}
    shared = sum(part.bytes for part in parts) / cap
    longest = max(seconds, key=lambda name: seconds[name], default="nothing")
    if not concurrent:
        return Load(seconds, shared, sum(seconds.values()), longest)
    if seconds and shared > seconds[longest]:
        return Load(seconds, shared, shared, "shared")
    return Load(seconds, shared, seconds.get(longest, 0.0), longest)


def serial(load_s: Any, compute_s: Any) -> Ttft:
    """Load first, then compute: t_load + t_comp.

    Args:
        load_s: seconds of the load.
        compute_s: seconds of the computation.
    """
    return Ttft(load_s, compute_s, load_s + compute_s)


def pipelined(load_s: Any, compute_s: Any, layers: int) -> Ttft:
    """Layer by layer, uniform layers: max(t_load, t_comp) + min(t_load, t_comp)/L.

    Args:
        load_s: seconds to load all layers.
        compute_s: seconds to compute all layers.
        layers: L, at least 1.

    Raises:
        ConfigError: for fewer than one layer.

    Source: :func:`recurrence` with equal layers, whose longest path has its turn in the first or the last one.
    """
    whole("layers", layers)
    return Ttft(load_s, compute_s, np.maximum(load_s, compute_s) + np.minimum(load_s, compute_s) / layers)


def recurrence(loads: ArrayLike, computes: ArrayLike) -> Ttft:
    """Layer by layer, any layers: max_i(Σ_{j≤i} load_j + Σ_{j≥i} comp_j).

    Layers load one after the other, and a layer is computed when it and the one before it are there.

    Args:
        loads: seconds to load each layer; the last axis runs over layers.
        computes: seconds to compute each layer; broadcasts with ``loads``.

    Raises:
        ConfigError: for no layers.

    Source: the longest path through done_i = max(done_{i-1}, Σ_{j≤i} load_j) + comp_i.
    """
    first, second = np.broadcast_arrays(np.asarray(loads, np.float64), np.asarray(computes, np.float64))
    if first.ndim == 0 or first.shape[-1] == 0:
        raise ConfigError("loads and computes have no layers: give one time a layer, along the last axis")
    before = np.cumsum(first, -1)
    after = np.cumsum(second[..., ::-1], -1)[..., ::-1]
    return Ttft(first.sum(-1), second.sum(-1), (before + after).max(-1))


def layer_times(
    model: ModelSpec,
    hardware: HardwareSpec,
    link: LinkSpec,
    cached: int,
    new: int,
    convention: Convention = "dense",
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What each layer takes to load and to compute, for :func:`recurrence`.

    Args:
        model: the model.
        hardware: gives C and the bandwidth of its memory.
        link: gives BW.
        cached: K, tokens.
        new: T, tokens.
        convention: what C is. Default ``"dense"``.

    Returns:
        Two float64 arrays of L + 1 seconds: the layers, and the output head (with the embedding rows), which has
        nothing to load. Each is a roofline of its own, so their sum may be a little more than :func:`compute` gives.

    Raises:
        ConfigError: for what is no number of tokens.
    """
    cached, new = tokens(cached, "cached"), tokens(new, "new")
    rate, stream = hardware.flops(convention), hardware.hbm_bandwidth
    whole_prefill = flops(model, cached, new)
    times = {
        kind: (
            layer_kv_bytes(model, kind, cached) / link.read,
            max(
                layer_flops(model, kind, cached, new, whole_prefill.absorbed) / rate,
                layer_weight_bytes(model, kind, new) / stream,
            ),
        )
        for kind, _ in model.counted
    }
    layers = sum(count * layer_weight_bytes(model, kind, new) for kind, count in model.counted)
    tail = max(whole_prefill.head / rate, (weight_bytes(model, new) - layers) / stream)
    rows = np.array([*(times[kind] for kind in model.kinds), (0.0, tail)])
    return rows[:, 0], rows[:, 1]


def split_at(
    cached: Any,
    prefix_compute: Callable[[NDArray[np.int64]], Any],
    suffix_load: Callable[[NDArray[np.int64]], Any],
    granularity: int = 1,
) -> NDArray[np.int64]:
    """The best number s of tokens to compute from the front while the others load: min over s of max of the two.

    Args:
        cached: K, tokens, a number or an array.
        prefix_compute: seconds to compute the first s tokens; must not fall as s grows, and be 0 at s = 0.
        suffix_load: seconds to load all but the first s; must not grow with s.
        granularity: s is a multiple of it, or K itself. Default 1 token.

    Returns:
        s, whole numbers of the shape of ``cached``; the smaller of two that are as good.

    Raises:
        ConfigError: for a granularity below 1.

    Source: Jin et al., "Compute Or Load KV Cache? Why Not Both?", ICML 2025: both should end together. The crossing is
    found by bisection, and the steps on both sides of it are compared.
    """
    step = whole("granularity", granularity)
    k = np.asarray(cached, np.int64)
    steps = -(-k // step)
    low, high = np.zeros_like(k), steps.copy()  # at `high` the computation takes at least as long
    while np.any(high - low > 1):
        middle = (low + high) // 2
        at = np.minimum(middle * step, k)
        late = np.asarray(prefix_compute(at)) >= np.asarray(suffix_load(at))
        low, high = np.where(late, low, middle), np.where(late, middle, high)
    best = np.zeros_like(k)
    lowest = np.maximum(np.asarray(prefix_compute(best)), np.asarray(suffix_load(best)))
    for count in (low, high):
        at = np.minimum(count * step, k)
        longer = np.maximum(np.asarray(prefix_compute(at)), np.asarray(suffix_load(at)))
        better = longer < lowest
        best, lowest = np.where(better, at, best), np.where(better, longer, lowest)
    return best


def split(
    model: ModelSpec,
    hardware: HardwareSpec,
    link: LinkSpec,
    cached: Any,
    new: Any,
    *,
    granularity: int = 1,
    convention: Convention = "dense",
) -> Split:
    """The best split of K cached tokens into a computed front and a loaded rest.

    Args:
        model: the model.
        hardware: gives C and the bandwidth of its memory.
        link: gives BW.
        cached: K, tokens, a number or an array.
        new: T, tokens; broadcasts with ``cached``.
        granularity: the front is a multiple of it, or all of K. Default 1 token; a store's is its ``block_tokens``.
        convention: what C is. Default ``"dense"``.

    Raises:
        ConfigError: for what is no number of tokens, or a granularity below 1.

    A layer with window w loads what the new tokens need of it and the front does not bring: of its last w - 1 tokens
    those from s on.
    """
    cached, new = tokens(cached, "cached"), tokens(new, "new")
    k, t = np.broadcast_arrays(np.asarray(cached, np.int64), np.asarray(new, np.int64))

    def prefix(s: NDArray[np.int64]) -> Any:
        return compute(model, hardware, np.zeros_like(s), s, head=False, convention=convention).total

    def suffix(s: NDArray[np.int64]) -> Any:
        # Of a layer's last w - 1 tokens the front brings those below s.
        total: Any = 0.0
        for kind, count in model.counted:
            kept = k - s if kind.window is None else np.minimum(k - s, kind.window - 1)
            total = total + count * kept * (model.layer_kv_bytes / link.read)
        return total

    s = split_at(k, prefix, suffix, granularity)
    rest = compute(model, hardware, k, t, convention=convention).total
    parts = (s, prefix(s), suffix(s), rest)
    if k.ndim == 0:
        return Split(int(s), *(float(part) for part in parts[1:]))
    return Split(*parts)


def write_back(
    model: ModelSpec,
    link: LinkSpec,
    new: Any,
    generated: Any,
    load_s: Any = 0.0,
    *,
    blocking: bool = False,
) -> WriteBack:
    """The write-back of the KV of T new and O generated tokens: (T + O)·B / BW_write.

    Blocking, it is added to the TTFT. Asynchronous, it runs beside a load (of the next request, in a steady state) and
    both have their contended rates until one of them ends.

    Args:
        model: gives B, of all layers.
        link: gives the rates, and ``both``, what the two directions reach together.
        new: T, tokens.
        generated: O, tokens.
        load_s: seconds that the load takes alone. Default 0.
        blocking: default False.

    Raises:
        ConfigError: for what is no number of tokens.
    """
    count = tokens(new, "new") + tokens(generated, "generated")
    size = count * model.kv_bytes_per_token
    alone = size / link.write_rate
    if blocking:
        return WriteBack(size, alone, alone, load_s)
    reading, writing = link.contended
    beside = np.minimum(load_s * link.read / reading, size / writing)  # until one of the two ends
    slowed = beside + np.maximum(0.0, load_s - beside * reading / link.read)
    return WriteBack(size, alone, slowed - load_s, slowed)
