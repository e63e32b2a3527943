"""The loop: match, decide, load and compute at the same time, write back behind it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from transformers.cache_utils import DynamicCache

from kvtier.config import Size, parse_size
from kvtier.errors import ClosedError, ConfigError, KvtierError
from kvtier.integrations.verbs import BlockNamespace
from kvtier.kappa import Measured
from kvtier.kappa.number import positive, whole
from kvtier.prefill.ahead import Lookahead
from kvtier.prefill.attended import Attended, most_attended
from kvtier.prefill.cache import Room, RoomyLayer
from kvtier.prefill.importance import AttentionMass, watching
from kvtier.prefill.loading import Load, MissingError, Stages, bytes_to_read, is_device_of, layer_groups
from kvtier.prefill.model import forward, layout_of, namespace, synchronise
from kvtier.prefill.plan import Meter, plan
from kvtier.prefill.prompt import check_fraction, check_parts, token_ids
from kvtier.prefill.report import PrefillReport
from kvtier.prefill.storing import UNAVAILABLE, WriteBack, Writer, held
from kvtier.prefill.timeline import Event, busy

__all__ = ["Prefill", "PrefillEngine"]


class Prefill(NamedTuple):
    """The result of a prefill."""

    logits: torch.Tensor
    """``[1, vocabulary]``: of the last token of the prompt, in the model's dtype and on its device."""
    cache: DynamicCache
    """The KV of the whole prompt, ready for the next token."""
    report: PrefillReport


