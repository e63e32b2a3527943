"""The loop, as its users see it: prompts in, logits and caches out, new blocks to the store."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from transformers.cache_utils import DynamicCache

from kvtier.config import Size, parse_size
from kvtier.errors import ClosedError, ConfigError, KvtierError
from kvtier.integrations.verbs import BlockNamespace
from kvtier.kappa import Measured
from kvtier.kappa.number import positive, whole
from kvtier.prefill.ahead import Lookahead
from kvtier.prefill.attended import Attended
from kvtier.prefill.cache import Room, RoomyLayer
from kvtier.prefill.loading import Stages, is_device_of, layer_groups
from kvtier.prefill.model import forward, layout_of, namespace, synchronise
from kvtier.prefill.plan import Meter
from kvtier.prefill.prompt import check_fraction, check_parts, check_positions, token_ids
from kvtier.prefill.request import Prefill, Request, needed, prefill_all
from kvtier.prefill.storing import WriteBack, Writer, held

__all__ = ["PrefillEngine"]

_CLOSED = "the engine is closed. Make a new one"


class PrefillEngine:
    """Prefills of one model over one namespace, with loads, computation and write-back at the same time.

    A prompt is cut into chunks of ``chunk_tokens`` from its start. Of the whole chunks that are stored, the front is
    computed and the tail loaded, whatever is fastest by what was measured; new tokens go through the layers while later
    layers still load. A chunk is always computed with the tokens before it and no others in sight, so its KV and the
    logits are bit-identical to those of any other run on the same grid, in whatever order things arrive; but blocks of a
    shorter chunk at another prompt's end, or of generated tokens, may have other last bits.

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

    A context manager; closing it waits for the write-back. Requests run one at a time, a batch as one; every method may be called from
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
        self._closed = self._ended = False
        # The other half of HBM is for the request that runs.
        hbm = device.capacity // 2 if self._hbm and device is not None else 0
        self._ahead = Lookahead(self.blocks, parse_size(lookahead, "lookahead"), timeout, hbm)
        self._numbers = itertools.count()
        self._submitting = threading.RLock()
        self._open = 0
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
                the prompt (docs/PREFILL.md has what that costs), and nothing computed behind them is stored. Unless
                ``front`` is given, all of them are loaded where that is predicted to be as fast. Default, and 1: all of
                them.

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
            raise ClosedError(_CLOSED)
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
        return self._together([(tokens, keys)], begun, front, overlap, retain)[0]

    def _together(
        self,
        asked: Sequence[tuple[list[int], Sequence[bytes]]],
        begun: float,
        front: int | None,
        overlap: bool,
        retain: float | None,
    ) -> list[Prefill]:
        with self._running:
            if self._ended:  # since it was asked for
                raise ClosedError(_CLOSED)
            requests = [Request(self, *each, begun, front, retain) for each in asked]
            return prefill_all(self, requests, overlap)

    def run_batch(
        self,
        prompts: Sequence[Sequence[int] | torch.Tensor],
        *,
        front: int | None = None,
        overlap: bool = True,
        retain: float | None = None,
    ) -> list[Prefill]:
        """Prefill several prompts together: what is next of each goes through the model in one pass, one behind the other,
        and attends to its own prompt alone. Each decides as if it were alone, and loads for itself, in this order.

        Rows of a pass that has more of them may come out with other last bits, so the bits are those of the same prompts
        in the same batch. A model that attends outside of the registry of transformers (``eager``) computes them one by one.

        Args:
            prompts: any number, each as for :meth:`run`, of any length.
            front: as for :meth:`run`, of each.
            overlap: as there.
            retain: as there, of each.

        Returns:
            One result a prompt. Blocks until all are there.

        Raises:
            ConfigError, InvalidBlockError, ClosedError: as :meth:`run`; then nothing was computed.
        """
        begun = time.perf_counter()
        if isinstance(prompts, (str, Mapping)) or not hasattr(prompts, "__iter__"):
            raise ConfigError(f"prompts is a {type(prompts).__name__}; allowed are several prompts, each of tokens")
        if self._closed:
            raise ClosedError(_CLOSED)
        asked = [self._asked(prompt, front, retain) for prompt in prompts]
        chains = [(tokens, self.blocks.chain(tokens)) for tokens in asked]
        return self._together(chains, begun, front, overlap, retain)

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
        ``lookahead`` goes; with ``retain`` only blocks of which it will load something.

        Does not block. The future's ``result()`` is the prefill; ``cancel()`` takes back one that has not begun.
        """
        tokens = self._asked(input_ids, front, retain)
        keys = self.blocks.chain(tokens)
        number = next(self._numbers)

        def work() -> Prefill:
            self._ahead.take(number)
            return self._run(tokens, keys, time.perf_counter(), front, overlap, retain)

        def ended(_: object) -> None:
            self._ahead.take(number)  # also of one that was cancelled
            with self._submitting:
                self._open -= 1

        with self._submitting:
            if self._closed:  # meanwhile
                raise ClosedError(_CLOSED)
            if self._open:  # else it begins at once
                some = retain is not None and retain < 1
                choose = partial(needed, self, tokens=len(tokens), retain=retain) if some else None
                self._ahead.add(number, keys, choose)
            self._open += 1
            try:
                future = self._queue.submit(work)
            except BaseException:
                ended(None)
                raise
        future.add_done_callback(ended)
        return future

    def step(self, token: int, cache: DynamicCache) -> torch.Tensor:
        """Compute one more token behind a cache, between other requests; its logits, ``[1, vocabulary]``. Blocks.

        Raises:
            ConfigError: for what is no token of the model, and behind its last position; the cache is as it was then.
        """
        new = token_ids([token], self.model)
        check_positions(self.model, cache.get_seq_length() + 1)
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
            synchronise(self.model.device)  # the write-back reads on a stream of its own
            self._writer.submit(pairs, readers, first, keys[first:], keys[first - 1] if first else None, target)
        return target

    def flush(self, result: Prefill, timeout: float | None = None) -> bool:
        """Block until the new blocks of a result are stored or refused; whether that is so."""
        return result.report.stored.wait(timeout)

    def close(self) -> None:
        """Wait for what was submitted and for the write-back, and end all threads. Closing twice is allowed."""
        with self._submitting:
            self._closed = True
        self._queue.shutdown()
        self._ahead.close()
        self._writer.close()
        with self._running:
            self._ended = True
            self._stages.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
