"""Load, recompute, or some of each: the decision for one request, fast enough to be made for every one."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvtier.errors import ConfigError
from kvtier.kappa.measured import Measured, Prefill
from kvtier.kappa.number import positive, whole
from kvtier.kappa.passes import Passes

__all__ = ["Decision", "Request", "Residency", "decide"]

Action = Literal["load", "recompute", "split"]


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Args:
        cached: K, tokens whose KV is kept.
        new: T, tokens that follow them; at least 1, for the last one gives the logits.

    Raises:
        ConfigError: for numbers below that.
    """

    cached: int
    new: int

    def __post_init__(self) -> None:
        whole("cached", self.cached, 0)
        whole("new", self.new)


@dataclass(frozen=True, slots=True)
class Residency:
    """Where the cached tokens lie.

    Args:
        bytes: what is to be loaded from each tier, in the order of the prompt: the front of the prefix first. A tier that
            evicts the end of a chain first (the default of kvtier) holds its front, so this is usually the fastest tier
            first. The bytes are those that move, encoded ones where a codec is at work, and are taken to be spread evenly
            over the tokens.

    Raises:
        ConfigError: for a number of bytes below 0.
    """

    bytes: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for tier, size in self.bytes.items():
            positive(f"the bytes in {tier}", size, zero=True)


class Decision(NamedTuple):
    """What to do, and what each choice would take."""

    action: Action
    """``"load"`` all cached tokens, ``"recompute"`` all, or ``"split"``: compute the first ``split_at``, load the rest."""
    split_at: int
    """Tokens to compute from the front: 0 to load, all cached ones to recompute."""
    predicted_s: float
    """The TTFT to expect."""
    why: str
    """One line for people."""
    load_s: float
    """The TTFT by loading all."""
    recompute_s: float
    """The TTFT by computing all in one pass."""
    split_s: float
    """The TTFT by the best split; infinite where there is none."""


class _Line(NamedTuple):
    """Seconds that a load still takes once s tokens from the front need none: ``full - slope·(s - start)``, in [0, full]."""

    start: float
    full: float
    slope: float


def decide(
    request: Request,
    residency: Residency,
    measured: Measured,
    *,
    granularity: int = 1,
    margin: float = 0.0,
    groups: int = 1,
) -> Decision:
    """The fastest way to the first token.

    Args:
        request: K and T.
        residency: where the K tokens lie.
        measured: the machine and the model; see :meth:`Measured.from_toml`. Keep it: what it derives is kept with it.
        granularity: a split is a multiple of so many tokens, ``block_tokens`` for a store. Default 1.
        margin: the share of the better of load and recompute by which a split must be faster. Default 0.
        groups: in how many steps the layers load while the first pass of new tokens is computed, layers that are
            there first: only its last step waits for the last of them (:func:`kvtier.kappa.pipelined`). Default 1:
            first all is loaded, then computed.

    Returns:
        The decision. Takes about ten microseconds, and does not block.

    Raises:
        ConfigError: for a tier that was not measured, cached tokens without bytes, or bad granularity or groups.

    Source: TTFT as in :mod:`kvtier.kappa.ttft`, and the split of Jin et al. (ICML 2025); here solved directly, for
    the load is a few straight lines and the computation a parabola over a floor. The prefill engine decides by the
    same rule, block by block.
    """
    cached, new, prefill = request.cached, request.new, measured.prefill
    recompute = prefill.last(0, cached + new)
    if not cached:
        return Decision("recompute", 0, recompute, f"nothing is cached{measured.mark}", math.inf, recompute, math.inf)
    if type(granularity) is not int or granularity < 1:
        whole("granularity", granularity)
    whole("groups", groups)
    lines, size, first = _lines(cached, residency.bytes, measured)
    after = prefill.last(cached, new)
    full = _remaining(lines, 0, measured.concurrent)
    fixed = measured.hit_s + first
    loading = fixed + full
    if groups > 1:
        chunk = prefill.chunk if isinstance(prefill, Passes) else new
        fixed -= prefill.last(cached, min(new, chunk)) * (1 - 1 / groups)  # what hides behind the computation
    load = max(fixed + full, 0.0) + after
    s, both = _best(prefill, lines, cached, granularity, measured.concurrent, fixed) if load > after else (0, math.inf)
    split = both + after if 0 < s < cached else math.inf
    better = min(load, recompute)
    if split < better * (1 - margin):
        why = f"computing {s} of {cached} cached tokens while the rest loads: {split:.4g} s, {better:.4g} s otherwise{measured.mark}"
        return Decision("split", s, split, why, load, recompute, split)
    if load <= recompute:
        why = f"loading {size / 1e6:.4g} MB takes {loading:.4g} s, computing {cached} tokens again {recompute - after:.4g} s{measured.mark}"
        return Decision("load", 0, load, why, load, recompute, split)
    why = f"computing {cached} tokens again takes {recompute - after:.4g} s, loading {size / 1e6:.4g} MB {loading:.4g} s{measured.mark}"
    return Decision("recompute", cached, recompute, why, load, recompute, split)