class PrefillEngine:
    """Prefills of one model over one namespace, with loads, computation and write-back at the same time.

    A prompt is cut into chunks of ``chunk_tokens`` from its start. Of the whole chunks that are stored, the front is
    computed and the tail loaded, whatever is fastest by what was measured; new tokens go through the layers while later
    layers still load. A chunk is always computed with the tokens before it and no others in sight, so its KV and the
    logits are bit-identical to those of any other run on the same grid, in whatever order things arrive.

    Args:
        model: a loaded Hugging Face causal language model with full, sliding or latent attention.
        store: the model's :class:`kvtier.Namespace` (see :func:`kvtier.prefill.namespace`), or a
            :class:`kvtier.Store`, whose namespace is then made by hashing the weights, once.
        chunk_tokens: the grid, a multiple of the layout's ``block_tokens``. Default 256.
        timeout: seconds after which a load is given up and what is missing computed; also how long the write-back waits
            for room. Default 30; ``None`` waits.
        reserve_tokens: how many more tokens the returned cache takes before it has to move. Default 256.
        measured: what was measured before, see :class:`kvtier.kappa.Measured`. Default none: the first requests
            measure.
        staging: memory for loads under way, see :func:`kvtier.config.parse_size`, and as much on the device where the store
            has an HBM tier on the model's. Default 64 MiB.
        backlog: memory of KV that may wait for its write-back; blocks beyond it are refused. Default 1 GiB.
        importance: whether to sample what each token is attended to, and give the store the score of each block, see
            :mod:`kvtier.prefill.importance`. Default no.
        lookahead: memory of the store that may be filled ahead for requests that wait, see :meth:`submit`. Default 256 MiB.

    Raises:
        ConfigError: for a grid that blocks do not fill, a bad value, or a layout that is not the model's.

    A context manager; closing it waits for the write-back. Requests run one at a time; every method may be called from
    any thread.
    """

    def __init__(
        self,
        model: Any,
        store: Any,
        *,
        chunk_tokens: int = 256,
        timeout: float | None = 30.0,
        reserve_tokens: int = 256,
        measured: Measured | None = None,
        staging: Size = "64MiB",
        backlog: Size = "1GiB",
        lookahead: Size = "256MiB",
        importance: bool = False,
    ) -> None:
        check_parts(model, store)
        whole("chunk_tokens", chunk_tokens)
        whole("reserve_tokens", reserve_tokens, 0)
        if timeout is not None:
            positive("timeout", timeout, zero=True)
        self.model = model
        self.blocks: BlockNamespace = namespace(store, model) if hasattr(store, "namespace") else store
        layout = self.blocks.layout
        expected = layout_of(model, layout.block_tokens)
        if layout.fingerprint() != expected.fingerprint():
            raise ConfigError(
                f"the namespace has {layout}, but this model keeps {expected}: make the namespace with namespace(store, model)"
            )
        if chunk_tokens % layout.block_tokens:
            raise ConfigError(
                f"chunk_tokens={chunk_tokens} is not allowed; it must be a multiple of the layout's block_tokens={layout.block_tokens}, "
                f"for example {max(1, round(chunk_tokens / layout.block_tokens)) * layout.block_tokens}"
            )
        self.chunk_tokens = chunk_tokens
        self.timeout = timeout
        self.reserve_tokens = reserve_tokens
        self.importance = importance
        self.meter = Meter(model, chunk_tokens, measured)
        sizes = [end - start for start, end in itertools.pairwise(layout.offsets)]
        self.groups = layer_groups(sizes)
        most = max(layout.offsets[group.stop] - layout.offsets[group.start] for group in self.groups)
        device = self.blocks.device
        self._hbm = is_device_of(device, model.device)
        self._stages = Stages(max(parse_size(staging, "staging"), 2 * most), model.device, hbm=self._hbm)
        batch = max(1, min(chunk_tokens // layout.block_tokens, parse_size(staging, "staging") // layout.block_bytes))
        self._writer = Writer(self.blocks, timeout, batch, parse_size(backlog, "backlog"))
        self._attended = Attended(self.blocks)
        self._emulated = frozenset(self.blocks.emulated)
        self._running = threading.Lock()
        self._closed = False
        # The other half of HBM is for the request that runs.
        hbm = device.capacity // 2 if self._hbm and device is not None else 0
        self._ahead = Lookahead(self.blocks, parse_size(lookahead, "lookahead"), timeout, hbm)
        self._numbers = itertools.count()
        self._queue = ThreadPoolExecutor(1, thread_name_prefix="kvtier-prefill")

    def run(
        self,
        input_ids: Sequence[int] | torch.Tensor,
        *,
        front: int | None = None,
        overlap: bool = True,
        retain: float | None = None,
    ) -> Prefill:
        """Prefill one prompt.

        Args:
            input_ids: its tokens: ints, or an integer tensor ``[T]`` or ``[1, T]``. T is at least 1.
            front: how many stored tokens to compute, rounded up to the grid: 0 loads all, any number as large as the
                prompt computes all. Default: what is fastest by the measurements.
            overlap: whether to compute while the load goes on (default), or after it.
            retain: load only this fraction of the stored tokens, above 0: the most attended ones by what requests with
                ``importance`` counted, see :func:`kvtier.prefill.attended.most_attended`. Each keeps its position, the
                others are masked, also for what :meth:`step` and :meth:`generate` add. The logits are no longer those of
                the prompt (docs/PREFILL.md has what that costs), and nothing computed behind them is stored. Default,
                and 1: all of them.

        Returns:
            Logits, cache and report. Blocks until the logits are there; new blocks are stored in the background, see
            ``report.stored``.

        Raises:
            ConfigError: for an empty prompt, a batch, what is no token of the model, no number or no fraction.
            InvalidBlockError: where the model caches tensors of another shape or dtype than the layout says.
            ClosedError: where the store or the engine is closed.
        """
        begun = time.perf_counter()
        tokens = self._asked(input_ids, front, retain)
        return self._run(tokens, self.blocks.chain(tokens), begun, front, overlap, retain)

    def _asked(self, input_ids: Sequence[int] | torch.Tensor, front: int | None, retain: float | None) -> list[int]:
        """The tokens of a request that may begin."""
        if self._closed:
            raise ClosedError("the engine is closed. Make a new one")
        if front is not None:
            whole("front", front, 0)
        check_fraction(retain)
        return token_ids(input_ids, self.model)

    def _run(
        self,
        tokens: list[int],
        keys: Sequence[bytes],
        begun: float,
        front: int | None,
        overlap: bool,
        retain: float | None,
    ) -> Prefill:
        with self._running:
            return _Run(self, tokens, keys, begun, front, overlap, retain).go()

    def submit(
        self,
        input_ids: Sequence[int] | torch.Tensor,
        *,
        front: int | None = None,
        overlap: bool = True,
        retain: float | None = None,
    ) -> Future[Prefill]:
        """As :meth:`run`, in the background: requests run in the order in which they were submitted, and while one runs,
        what the next ones need is fetched from NVMe to memory, and to HBM where that is on the model's device, as far as
        ``lookahead`` goes.

        Does not block. The future's ``result()`` is the prefill; ``cancel()`` takes back one that has not begun.
        """
        tokens = self._asked(input_ids, front, retain)
        keys = self.blocks.chain(tokens)
        number = next(self._numbers)

        def work() -> Prefill:
            self._ahead.take(number)
            return self._run(tokens, keys, time.perf_counter(), front, overlap, retain)

        future = self._queue.submit(work)
        self._ahead.add(number, keys)
        if future.running():
            self._ahead.take(number)
        future.add_done_callback(lambda _: self._ahead.take(number))  # also of one that was cancelled
        return future

    def step(self, token: int, cache: DynamicCache) -> torch.Tensor:
        """Compute one more token behind a cache, between other requests; its logits, ``[1, vocabulary]``. Blocks.

        Raises:
            ConfigError: for what is no token of the model; the cache is as it was then.
        """
        new = token_ids([token], self.model)
        with self._running:
            return forward(self.model, new, cache)

    def generate(
        self,
        input_ids: Sequence[int] | torch.Tensor,
        max_new_tokens: int,
        *,
        stop: Collection[int] = (),
        pick: Callable[[torch.Tensor], int] | None = None,
        after: Prefill | None = None,
    ) -> Iterator[int]:
        """Prefill a prompt and go on from there, token by token. Blocks that fill up on the way are stored.

        Args:
            input_ids: as for :meth:`run`.
            max_new_tokens: how many at most.
            stop: tokens that end it; they are not given.
            pick: makes a token of logits ``[1, vocabulary]``. Default: the largest.
            after: the prefill of this prompt, where it was done already; nothing may have been added to its cache. Default: do
                it.

        Returns:
            An iterator of tokens. Blocks while each is computed. Whoever stops early closes it.

        Raises:
            ConfigError: as :meth:`run`, and for ``after`` with a cache of more or fewer tokens than the prompt's, whose KV
                would be stored as another prompt's.
        """
        tokens = token_ids(input_ids, self.model)
        whole("max_new_tokens", max_new_tokens, 0)
        logits, cache, _ = after or self.run(tokens)
        if cache.get_seq_length() != len(tokens):
            raise ConfigError(
                f"after= has a cache of {cache.get_seq_length()} tokens, the prompt has {len(tokens)}: give the prefill of this "
                "prompt, behind which nothing was generated yet"
            )
        size, kept = self.blocks.layout.block_tokens, len(tokens)
        try:
            for _ in range(max_new_tokens):
                token = int(logits.argmax()) if pick is None else pick(logits)
                if token in stop:
                    return
                yield token
                logits = self.step(token, cache)
                tokens.append(token)
                if len(tokens) - kept >= size:
                    self.keep(tokens, cache)
                    kept = len(tokens)
        finally:
            self.keep(tokens, cache)

    def keep(self, input_ids: Sequence[int] | torch.Tensor, cache: DynamicCache) -> WriteBack:
        """Store what a cache has and the store has not: whole blocks of a prompt and of what was generated behind it.

        Args:
            input_ids: all tokens of the sequence, from its start; those behind the cache's end are left out.
            cache: of one sequence, from :meth:`run` or of transformers' own.

        Returns:
            The write-back, which goes on in the background. The cache may be used meanwhile. Of a cache in which tokens were
            left out (``retain``) nothing is stored: what was computed behind them is another prompt's.

        Raises:
            ConfigError: for a cache of a batch, or one that has dropped its first tokens.
        """
        tokens = token_ids(input_ids, self.model)
        pairs = Room.of(cache)
        length = min((keys.shape[-2] for keys, _ in pairs), default=0) if pairs else 0
        if not pairs or length != cache.get_seq_length():
            raise ConfigError(
                "the cache is not that of one whole sequence: a batch, an empty one, or one that keeps a window only; keep() takes the cache of run()"
            )
        target = WriteBack(time.perf_counter())
        if getattr(cache, "hidden", None) is not None:
            return target
        keys = self.blocks.chain(tokens[:length])
        layer = cache.layers[0]
        readers = layer.readers if isinstance(layer, RoomyLayer) else None
        # What is there already counts for no backlog, which a long conversation alone would fill.
        try:
            first = held(self.blocks, keys)
        except KvtierError:
            first = 0  # the write-back meets the same, and says so
        if first < len(keys):
            self._writer.submit(pairs, readers, first, keys[first:], keys[first - 1] if first else None, target)
        return target

    def flush(self, result: Prefill, timeout: float | None = None) -> bool:
        """Block until the new blocks of a result are stored or refused; whether that is so."""
        return result.report.stored.wait(timeout)

    def close(self) -> None:
        """Wait for what was submitted and for the write-back, and end all threads. Closing twice is allowed."""
        self._closed = True
        self._queue.shutdown()
        self._writer.close()
        self._stages.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Run:
    """One request, from the match to the report."""

    def __init__(
        self,
        engine: PrefillEngine,
        tokens: list[int],
        keys: Sequence[bytes],
        begun: float,
        front: int | None,
        overlap: bool,
        retain: float | None,
    ) -> None:
        self.engine = engine
        self.tokens = tokens
        self.begun = begun
        self.asked = front
        self.overlap = overlap
        self.retain = 1.0 if retain is None else retain
        self.blocks = engine.blocks
        self.chunk = engine.chunk_tokens
        self.size = self.blocks.layout.block_tokens
        self.keys = keys
        self.room = Room(self.blocks.layout, len(tokens) + engine.reserve_tokens, engine.model.device)
        self.mass = AttentionMass(len(tokens)) if engine.importance else None
        self.stored = WriteBack(begun)
        self.events: list[Event] = []
        self.passes: list[tuple[int, int, float]] = []
        self.stalled = 0.0
        self.lost = 0
        self.new_s = self.front_s = 0.0

    def go(self) -> Prefill:
        match = self.blocks.match(self.keys)
        cached = min(match.tokens, len(self.tokens) - 1) // self.chunk * self.chunk
        blocks = cached // self.size
        asked = None if self.asked is None else min(-(-self.asked // self.chunk) * self.chunk, cached)
        kept = None
        if self.retain < 1 and blocks:
            with suppress(*UNAVAILABLE):  # then nothing is known, and everything is loaded
                kept = most_attended(self.engine._attended.read(self.keys[:blocks], self.engine.timeout), self.retain)
        # Without the model's device, a block in HBM is read from below.
        tiers = [tier if self.engine._hbm or tier != "hbm" else "dram" for tier in match.tiers[:blocks]]
        chosen = plan(
            cached,
            len(self.tokens) - cached,
            tiers,
            bytes_to_read(self.blocks.layout, kept, match.tiers[:blocks]),
            self.chunk,
            len(self.engine.groups),
            self.engine.meter.measured(),
            asked,
        )
        front, why = chosen.front, chosen.why
        if match.tokens and not cached:
            why = f"{match.tokens} tokens are stored, which is less than a chunk of {self.chunk} before the last token"
        deadline = None if self.engine.timeout is None else time.perf_counter() + self.engine.timeout
        first = front // self.size
        if kept is not None:
            kept[:front] = True
            if not kept.all():
                self.room.hide(~kept)
        load = Load(
            self.blocks,
            self.room,
            first,
            self.keys[first:blocks],
            match.tiers[first:blocks],
            self.engine.groups,
            deadline,
            self.begun,
            self.engine._stages,
            None if kept is None else kept[front:],
        )
        try:
            if not self.overlap:
                waited = time.perf_counter()
                load.finish()
                self._stall(waited, -1, (front, cached))
            for start in range(0, front, self.chunk):
                self._compute(start, start + self.chunk)
            self.front_s = sum(seconds for *_, seconds in self.passes)
            logits = self._new(cached, load)
        finally:
            self.room.watch(None)
            load.stop()
        ended = time.perf_counter()
        if load.missing:
            why = f"{why}; but loading failed: {load.reason}: {self.lost} tokens were computed again"
        emulated = not self.engine._emulated.isdisjoint(tiers)
        if emulated and "(emulated)" not in why:  # measurements that were given may say so too
            why = f"{why} (emulated)"
        if self.mass is not None and self.keys:
            received = torch.stack([self.mass.mass, self.mass.seen])[:, : len(self.keys) * self.size]
            self.engine._writer.count(self.keys, received, self.stored)
        report = self._report(ended, match.tokens, cached, front, load, chosen.predicted, why, emulated)
        self.engine.meter.computed(self.passes)
        self.engine.meter.loaded(report.bytes, report.load_s)
        return Prefill(logits, self.room.cache, report)

    def _new(self, cached: int, load: Load) -> torch.Tensor:
        """Compute the tokens behind the stored ones: the first chunk of them while layers still load."""
        end = min(cached + self.chunk, len(self.tokens))
        before = len(self.passes)
        try:
            logits = self._compute(cached, end, load if cached else None)
        except MissingError:
            self._recover(load)
            before = len(self.passes)
            logits = self._compute(cached, end)
        self._keep(cached, end)
        for start in range(end, len(self.tokens), self.chunk):
            logits = self._compute(start, start + self.chunk)
            self._keep(start, start + self.chunk)
        self.new_s = sum(seconds for *_, seconds in self.passes[before:])
        return logits

    def _recover(self, load: Load) -> None:
        """Compute the chunks that did not load, all tokens of them; the others stay."""
        waited = time.perf_counter()
        load.finish()
        self._stall(waited, -1, (0, 0))
        for chunk in sorted({number * self.size // self.chunk for number in load.missing}):
            start = chunk * self.chunk
            self._compute(start, start + self.chunk)
            self._keep(start, start + self.chunk)
            self.lost += self.chunk

    def _compute(self, start: int, end: int, load: Load | None = None) -> torch.Tensor:
        """Run a chunk through the model, with the tokens before it in sight; with a load, layer by layer behind it."""
        end = min(end, len(self.tokens))
        self.room.fill(start)
        marks: list[float] = []
        stalls = 0.0

        def before(layer: int) -> None:
            nonlocal stalls
            marks.append(time.perf_counter())
            if load is not None and not load.ready(layer):
                load.wait(layer)
                stalls += self._stall(marks[-1], layer, (start, end))
                marks[-1] = time.perf_counter()

        self.room.watch(before)
        begun = time.perf_counter()
        with watching(self.engine.model, self.mass):
            logits = forward(self.engine.model, self.tokens[start:end], self.room.cache)
        synchronise(self.engine.model.device)
        ended = time.perf_counter()
        # A layer is seen when it updates the cache: what lies between two updates is counted to the first of them.
        bounds = [begun, *marks[1:], ended]
        for layer, (since, until) in enumerate(itertools.pairwise(bounds)):
            self.events.append(Event("compute", layer, (start, end), since - self.begun, until - self.begun))
        self.passes.append((start, end - start, ended - begun - stalls))
        return logits

    def _stall(self, since: float, layer: int, tokens: tuple[int, int]) -> float:
        now = time.perf_counter()
        self.stalled += now - since
        self.events.append(Event("stall", layer, tokens, since - self.begun, now - self.begun))
        return now - since

    def _keep(self, start: int, end: int) -> None:
        """Have the full blocks of a chunk stored."""
        first, last = start // self.size, min(end // self.size, len(self.keys))
        if first < last and self.room.cache.hidden is None:
            before = self.keys[first - 1] if first else None
            keys = self.keys[first:last]
            self.engine._writer.submit(self.room.pairs, self.room.readers, first, keys, before, self.stored)

    def _report(
        self,
        ended: float,
        matched: int,
        cached: int,
        front: int,
        load: Load,
        predicted: Any,
        why: str,
        emulated: bool,
    ) -> PrefillReport:
        sizes: dict[str, int] = {}
        for event in load.events:
            sizes[str(event.tier)] = sizes.get(str(event.tier), 0) + event.bytes
        seconds = {tier: busy(e for e in load.events if e.tier == tier) for tier in sizes}
        hidden = self.room.cache.hidden
        left_out = 0 if hidden is None else int(hidden.sum())
        reused = cached - front - self.lost - left_out
        ttft = ended - self.begun
        return PrefillReport(
            tokens=len(self.tokens),
            tokens_matched=matched,
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
            emulated=emulated,
            predicted=predicted,
            measured={
                "load_s": busy(load.events),
                "front_s": self.front_s,
                "new_s": self.new_s,
                "ttft_s": ttft,
            },
            stored=self.stored,
            importance=None if self.mass is None else self.mass.scores(),
            timeline=tuple(sorted((*self.events, *load.events), key=lambda event: event.start_s)),
        )
