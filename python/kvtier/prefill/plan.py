"""What is known of this machine from the requests so far, and which way to the first token it makes the fastest."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvtier.errors import ConfigError, UnsupportedError
from kvtier.kappa import Decision, Measured, MeasuredTier, ModelSpec, Request, Residency, decide
from kvtier.kappa.cost import flops, weight_bytes
from kvtier.kappa.measured import TIERS

__all__ = ["Meter", "Plan", "plan"]

_MEMORY = 0.7
"""What a sum keeps of the past with each request: about the last three count."""
_STALE = 16
"""Decisions after which the rate of a tier that was not used meanwhile is measured again."""
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

    Args:
        model: a Hugging Face model.
        start: what was measured before, if anything; live figures replace it as they come.
    """

    def __init__(self, model: Any, start: Measured | None = None) -> None:
        self._start = start
        try:
            self.spec: ModelSpec | None = start.model if start else ModelSpec.from_config(model.config)
        except (ConfigError, UnsupportedError):
            self.spec = None  # a model that the cost model does not know: everything stored is loaded
        self._itemsize = model.dtype.itemsize
        self._compute = _Rate()
        self._smallest: tuple[int, float] | None = None
        self._tiers: dict[str, _Rate] = {}
        self._lock = threading.Lock()

    def computed(self, passes: Sequence[tuple[int, int, float]]) -> None:
        """Count the passes of a request: tokens before it, tokens in it, seconds."""
        if self.spec is None or not passes:
            return
        largest = max(new for _, new, _ in passes)
        with self._lock:
            # Short passes stream weights rather than compute: they bound the memory's rate instead.
            long = [(cached, new, seconds) for cached, new, seconds in passes if 2 * new >= largest and new >= 32]
            if long:
                work = sum(float(flops(self.spec, cached, new, head=False).total) for cached, new, _ in long)
                self._compute.add(work, sum(seconds for *_, seconds in long))
            _, new, seconds = min(passes, key=lambda each: each[1])
            if self._smallest is None or new <= self._smallest[0]:
                self._smallest = new, seconds

    def loaded(self, sizes: Mapping[str, int], seconds: Mapping[str, float]) -> None:
        """Count what a request loaded from each tier, and how long that tier was busy."""
        with self._lock:
            for tier, size in sizes.items():
                if tier in TIERS and seconds[tier] > 0:
                    self._tiers.setdefault(tier, _Rate()).add(size, seconds[tier])

    def measured(self) -> Measured | None:
        """All of it for :func:`kvtier.kappa.decide`; ``None`` before the first computation and load."""
        with self._lock:
            tiers = {tier.kind: tier for tier in self._start.tiers} if self._start else {}
            for kind, rate in list(self._tiers.items()):
                rate.idle += 1
                if rate.idle > _STALE:
                    del self._tiers[kind]
                    tiers.pop(kind, None)
                else:
                    tiers[kind] = MeasuredTier(kind, rate.work / rate.seconds)
            start, spec = self._start, self.spec
            if spec is None or not tiers or not (self._compute.seconds or start):
                return None
            if self._compute.seconds:
                rate_c = self._compute.work / self._compute.seconds
            else:
                assert start is not None
                rate_c = start.flops_per_s
            if self._smallest is not None:
                new, seconds = self._smallest
                memory = float(weight_bytes(spec, new)) * (self._itemsize / spec.weight_bytes) / seconds
            else:
                assert start is not None
                memory = start.memory_bytes_per_s
            return Measured(spec, rate_c, memory, tuple(tiers.values()), datetime.date.today().isoformat())


@dataclass(frozen=True)
class Plan:
    """How a request's prefix comes to be."""

    front: int
    """Stored tokens to compute, from the start; the others are loaded."""
    action: Literal["load", "recompute", "split"]
    why: str
    predicted: Mapping[str, float]
    """``load_s, front_s, new_s, ttft_s``; empty where nothing was measured."""
    decision: Decision | None = None
    """What :func:`kvtier.kappa.decide` says of a load that is not overlapped."""


def plan(
    cached: int,
    new: int,
    tiers: Sequence[str],
    block_bytes: int,
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
        block_bytes: bytes of one.
        grid: tokens a chunk; the front is whole chunks.
        groups: in how many steps the layers load.
        measured: the machine; ``None`` loads everything, and so measures.
        front: a choice that was made already.

    Returns:
        The plan; in each, TTFT = max(front_s + new_s, load_s + new_s / groups): the front and the new tokens are
        computed while the tail loads, and only the last layers of the new tokens must wait for its last layers
        (:func:`kvtier.kappa.pipelined`, with a front).
    """
    if not cached:
        return Plan(0, "recompute", "nothing of this prompt is stored", {})
    if measured is None or any(tier not in measured.rates for tier in tiers):
        if front is not None:
            return Plan(front, _action(front, cached), "as asked", {})
        return Plan(0, "load", f"{cached} tokens are stored, and what loading takes is not known yet", {})
    block_tokens = cached // len(tiers)
    sizes: dict[str, float] = {}
    for tier in tiers:
        sizes[tier] = sizes.get(tier, 0.0) + block_bytes
    decision = decide(Request(cached, new), Residency(sizes), measured, granularity=grid)
    after = measured.prefill.last(cached, new)
    load_s, loads = 0.0, [0.0] * (cached // grid + 1)
    per_tier = dict.fromkeys(sizes, 0.0)
    for chunk in range(cached // grid - 1, -1, -1):
        for tier in tiers[chunk * grid // block_tokens : (chunk + 1) * grid // block_tokens]:
            per_tier[tier] += block_bytes * measured.rates[tier][0]
        load_s = max(per_tier.values()) if measured.concurrent else sum(per_tier.values())
        loads[chunk] = load_s + measured.hit_s + max(measured.rates[tier][1] for tier, t in per_tier.items() if t)

    def total(chunk: int) -> float:
        front_s = measured.prefill.prefix(chunk * grid)
        return max(front_s + after, loads[chunk] + after / groups) if loads[chunk] else front_s + after

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
        why = "as asked"
    elif action == "split":
        why = f"computing {chosen * grid} of {cached} stored tokens while the rest loads: {terms['ttft_s']:.3g} s, {min(others.values()):.3g} s otherwise"
    else:
        other = "recompute" if action == "load" else "load"
        why = f"to {action} all {cached} stored tokens takes {others[action]:.3g} s to the first token, to {other} them {others[other]:.3g} s"
    return Plan(chosen * grid, action, why, terms, decision)


def _action(front: int, cached: int) -> Literal["load", "recompute", "split"]:
    if front >= cached:
        return "recompute"
    return "split" if front else "load"
