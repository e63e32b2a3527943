"""Requests on their way, one or several together: match, decide, load and compute at the same time, write back behind it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import DynamicCache

from kvtier.prefill.attended import most_attended
from kvtier.prefill.cache import Room
from kvtier.prefill.importance import AttentionMass
from kvtier.prefill.loading import Load, MissingError, tokens_to_read
from kvtier.prefill.model import forward_all, synchronise
from kvtier.prefill.plan import Plan, plan, saves
from kvtier.prefill.registry import packs
from kvtier.prefill.report import PrefillReport
from kvtier.prefill.storing import UNAVAILABLE, WriteBack
from kvtier.prefill.timeline import Event, busy

if TYPE_CHECKING:
    from kvtier.prefill.engine import PrefillEngine

__all__ = ["Prefill", "Request", "needed", "prefill_all"]


class Prefill(NamedTuple):
    """The result of a prefill."""

    logits: torch.Tensor
    """``[1, vocabulary]``: of the last token of the prompt, in the model's dtype and on its device."""
    cache: DynamicCache
    """The KV of the whole prompt, ready for the next token."""
    report: PrefillReport


Span = tuple[int, int]
"""Tokens, from and to."""


class Request:
    """One request, from the match to the report: making it decides what is computed. Its load is yet to be started.

    Args:
        engine: whose it is.
        tokens: the prompt.
        keys: of its blocks.
        begun: ``time.perf_counter()`` when it began.
        front: see :meth:`kvtier.prefill.PrefillEngine.run`.
        retain: see there.
    """

    def __init__(
        self,
        engine: PrefillEngine,
        tokens: list[int],
        keys: Sequence[bytes],
        begun: float,
        front: int | None,
        retain: float | None,
    ) -> None:
        self.engine = engine
        self.tokens = tokens
        self.begun = begun
        self.blocks = engine.blocks
        self.chunk = engine.chunk_tokens
        self.size = self.blocks.layout.block_tokens
        self.keys = keys
        self.room = Room(self.blocks.layout, len(tokens) + engine.reserve_tokens, engine.model.device)
        self.mass = AttentionMass(len(tokens), device=engine.model.device) if engine.importance else None
        self.stored = WriteBack(begun)
        self.events: list[Event] = []
        self.passes: list[tuple[int, int, float]] = []
        self.stalled = 0.0
        self.lost = 0
        self.new_s = self.front_s = 0.0
        self.match = self.blocks.match(self.keys)
        self.cached = _usable(engine, self.match.tokens, len(tokens))
        blocks = self.cached // self.size
        if front is not None:
            front = min(-(-front // self.chunk) * self.chunk, self.cached)
        kept = _kept(engine, self.keys[:blocks], retain)
        # Without the model's device, a block in HBM is read from below.
        tiers = [tier if self.engine._hbm or tier != "hbm" else "dram" for tier in self.match.tiers[:blocks]]
        measured = self.engine.meter.measured()

        def planned(reads: NDArray[np.bool_]) -> Plan:
            sizes, new = (reads.sum(1) * self.blocks.layout.bytes_per_token).tolist(), len(self.tokens) - self.cached
            return plan(self.cached, new, tiers, sizes, self.chunk, len(self.engine.groups), measured, front)

        self.plan = planned(tokens_to_read(self.blocks.layout, None, tiers))
        if kept is not None:
            reads = tokens_to_read(self.blocks.layout, kept, tiers)
            fewer = planned(reads)
            if front is None and (reads[fewer.front // self.size :].all() or not saves(fewer, self.plan)):
                kept = None  # what costs nothing is not left out
            else:
                self.plan = fewer
        self.emulated = not self.engine._emulated.isdisjoint(tiers)
        first = self.plan.front // self.size
        if kept is not None:
            kept[: self.plan.front] = True
            if not kept.all():
                self.room.hide(~kept)
        self.load = Load(
            self.blocks,
            self.room,
            first,
            self.keys[first:blocks],
            self.match.tiers[first:blocks],
            self.engine.groups,
            None if self.engine.timeout is None else time.perf_counter() + self.engine.timeout,
            self.begun,
            self.engine._stages,
            None if kept is None else kept[self.plan.front :],
        )

    def fronts(self) -> list[Span]:
        """The chunks of the front."""
        return [(start, start + self.chunk) for start in range(0, self.plan.front, self.chunk)]

    def news(self) -> list[Span]:
        """The chunks of the new tokens."""
        starts = range(self.cached, len(self.tokens), self.chunk)
        return [(start, min(start + self.chunk, len(self.tokens))) for start in starts]

    def missing(self) -> list[Span]:
        """The chunks that did not load. Blocks until nothing loads any more."""
        waited = time.perf_counter()
        self.load.finish()
        self.stall(waited, time.perf_counter(), -1, (0, 0))
        chunks = sorted({number * self.size // self.chunk for number in self.load.missing})
        return [(chunk * self.chunk, (chunk + 1) * self.chunk) for chunk in chunks]

    def stall(self, since: float, until: float, layer: int, tokens: Span) -> None:
        """The model waited."""
        self.stalled += until - since
        self.events.append(Event("stall", layer, tokens, since - self.begun, until - self.begun))

    def computed(self, span: Span, times: Sequence[tuple[int, float, float]]) -> None:
        """A pass has ended: which layer was computed from when until when, without waits."""
        for layer, since, until in times:
            self.events.append(Event("compute", layer, span, since - self.begun, until - self.begun))
        self.passes.append((span[0], span[1] - span[0], sum(until - since for _, since, until in times)))

    def keep(self, start: int, end: int) -> None:
        """Have the full blocks of a chunk stored."""
        first, last = start // self.size, min(end // self.size, len(self.keys))
        if first < last and self.room.cache.hidden is None:
            before = self.keys[first - 1] if first else None
            keys = self.keys[first:last]
            self.engine._writer.submit(self.room.pairs, self.room.readers, first, keys, before, self.stored)

    def end(self) -> None:
        """Load no more: the room is the caller's from here on."""
        self.room.watch(None)
        self.load.stop()

    def result(self, logits: torch.Tensor, ended: float, others: int) -> Prefill:
        """What the caller gets, once nothing loads any more; what was measured goes to the meter.

        Args:
            logits: of the last token.
            ended: when they were there.
            others: requests that were computed with it.
        """
        why = self.plan.why
        if self.match.tokens and not self.cached:
            why = f"{self.match.tokens} tokens are stored, which is less than a chunk of {self.chunk} before the last token"
        if others:
            why = f"{why}; decided as if alone, computed with {others} more"
        if self.load.missing:
            why = f"{why}; but loading failed: {self.load.reason}: {self.lost} tokens were computed again"
        if self.emulated and "(emulated)" not in why:  # measurements that were given may say so too
            why = f"{why} (emulated)"
        if self.mass is not None and self.keys:
            received = torch.stack([self.mass.mass, self.mass.seen])[:, : len(self.keys) * self.size]
            self.engine._writer.count(self.keys, received.cpu(), self.stored)
        report = self._report(ended, {} if others else self.plan.predicted, why)
        if not others:  # a pass of several says nothing of one
            self.engine.meter.computed(self.passes)
        self.engine.meter.loaded(report.bytes, report.load_s)
        return Prefill(logits, self.room.cache, report)

    def _report(self, ended: float, predicted: Mapping[str, float], why: str) -> PrefillReport:
        sizes: dict[str, int] = {}
        for event in self.load.events:
            sizes[str(event.tier)] = sizes.get(str(event.tier), 0) + event.bytes
        seconds = {tier: busy(e for e in self.load.events if e.tier == tier) for tier in sizes}
        hidden = self.room.cache.hidden
        left_out = 0 if hidden is None else int(hidden.sum())
        front = self.plan.front
        reused = self.cached - front - self.lost - left_out
        ttft = ended - self.begun
        return PrefillReport(
            tokens=len(self.tokens),
            tokens_matched=self.match.tokens,
            tokens_reused=reused,
            tokens_front=front,
            tokens_lost=self.lost,
            tokens_left_out=left_out,
            bytes=sizes,
            load_s=seconds,
            compute_s=sum(spent for *_, spent in self.passes),
            stalled_s=self.stalled,
            ttft_s=ttft,
            decision="recompute" if not reused else ("split" if front else "load"),
            why=why,
            emulated=self.emulated,
            predicted=predicted,
            measured={
                "load_s": busy(self.load.events),
                "front_s": self.front_s,
                "new_s": self.new_s,
                "ttft_s": ttft,
            },
            stored=self.stored,
            importance=None if self.mass is None else self.mass.scores().cpu(),
            timeline=tuple(sorted((*self.events, *self.load.events), key=lambda event: event.start_s)),
        )


def _usable(engine: PrefillEngine, matched: int, tokens: int) -> int:
    """How many stored tokens a prompt can use: whole chunks, and never its last token."""
    return min(matched, tokens - 1) // engine.chunk_tokens * engine.chunk_tokens


def _kept(engine: PrefillEngine, keys: Sequence[bytes], retain: float | None) -> torch.Tensor | None:
    """Which tokens of stored blocks are loaded, ``bool[tokens]``; ``None`` for all."""
    if retain is None or retain >= 1 or not keys:
        return None
    with suppress(*UNAVAILABLE):  # then nothing is known, and everything is loaded
        return most_attended(engine._attended.read(keys, engine.timeout), retain)
    return None


def needed(engine: PrefillEngine, keys: Sequence[bytes], *, tokens: int, retain: float | None) -> list[bytes]:
    """Of a prompt's keys those of the blocks that a request would load now. Blocks while it reads what was attended to.

    Args:
        engine: whose request it is.
        keys: of the prompt's blocks.
        tokens: of the prompt.
        retain: see :meth:`kvtier.prefill.PrefillEngine.run`.
    """
    size = engine.blocks.layout.block_tokens
    usable = list(keys[: _usable(engine, engine.blocks.match(keys).tokens, tokens) // size])
    kept = _kept(engine, usable, retain)
    if kept is None:
        return usable
    return [key for key, some in zip(usable, kept.view(-1, size).any(1).tolist(), strict=True) if some]


def prefill_all(engine: PrefillEngine, requests: Sequence[Request], overlap: bool) -> list[Prefill]:
    """Compute requests, each behind its own load: the fronts, then the new tokens of all. What is next of each of them goes
    through the model in one pass, if it takes several.

    Args:
        engine: whose they are.
        requests: any number.
        overlap: whether to compute while they load.
    """
    logits: dict[Request, torch.Tensor] = {}
    ended: dict[Request, float] = {}
    synchronise(engine.model.device)  # which may still read, for somebody else, what is the room now
    try:
        engine._stages.start([request.load for request in requests])
        if not overlap:
            for request in requests:
                waited = time.perf_counter()
                request.load.finish()
                request.stall(waited, time.perf_counter(), -1, (request.plan.front, request.cached))
        for step in itertools.zip_longest(*(request.fronts() for request in requests)):
            _compute(requests, step)
        for request in requests:
            request.front_s = sum(seconds for *_, seconds in request.passes)
        before = {request: len(request.passes) for request in requests}
        for number, step in enumerate(itertools.zip_longest(*(request.news() for request in requests))):
            found = _compute(requests, step) if number else _behind_loads(requests, step, before)
            now = time.perf_counter()
            for request, span in zip(requests, step, strict=True):
                if span is not None:
                    request.keep(*span)
                    ended[request] = now
            logits |= found
        for request in requests:
            request.new_s = sum(seconds for *_, seconds in request.passes[before[request] :])
    finally:
        for request in requests:
            request.end()
    return [request.result(logits[request], ended[request], len(requests) - 1) for request in requests]


def _behind_loads(
    requests: Sequence[Request], step: Sequence[Span | None], before: dict[Request, int]
) -> dict[Request, torch.Tensor]:
    """The first new tokens, layer by layer behind the loads. What did not load is computed: the chunks that lack
    something, all tokens of them; the others stay.
    """
    while True:
        try:
            return _compute(requests, step, [request for request in requests if request.cached and not request.lost])
        except MissingError:
            for request in requests:
                if request.load.missing and not request.lost:
                    for span in request.missing():
                        _compute([request], [span])
                        request.keep(*span)
                        request.lost += request.chunk
                    before[request] = len(request.passes)


def _compute(
    requests: Sequence[Request], step: Sequence[Span | None], loading: Collection[Request] = ()
) -> dict[Request, torch.Tensor]:
    """Run a chunk of each request that has one through the model, with the tokens before it in sight; of those that are
    loading layer by layer behind that. The logits of their last tokens.
    """
    members = [(request, span) for request, span in zip(requests, step, strict=True) if span is not None]
    if len(members) > 1 and not packs(members[0][0].engine.model):
        return {request: _pass([(request, span)], loading) for request, span in members}
    rows = _pass(members, loading).split(1)
    return {request: row for (request, _), row in zip(members, rows, strict=True)}


def _pass(members: Sequence[tuple[Request, Span]], loading: Collection[Request]) -> torch.Tensor:
    """One pass of the model; the logits of each member's last token, ``[members, vocabulary]``."""
    model = members[0][0].engine.model
    times: list[tuple[int, float, float]] = []
    since = 0.0

    def before(layer: int, request: Request) -> None:
        # A layer is seen when it updates the cache: what lies between two updates is counted to the first of them.
        nonlocal since
        now = time.perf_counter()
        if layer and request is members[0][0]:
            times.append((layer - 1, since, now))
            since = now
        if request in loading and not request.load.ready(layer):
            request.load.wait(layer)
            if now > since:  # of this layer, while others of the pass waited or it did not have to
                times.append((layer, since, now))
            since = time.perf_counter()
            for waiting, span in members:
                waiting.stall(now, since, layer, span)

    for request, span in members:
        request.room.fill(span[0])
        request.room.watch(partial(before, request=request))
    parts = [(request.tokens[slice(*span)], request.room.cache) for request, span in members]
    looks = [None if request.mass is None else request.mass.look for request, _ in members]
    since = time.perf_counter()
    logits = forward_all(model, parts, looks)
    synchronise(model.device)
    times.append((len(members[0][0].room.layers) - 1, since, time.perf_counter()))
    for request, span in members:
        request.computed(span, times)
    return logits
