"""What is known of this machine from the requests so far, and which way to the first token it makes the fastest."""

from __future__ import annotations

import datetime
import itertools
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from kvtier.errors import ConfigError, UnsupportedError
from kvtier.kappa import Measured, MeasuredTier, ModelSpec
from kvtier.kappa.cost import flops, weight_bytes
from kvtier.kappa.measured import TIERS
from kvtier.kappa.passes import Passes

__all__ = ["Meter", "Plan", "plan", "saves"]

_MEMORY = 0.7
"""What a sum keeps of the past with each request: about the last three count."""
_STALE = 16
"""Decisions after which the rate of a tier that was not used meanwhile is measured again."""
_PASSES = 64
"""Passes that the fit of the computation follows."""
_MARGIN = 0.02
"""The share by which computing more than the new tokens must be faster than not doing so."""


@dataclass
class _Rate:
    """Work over time, the past fading."""

    work: float = 0.0
    seconds: float = 0.0
    idle: int = 0

    def add(self, work: float, seconds: float) -> None:
        self.work = self.work * _MEMORY + work
        self.seconds = self.seconds * _MEMORY + seconds
        self.idle = 0


class Meter:
    """Live measurements of one model on one store.

    A pass of T tokens behind K cached ones takes about ``f + a·T + b·T·K``: weights to stream, work of each token, and its
    attention to those before it. The three follow the last passes by least squares.

    Args:
        model: a Hugging Face model.
        chunk: tokens of the longest pass.
        start: what was measured before, if anything; live figures replace it as they come.
    """

    def __init__(self, model: Any, chunk: int, start: Measured | None = None) -> None:
        self._start = start
        try:
            self.spec: ModelSpec | None = start.model if start else ModelSpec.from_config(model.config)
        except (ConfigError, UnsupportedError):
            self.spec = None  # a model that the cost model does not know: everything stored is loaded
        self._chunk = max(chunk, 2)  # the table has a pass of one token, and a longer one
        self._passes: deque[tuple[int, int, float]] = deque(maxlen=_PASSES)
        self._tiers: dict[str, _Rate] = {}
        self._lock = threading.Lock()

    def computed(self, passes: Sequence[tuple[int, int, float]]) -> None:
        """Count the passes of a request: tokens before it, tokens in it, seconds."""
        with self._lock:
            self._passes.extend(passes)

    def loaded(self, sizes: Mapping[str, int], seconds: Mapping[str, float]) -> None:
        """Count what a request loaded from each tier, and how long that tier was busy."""
        with self._lock:
            for tier, size in sizes.items():
                if tier in TIERS and seconds[tier] > 0:
                    self._tiers.setdefault(tier, _Rate()).add(size, seconds[tier])

    def measured(self) -> Measured | None:
        """All of it for :func:`plan`; ``None`` before the first computation and load."""
        with self._lock:
            start, spec = self._start, self.spec
            tiers = {tier.kind: tier for tier in start.tiers} if start else {}
            for kind, rate in list(self._tiers.items()):
                rate.idle += 1
                if rate.idle > _STALE:
                    del self._tiers[kind]
                    tiers.pop(kind, None)
                else:
                    tiers[kind] = MeasuredTier(kind, rate.work / rate.seconds)
            if spec is None or not tiers or not (self._passes or start):
                return None
            if not self._passes:
                assert start is not None
                return replace(start, tiers=tuple(tiers.values()))
            table = self._table()
        one, chunk = table.seconds[0]
        return Measured(
            spec,
            float(flops(spec, 0, self._chunk, head=False).total) / chunk,
            float(weight_bytes(spec, 1)) / one,
            tuple(tiers.values()),
            datetime.date.today().isoformat(),
            passes=table,
        )

    def _table(self) -> Passes:
        """The fit as a table, which is linear in K and in T between its points, as the fit is."""
        cached, new, seconds = np.array(self._passes, np.float64).T
        terms = np.stack([np.ones_like(new), new, new * cached], 1)
        # What did not vary cannot be told apart: passes of one length say nothing of f, those behind one K nothing of b.
        told = [i for i, varies in enumerate((len({*new}) > 1, True, len({*cached}) > 1)) if varies]
        best, fit = np.inf, np.zeros(3)
        # Nothing takes a negative time: the best fit lies inside, or where some of the three are 0.
        for used in (list(some) for count in range(1, 4) for some in itertools.combinations(told, count)):
            # In shares of what was measured, or short passes would not count.
            shares = terms[:, used] / seconds[:, None]
            found = np.linalg.lstsq(shares, np.ones_like(seconds), rcond=None)[0]
            error = float(np.square(shares @ found - 1).sum())
            if (found >= 0).all() and error < best:
                best, fit = error, np.zeros(3)
                fit[used] = found
        fixed, each, pair = map(float, fit)
        far = max(int(cached.max()), self._chunk)
        rows = [[max(fixed + t * (each + pair * k), 1e-9) for t in (1, self._chunk)] for k in (0, far)]
        return Passes((0, far), (1, self._chunk), tuple(map(tuple, rows)))


