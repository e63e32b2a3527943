"""Prefills over a link that is slowed on purpose, beside what their parts take in the same run. Needs torch."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtier.bench.figures import Pair, Row, compared, spread
from kvtier.config import Dram
from kvtier.identity import Identity
from kvtier.integrations.tensors import BlockBuffer
from kvtier.kappa.chart import Axis, Series, chart
from kvtier.prefill import PrefillEngine, PrefillReport, layout_of
from kvtier.store import Store

__all__ = [
    "FULL_SWEEP",
    "QUICK_SWEEP",
    "Bench",
    "Point",
    "Sweep",
    "interval",
    "prefill_suite",
    "sweep_chart",
    "with_interval",
]


@dataclass(frozen=True)
class Sweep:
    """What is run.

    Attributes:
        cached: K, stored tokens.
        new: T, tokens behind them, at most a chunk.
        pipelined: K and T of the pipelined row, where loading and computing take about as long.
        chunk: tokens of a pass; in the pipelined row all new ones are one.
        pairs: interleaved samples a figure; at least 9.
        factors: link rates, as multiples of the one at which loading takes as long as computing.
    """

    cached: int = 256
    new: int = 32
    pipelined: tuple[int, int] = (1024, 256)
    chunk: int = 32
    pairs: int = 9
    factors: tuple[float, ...] = (0.6, 1.0, 1.7)


QUICK_SWEEP = Sweep()
"""Two to three minutes on two cores with a model of 135M parameters."""
FULL_SWEEP = Sweep(2048, 64, (4096, 512), 256, 15, (0.125, 0.25, 0.5, 0.71, 1.0, 1.41, 2.0, 4.0, 8.0))


@dataclass
class Point:
    """One rate of the sweep: medians of seconds to the first token, and the ratios of each sample."""

    rate: float
    """GB/s."""
    load: float
    compute: float
    pipelined: float
    split: float
    bound: float
    """The ideal split: max(front, load of the rest) + new, with what the parts took in the same sample."""
    over_bound: list[float]
    over_better: list[float]
    errors: list[float]
    """|predicted - measured| / measured of the split."""
    compute_spread: float
    """Interquartile range / median of the compute-only times: how steady the machine was."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """A confidence interval of the median of at least 95 %, by order statistics; of fewer than 6 values, their range."""
    ordered, count = sorted(values), len(values)
    chance, drop = 0.5**count, 0
    # P(fewer than k of n lie below the median) is binomial.
    total, term = chance, chance
    while drop + 1 < count / 2:
        term = term * (count - drop) / (drop + 1)
        if 2 * (total + term) > 0.05 or 2 * total > 0.05:
            break
        total += term
        drop += 1
    keep = drop if 2 * total <= 0.05 else 0
    return ordered[keep], ordered[count - 1 - keep]


def with_interval(values: Sequence[float]) -> str:
    """A median, and its :func:`interval`, in words."""
    low, high = interval(values)
    return f"{statistics.median(values):.2f} ({low:.2f} to {high:.2f})"


class Bench:
    """A model, prompts, and the KV of their stored parts."""

    def __init__(self, model: Any, sweep: Sweep) -> None:
        self.model, self.sweep = model, sweep
        self.layout = layout_of(model)
        length = max(sweep.cached + sweep.new, sum(sweep.pipelined))
        self.tokens = [random.Random(1).randrange(model.config.vocab_size) for _ in range(length)]
        self.blocks = length // self.layout.block_tokens
        self.source = BlockBuffer(self.layout, self.blocks)
        with self.engine(None, 0, sweep.chunk) as engine:
            result = engine.run(self.tokens)
            self.source.read_from([(la.keys, la.values) for la in result.cache.layers], 0, self.blocks)
            whole = engine.run(self.tokens[: sweep.cached + sweep.new], front=sweep.cached).report
        self.compute_s = whole.compute_s

    @contextmanager
    def engine(self, gbs: float | None, cached: int, chunk: int) -> Iterator[PrefillEngine]:
        """An engine over memory of that rate, which holds the KV of the first ``cached`` tokens."""
        size = self.layout.bytes_per_token * len(self.tokens) * 5 // 4 + (64 << 20)
        with Store(Dram(size, emulate_gbs=gbs)) as store:
            store.prefaulted(timeout=60)
            blocks = store.namespace(Identity(b"bench"), self.layout)
            keys = blocks.chain(self.tokens[:cached])
            blocks.put_many(keys, self.source.rows(len(keys)), parents=[None, *keys][: len(keys)])
            with PrefillEngine(self.model, blocks, chunk_tokens=chunk) as engine:
                yield engine

    def pipelined(self) -> Row:
        """The row of layers that load while others are computed."""
        cached, new = self.sweep.pipelined
        tokens = self.tokens[: cached + new]
        with self.engine(None, cached, new) as engine:
            new_s = statistics.median(
                engine.run(tokens, front=0, overlap=False).report.measured["new_s"] for _ in range(3)
            )
        rate = cached * self.layout.bytes_per_token / new_s / 1e9
        samples: list[Pair] = []
        with self.engine(rate, cached, new) as engine:
            for i in range(self.sweep.pairs):
                pair: dict[bool, PrefillReport] = {}
                for overlap in (i % 2 == 0, i % 2 != 0):
                    pair[overlap] = engine.run(tokens, front=0, overlap=overlap).report
                alone = pair[False].measured
                samples.append((max(alone["load_s"], alone["new_s"]), pair[True].ttft_s))
        ratios = [value / bound for bound, value in samples]
        note = f"K={cached}, T={new}, DRAM emulated at {rate:.3g} GB/s; {_ci(ratios)}"
        return compared("ttft_pipelined", "s", samples, "max(load, compute), each alone", note)

    def point(self, factor: float) -> Point:
        """One rate of the sweep."""
        sweep = self.sweep
        size = sweep.cached * self.layout.bytes_per_token
        rate = factor * size / self.compute_s / 1e9
        tokens = self.tokens[: sweep.cached + sweep.new]
        ways: list[dict[str, Any]] = [
            {"front": 0, "overlap": False},
            {"front": sweep.cached},
            {"front": 0},
            {},
        ]
        seconds: list[list[float]] = [[], [], [], []]
        bounds, over, better, errors = [], [], [], []
        with self.engine(rate, sweep.cached, sweep.chunk) as engine:
            for way in ways:  # the engine measures, torch warms up
                engine.run(tokens, **way)
            for i in range(sweep.pairs):
                reports: list[PrefillReport | None] = [None] * 4
                for j in range(4):
                    which = (i + j) % 4
                    reports[which] = engine.run(tokens, **ways[which]).report
                load, compute, pipelined, split = (report for report in reports if report is not None)
                for times, report in zip(seconds, (load, compute, pipelined, split), strict=True):
                    times.append(report.ttft_s)
                bounds.append(_ideal(load, compute, sweep))
                over.append(split.ttft_s / bounds[-1])
                better.append(split.ttft_s / min(load.ttft_s, compute.ttft_s))
                errors.append(abs(split.predicted["ttft_s"] / split.ttft_s - 1))
        load_s, compute_s, pipelined_s, split_s = (statistics.median(times) for times in seconds)
        steady = spread(seconds[1]) or 0.0
        bound = statistics.median(bounds)
        return Point(rate, load_s, compute_s, pipelined_s, split_s, bound, over, better, errors, steady)


def _ideal(load: PrefillReport, compute: PrefillReport, sweep: Sweep) -> float:
    """Min over s of max(seconds to compute s tokens, seconds to load the others) + seconds of the new ones."""
    ends: dict[int, float] = {0: 0.0}
    for event in compute.timeline:
        if event.kind == "compute" and event.tokens[1] <= sweep.cached:
            ends[event.tokens[1]] = ends.get(event.tokens[1], 0.0) + event.end_s - event.start_s
    at = np.array(sorted(ends))
    fronts = np.cumsum([ends[tokens] for tokens in at])
    s = np.linspace(0, sweep.cached, 4097)
    rest = load.measured["load_s"] * (1 - s / sweep.cached)
    return float(np.maximum(np.interp(s, at, fronts), rest).min()) + load.measured["new_s"]


def _ci(values: Sequence[float]) -> str:
    low, high = interval(values)
    return f"95 % interval {low:.3f} to {high:.3f}"


def prefill_suite(
    model: Any, sweep: Sweep, say: Callable[[str], None] = lambda _: None, points: list[Point] | None = None
) -> Iterator[Row]:
    """The rows of the prefill suite, as they are measured. Blocks for as long as that takes.

    Args:
        model: a Hugging Face model.
        sweep: how much is run.
        say: told what is measured next.
        points: takes the points of the sweep, for :func:`sweep_chart`.
    """
    points = [] if points is None else points
    say("the KV of the prompt")
    bench = Bench(model, sweep)
    say("layers that load while others are computed")
    yield bench.pipelined()
    for factor in sweep.factors:
        say(f"a link of {factor:g} times the rate at which loading takes as long as computing")
        point = bench.point(factor)
        points.append(point)
        note = (
            f"K={sweep.cached}, T={sweep.new}, DRAM emulated at {point.rate:.3g} GB/s: load {point.load:.3g} s, compute {point.compute:.3g} s, "
            f"pipelined {point.pipelined:.3g} s; {_ci(point.over_bound)}; prediction off by {statistics.median(point.errors):.0%}"
        )
        name = "ttft_split" if factor == 1 else f"ttft_split_{factor:g}"
        ratio = statistics.median(point.over_bound)
        yield Row(
            name, point.split, "s", point.bound, "the ideal split", ratio, spread(point.over_bound), sweep.pairs, note
        )
    worst = max(points, key=lambda p: statistics.median(p.over_better))
    note = f"the worst of {len(points)} emulated rates, {worst.rate:.3g} GB/s; {_ci(worst.over_better)}"
    ratio = statistics.median(worst.over_better)
    bound = min(worst.load, worst.compute)
    yield Row(
        "ttft_split_vs_better",
        worst.split,
        "s",
        bound,
        "the better of load-only and compute-only",
        ratio,
        spread(worst.over_better),
        sweep.pairs,
        note,
    )


def sweep_chart(points: Sequence[Point], title: str) -> str:
    """TTFT against link rate, as SVG: load-only, compute-only, pipelined, split, and the ideal split."""
    names = {
        "load": "load only",
        "compute": "compute only",
        "pipelined": "pipelined",
        "split": "split",
        "bound": "ideal split",
    }
    series = [
        Series(
            label,
            [(p.rate * 1e3, getattr(p, name)) for p in points],
            dots=[(p.rate * 1e3, getattr(p, name)) for p in points],
        )
        for name, label in names.items()
    ]
    rates = [p.rate * 1e3 for p in points]
    top = max(max(p.load, p.compute) for p in points)
    x = Axis("MB/s (emulated)", min(rates), max(rates))
    return chart(title, x, Axis("TTFT, s", 0, top * 1.3, log=False), series)
