"""κ: the ratio of cached to new tokens at which loading a prefix takes as long as computing what follows it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtier.errors import ConfigError
from kvtier.kappa.cost import pair_flops, up_flops, weight_bytes
from kvtier.kappa.hardware import Convention, HardwareSpec, LinkSpec
from kvtier.kappa.model import ModelSpec

__all__ = ["kappa_crit", "kappa_hw", "kappa_m", "kappa_ratio", "kappa_turn", "t_star"]


def kappa_m(model: ModelSpec, n_active: float | None = None) -> float:
    """κ_M = 2·N_act / B, FLOP per byte: what a new token costs over what a cached one weighs. Attention is not in it.

    Args:
        model: the model.
        n_active: parameters to count, where not :attr:`ModelSpec.n_active` (no embedding, no head).

    Source: arXiv 2601.19910, with N_act counted from the sizes instead of taken from the model's name.
    """
    return 2 * (model.n_active if n_active is None else n_active) / model.kv_bytes_per_token


def kappa_hw(hardware: HardwareSpec, link: LinkSpec, convention: Convention = "dense") -> float:
    """κ_HW = BW / C, bytes per FLOP: how much the link brings while the GPU computes one operation.

    Args:
        hardware: gives C, see :meth:`HardwareSpec.flops`.
        link: gives BW, one way, towards the GPU.
        convention: default ``"dense"``.

    Raises:
        ConfigError: for the paper's convention without a sparse peak.
    """
    return link.read / hardware.flops(convention)


def kappa_crit(
    model: ModelSpec, hardware: HardwareSpec, link: LinkSpec, new: ArrayLike, convention: Convention = "dense"
) -> Any:
    """κ_crit(T): beyond this K/T the load of the prefix takes longer than the computation of the T new tokens.

    ((F + a·T/2)/C) / (B/BW - a·T/C) with F = 2·N_act and a the operations a query-context pair; infinite from T* on.
    Latent attention: the smaller of its two forms' (the decompressed one adds its up-projection to what a cached token
    costs). With windows: the first K/T at which the load catches up, from the exact pairs and bytes of those layers.

    Args:
        model: the model.
        hardware: gives C.
        link: gives BW.
        new: T, tokens, above 0; need not be whole.
        convention: default ``"dense"``.

    Returns:
        A float, or a float64 array of the shape of ``new``; ``inf`` where loading never takes longer.

    Raises:
        ConfigError: for a T that is not above 0.

    Source: equality of K·B/BW and (F·T + a·(T·K + T²/2))/C, solved for K/T. It leaves out the output head and the
    streaming of weights; :func:`kappa_turn` has them.
    """
    return _crossing(model, hardware.flops(convention), link.read, new, exact=False, stream=math.inf)


def kappa_turn(
    model: ModelSpec, hardware: HardwareSpec, link: LinkSpec, new: ArrayLike, convention: Convention = "dense"
) -> Any:
    """The K/T at which load and computation take equally long when everything counts.

    As :func:`kappa_crit`, with the output head, the diagonal half pair, and the time to stream the touched weights, which
    is what binds for few new tokens.

    Args, returns and errors: as :func:`kappa_crit`.
    """
    return _crossing(model, hardware.flops(convention), link.read, new, exact=True, stream=hardware.hbm_bandwidth)


def t_star(model: ModelSpec, hardware: HardwareSpec, link: LinkSpec, convention: Convention = "dense") -> float:
    """T*: from this many new tokens on, loading a prefix of any length is faster than computing behind it.

    The pole of κ_crit, B·C/(a·BW) over the layers without a window; latent attention: the larger of its two forms',
    (B·C/BW - up-projection)/a for the decompressed one. Where windows bound the load, the smallest whole T at which it
    never catches up.

    Args:
        model: the model.
        hardware: gives C.
        link: gives BW.
        convention: default ``"dense"``.

    Returns:
        Tokens.
    """
    rate = hardware.flops(convention)
    budget = model.growing_kv_bytes * rate / link.read
    growing = sum(window is None for window in model.windows)
    poles = [(budget - growing * up) / (growing * a) for a, up in _forms(model) if growing]
    pole = max([0.0, *poles])
    if not model.windowed:
        return pole
    low = math.floor(pole)
    if low < pole and math.isinf(kappa_crit(model, hardware, link, math.ceil(pole), convention)):
        return pole
    high = max(1, math.ceil(pole))
    while math.isfinite(kappa_crit(model, hardware, link, high, convention)):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (middle, high) if math.isfinite(kappa_crit(model, hardware, link, middle, convention)) else (low, middle)
        )
    return float(high)


def kappa_ratio(cached: ArrayLike, new: ArrayLike) -> NDArray[np.float64]:
    """κ_ratio = K/T of each request of a workload.

    Args:
        cached: K, tokens; at least 0.
        new: T, tokens; at least 1. Broadcasts with ``cached``.

    Raises:
        ConfigError: for values below that.
    """
    k, t = np.asarray(cached, np.float64), np.asarray(new, np.float64)
    if not (np.all(k >= 0) and np.all(t >= 1)):
        raise ConfigError(
            "a request has fewer than 0 cached or 1 new tokens: at least the last token is always computed"
        )
    return np.asarray(k / t, np.float64)


def _forms(model: ModelSpec) -> Iterator[tuple[int, int]]:
    """For each form of execution, operations in one layer of a pair, and of a cached token."""
    for form, a in pair_flops(model).items():
        yield a, up_flops(model) if form == "decompressed" else 0


def _crossing(model: ModelSpec, rate: float, link: float, new: ArrayLike, *, exact: bool, stream: float) -> Any:
    t = np.asarray(new, np.float64)
    if not np.all(t > 0) or not np.all(np.isfinite(t)):
        raise ConfigError(f"new={new!r} is not allowed; it must be above 0 tokens")
    linear = 2.0 * model.n_active * t
    half = t * (t + 1) / 2 if exact else t * t / 2
    if exact:
        linear = linear + 2.0 * model.head_params
    found = np.full(t.shape, np.inf)
    if model.windowed:
        found = np.vectorize(lambda each, base, diagonal: _windowed(model, rate, link, each, base, diagonal))(
            t, linear, half
        )
    else:
        for a, up in _forms(model):
            a, up = a * model.layers, up * model.layers
            slope = model.kv_bytes_per_token / link - (a * t + up) / rate
            root = np.divide((linear + a * half) / rate, slope, out=np.full(t.shape, np.inf), where=slope > 0)
            found = np.minimum(found, root)
    if math.isfinite(stream):  # the load must also outlast the streaming of the weights
        floor = np.asarray(weight_bytes(model, np.ceil(t))) / stream
        found = np.maximum(found, _loaded_in(model, link, floor))
    found = found / t
    return float(found) if found.ndim == 0 else found


def _loaded_in(model: ModelSpec, link: float, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """The K whose load takes ``seconds``; inf where windows keep it below."""
    if not model.windowed:
        return np.asarray(seconds * link / model.kv_bytes_per_token)
    windows = sorted({window for window in model.windows if window is not None})
    knots = np.array([0.0, *(window - 1 for window in windows)])
    sizes = np.array([sum(min(k, math.inf if w is None else w - 1) for w in model.windows) for k in knots])
    want = seconds * link / model.layer_kv_bytes
    inside = np.interp(want, sizes, knots)
    growing = sum(window is None for window in model.windows)
    beyond = knots[-1] + (want - sizes[-1]) / growing if growing else np.full(np.shape(want), np.inf)
    return np.asarray(np.where(want <= sizes[-1], inside, beyond))


def _windowed(model: ModelSpec, rate: float, link: float, new: float, linear: float, half: float) -> float:
    """The first K at which the load takes as long, with sliding windows: on the grid up to the widest one, then linear."""
    (a, _), size = next(_forms(model)), model.layer_kv_bytes
    widest = max(window for window in model.windows if window is not None)
    k = np.arange(widest + 1, dtype=np.float64)
    late = np.full(k.shape, -linear / rate)  # load minus computation
    growing = 0
    for kind, count in model.counted:
        if kind.window is None:
            growing += count
            late += count * (k * size / link - a * (new * k + half) / rate)
        else:
            free = np.clip(kind.window - k, 0, new)
            seen = free * k + free * (free + 1) / 2 + (new - free) * kind.window
            late += count * (np.minimum(k, kind.window - 1) * size / link - a * seen / rate)
    hits = np.flatnonzero(late >= 0)
    if hits.size:
        at = int(hits[0])
        return at - late[at] / (late[at] - late[at - 1]) if at else 0.0
    slope = growing * (size / link - a * new / rate)
    return math.inf if slope <= 0 else widest - float(late[-1]) / slope