def _lines(cached: int, sizes: Mapping[str, float], measured: Measured) -> tuple[list[_Line], float, float]:
    """The load of each tier as a line over s, all bytes, and the longest latency."""
    size = sum(sizes.values())
    if size <= 0:
        raise ConfigError(f"the residency has no bytes for {cached} cached tokens: say which tiers hold them")
    rates, lines, first, before = measured.rates, [], 0.0, 0.0
    for tier, part in sizes.items():
        if tier not in rates:
            raise ConfigError(f"the tier {tier!r} was not measured; there are {', '.join(rates)}: calibrate with it")
        if part > 0:
            per_byte, latency = rates[tier]
            first = max(first, latency)
            start = cached * before / size
            lines.append(_Line(start, part * per_byte, size * per_byte / cached))
            before += part
    if measured.concurrent and measured.shared_bytes_per_s is not None:
        lines.append(_Line(0, size / measured.shared_bytes_per_s, size / measured.shared_bytes_per_s / cached))
    return lines, size, first


def _remaining(lines: list[_Line], s: float, concurrent: bool) -> float:
    """Seconds to load what lies behind the first s tokens."""
    total = 0.0
    for start, full, slope in lines:
        left = full if s <= start else full - slope * (s - start)
        if concurrent:
            total = max(total, left)
        elif left > 0:
            total += left
    return total