@dataclass(frozen=True)
class Plan:
    """How a request's prefix comes to be."""

    front: int
    """Stored tokens to compute, from the start; the others are loaded."""
    action: Literal["load", "recompute", "split"]
    why: str
    predicted: Mapping[str, float]
    """``load_s, front_s, new_s, ttft_s``; empty where nothing was measured."""


def plan(
    cached: int,
    new: int,
    tiers: Sequence[str],
    sizes: Sequence[int],
    grid: int,
    groups: int,
    measured: Measured | None,
    front: int | None = None,
) -> Plan:
    """The fastest way: how much of the stored prefix to compute while the rest loads.

    Args:
        cached: stored tokens, whole chunks.
        new: tokens behind them, at least 1.
        tiers: where each block of them lies.
        sizes: bytes to load of each.
        grid: tokens a chunk; the front is whole chunks.
        groups: in how many steps the layers load.
        measured: the machine; ``None`` loads everything, and so measures.
        front: a choice that was made already.

    Returns:
        The plan; in each, TTFT = max(front_s + new_s, load_s + first_s / groups + further_s): the front and the first
        chunk of new tokens are computed while the tail loads, only the last layers of that chunk must wait for its last
        layers (:func:`kvtier.kappa.pipelined`, with a front), and further chunks follow.
    """
    if not cached:
        return Plan(0, "recompute", "nothing of this prompt is stored", {})
    if measured is None or any(tier not in measured.rates for tier in tiers):
        if front is not None:
            return Plan(front, _action(front, cached), "as asked", {})
        return Plan(0, "load", f"{cached} tokens are stored, and what loading takes is not known yet", {})
    block_tokens = cached // len(tiers)
    after = measured.prefill.last(cached, new)
    behind = after - measured.prefill.last(cached, min(new, grid)) * (1 - 1 / groups)
    load_s, loads = 0.0, [0.0] * (cached // grid + 1)
    per_tier = dict.fromkeys(tiers, 0.0)
    for chunk in range(cached // grid - 1, -1, -1):
        for block in range(chunk * grid // block_tokens, (chunk + 1) * grid // block_tokens):
            per_tier[tiers[block]] += sizes[block] * measured.rates[tiers[block]][0]
        load_s = max(per_tier.values()) if measured.concurrent else sum(per_tier.values())
        begin_s = max((measured.rates[tier][1] for tier, t in per_tier.items() if t), default=0.0)
        loads[chunk] = load_s + measured.hit_s + begin_s

    def total(chunk: int) -> float:
        front_s = measured.prefill.prefix(chunk * grid)
        return max(front_s + after, loads[chunk] + behind) if loads[chunk] else front_s + after

    if front is None:
        best, lowest = 0, total(0)
        for chunk in range(1, len(loads)):
            if (now := total(chunk)) < lowest * (1 - _MARGIN):
                best, lowest = chunk, now
        chosen = best
    else:
        chosen = front // grid
    terms = {
        "load_s": loads[chosen],
        "front_s": measured.prefill.prefix(chosen * grid),
        "new_s": after,
        "ttft_s": total(chosen),
    }
    action = _action(chosen * grid, cached)
    others = {"load": total(0), "recompute": total(len(loads) - 1)}
    if front is not None:
        why = f"as asked{measured.mark}"
    elif action == "split":
        why = f"computing {chosen * grid} of {cached} stored tokens while the rest loads: {terms['ttft_s']:.3g} s, {min(others.values()):.3g} s otherwise{measured.mark}"
    else:
        other = "recompute" if action == "load" else "load"
        why = f"to {action} all {cached} stored tokens takes {others[action]:.3g} s to the first token, to {other} them {others[other]:.3g} s{measured.mark}"
    return Plan(chosen * grid, action, why, terms)


def saves(fewer: Plan, everything: Plan) -> bool:
    """Whether leaving stored tokens out is predicted to be faster by a margin; true where nothing was measured."""
    if not (fewer.predicted and everything.predicted):
        return True
    return fewer.predicted["ttft_s"] < everything.predicted["ttft_s"] * (1 - _MARGIN)


def _action(front: int, cached: int) -> Literal["load", "recompute", "split"]:
    if front >= cached:
        return "recompute"
    return "split" if front else "load"