def _best(
    prefill: Prefill | Passes, lines: list[_Line], cached: int, step: int, concurrent: bool, fixed: float
) -> tuple[int, float]:
    """The best s, a multiple of ``step`` above 0 (0 if there is none below K), and the seconds until both are done."""
    if isinstance(prefill, Passes):
        step = math.lcm(step, prefill.chunk)  # the front is computed in whole passes
    if step >= cached:
        return 0, math.inf
    if isinstance(prefill, Passes):
        meet: float = _chunks(prefill, lines, cached, step, concurrent, fixed) * step
    else:
        meet = _meeting(prefill, lines, cached, concurrent, fixed)
    low = min(max(int(meet / step), 1), (cached - 1) // step)
    high = min(low + 1, (cached - 1) // step)
    best, lowest = 0, math.inf
    for count in (low, high):
        s = count * step
        longer = max(prefill.prefix(s), fixed + _remaining(lines, s, concurrent))
        if longer < lowest:
            best, lowest = s, longer
    return best, lowest


def _chunks(prefill: Passes, lines: list[_Line], cached: int, step: int, concurrent: bool, fixed: float) -> int:
    """The last multiple of ``step``, counted in steps, at which the computation is done first; 0 if there is none."""
    times = prefill.chunks(-(-cached // prefill.chunk))[:: step // prefill.chunk]
    high = bisect_left(times, fixed + _remaining(lines, 0, concurrent))  # the load never takes longer than all of it
    low = bisect_left(times, fixed + _remaining(lines, high * step, concurrent), 0, high) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if times[middle] >= fixed + _remaining(lines, middle * step, concurrent):
            high = middle
        else:
            low = middle
    return max(low, 0)


def _meeting(prefill: Prefill, lines: list[_Line], cached: int, concurrent: bool, fixed: float) -> float:
    """A real s so that computation and load cross in the token at or after it."""
    if prefill.prefix(1) >= fixed + _remaining(lines, 1, concurrent):
        return 0.0
    if concurrent:
        meet = max([_cross(prefill, line, cached, fixed) for line in lines])
    else:  # one after the other: which of them is being saved when they meet?
        later, meet = fixed + sum([line.full for line in lines]), float(cached)
        for line in lines:
            later -= line.full
            end = line.start + line.full / line.slope
            if end >= cached or prefill.prefix(math.ceil(end)) >= later:
                meet = _cross(prefill, line, cached, later)
                break
    if meet <= prefill.vocab:
        return meet
    return _search(prefill, lines, cached, concurrent, fixed)  # the embedding is all read, which no curve here knows


def _cross(prefill: Prefill, line: _Line, cached: int, more: float) -> float:
    """Where a prefix's computation meets ``more`` + the line: where the first of its two terms does."""
    start, full, slope = line
    flat = more + full - prefill.pass_s
    # Operations: (p·s(s+1)/2 + q·s + c)/C, by the quadratic formula.
    for pair, linear, constant, upto in prefill.parabolas:
        a = pair * 0.5 * prefill.per_flop
        b = (linear + pair * 0.5) * prefill.per_flop
        c = constant * prefill.per_flop
        if upto == math.inf or (a * upto + b) * upto + c >= flat - (slope * (upto - start) if upto > start else 0.0):
            break
    rest, steeper = flat - c, b
    if (a * start + b) * start < rest:
        rest, steeper = rest + slope * start, b + slope
    if rest <= 0:
        return 0.0
    meet = min(2 * rest / (steeper + math.sqrt(steeper * steeper + 4 * a * rest)), float(cached))
    if prefill.streaming(meet) <= (a * meet + b) * meet + c:
        return meet
    # Streaming: fixed + E·(1 - u^s) + rows·s is concave and rises, so Newton's steps from the left end at the root.
    s, per_token = 1.0, prefill.row_s
    if prefill.streaming(start) < flat:
        s, per_token, flat = max(start, 1.0), per_token + slope, flat + slope * start
    experts, untouched = prefill.experts_s, prefill.untouched
    if not experts:
        return min(max((flat - prefill.fixed_s) / per_token, 0.0), meet)
    rate = -experts * math.log(untouched) if untouched else 0.0
    for _ in range(60):
        left = untouched**s
        step = (flat - prefill.fixed_s - experts * (1 - left) - per_token * s) / (rate * left + per_token)
        s += step
        if step < 0.01 or s > meet:
            break
    return min(max(s, 0.0), meet)


def _search(prefill: Prefill, lines: list[_Line], high: int, concurrent: bool, fixed: float) -> float:
    """The last whole s in [1, high) at which the computation is done first, if it is at 1 and not at ``high``.

    False position, with a halving step wherever that gains little.
    """
    low, turn = 1, 0
    below = fixed + _remaining(lines, 1, concurrent) - prefill.prefix(1)
    above = prefill.prefix(high) - fixed - _remaining(lines, high, concurrent)
    while high - low > 1:
        turn += 1
        middle = (low + high) // 2
        if turn % 3 and below + above > 0:
            middle = min(max(low + int((high - low) * below / (below + above)), low + 1), high - 1)
        late = prefill.prefix(middle) - fixed - _remaining(lines, middle, concurrent)
        if late >= 0:
            high, above = middle, late
        else:
            low, below = middle, -late
    return float(low)
