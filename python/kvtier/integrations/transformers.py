"""The KV cache of a Hugging Face model, through the store.

A warm run does the very same arithmetic as a cold one: prompts are cut on a fixed grid of ``chunk_tokens``, and a
reused prefix ends on that grid, so the logits of a hit are bit-identical to those of a run that computed everything
on the same grid.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvtier.errors import ConfigError, CorruptError, DeadlineError, FullError, InvalidBlockError, StorageError
from kvtier.identity import Identity
from kvtier.integrations.tensors import BlockBuffer, layer_shapes, torch_dtype
from kvtier.integrations.verbs import BlockNamespace, MatchLike
from kvtier.layout import KVLayout

__all__ = ["Prefill", "PrefillReport", "forward", "layout_of", "namespace", "prefill"]

# A store that cannot serve costs a recompute; anything else (a closed store, a bug) is for the caller to see.
_UNAVAILABLE = (DeadlineError, StorageError, CorruptError, FullError)


@dataclass(frozen=True)
class PrefillReport:
    """What a prefill did, in tokens, bytes and seconds."""

    tokens: int
    """Tokens of the prompt."""
    tokens_matched: int
    """Tokens of the prefix that the store said it holds."""
    tokens_reused: int
    """Tokens whose KV was loaded: the match cut to the grid, less what failed to load."""
    bytes: Mapping[str, int]
    """Bytes loaded, by the tier where they were found."""
    load_s: Mapping[str, float]
    """Seconds spent loading, by the tier where the bytes were found."""
    compute_s: float
    """Seconds in the model."""
    store_s: float
    """Seconds storing new blocks, before and after the first token."""
    stalled_s: float
    """Seconds in which the model waited for loads."""
    ttft_s: float
    """Seconds from the call to the logits."""
    blocks_stored: int
    """New blocks that the store took."""
    blocks_refused: int
    """New blocks that it did not take, for want of room or a working device."""
    decision: Literal["load", "recompute"]
    """Whether stored KV was used."""
    why: str
    """The decision in words."""


class Prefill(NamedTuple):
    """The result of :func:`prefill`."""

    logits: torch.Tensor
    """``[1, vocabulary]``: of the last token of the prompt, in the model's dtype and on its device."""
    cache: DynamicCache
    """The KV of the whole prompt, ready for the next token."""
    report: PrefillReport


def namespace(store: Any, model: Any, *, block_tokens: int = 16, quota: int | None = None, **identity: Any) -> Any:
    """The namespace of a loaded Hugging Face model in a store.

    Args:
        store: a :class:`kvtier.Store`.
        model: a loaded causal language model.
        block_tokens: tokens a block. Default 16.
        quota: see :meth:`kvtier.Store.namespace`.
        identity: fields of :class:`kvtier.identity.Identity` that a model does not tell: ``revision``, ``lora``,
            ``salt``, or ``weights`` where the fingerprint is known already.

    Blocks while it hashes the weights (about 1 s a GB) unless ``weights`` is given: do it once a model.

    Raises:
        ConfigError, UnsupportedError: see :meth:`kvtier.layout.KVLayout.from_config`.
    """
    return store.namespace(Identity.from_model(model, **identity), layout_of(model, block_tokens), quota=quota)


def layout_of(model: Any, block_tokens: int = 16) -> KVLayout:
    """The layout of the KV that transformers caches for ``model``, which must be whole: not a tensor-parallel slice."""
    return KVLayout.from_config(model.config, dtype=model.dtype, block_tokens=block_tokens)


def prefill(
    model: Any,
    store: Any,
    input_ids: Sequence[int] | torch.Tensor,
    *,
    chunk_tokens: int = 256,
    timeout: float | None = 30.0,
    priority: int = 0,
    reserve_tokens: int = 256,
) -> Prefill:
    """Run a prompt through a model, with the KV that the store has of its prefix, and store the KV that it did not
    have.

    The prompt is cut into chunks of ``chunk_tokens`` from its start. Whole chunks that are stored are loaded, the
    rest is computed chunk by chunk; the chunk with the last token is always computed, for its logits. A load that
    fails or is late turns into computing from that chunk on.

    Args:
        model: a loaded Hugging Face causal language model with full, sliding or latent attention.
        store: the model's :class:`kvtier.Namespace` (see :func:`namespace`), or a :class:`kvtier.Store`, whose
            namespace is then made by hashing the weights on every call.
        input_ids: the prompt's tokens: ints, or an integer tensor ``[T]`` or ``[1, T]``. T is at least 1.
        chunk_tokens: the grid, a multiple of the layout's ``block_tokens``. Default 256. Logits are bit-identical
            only between runs on the same grid.
        timeout: seconds to wait at most for a chunk to load or to be taken by the store. Default 30; ``None`` waits.
        priority: of the prefetch; higher goes first.
        reserve_tokens: how many more tokens the returned cache takes before it has to move. Default 256.

    Returns:
        :class:`Prefill`: logits, cache and report. Blocks until the logits are there and the new blocks are stored.

    Raises:
        ConfigError: for an empty prompt, a batch, a grid that blocks do not fill, or a layout that is not the model's.
        InvalidBlockError: where the model caches tensors of another shape or dtype than the layout says.
        ClosedError: where the store is closed.
    """
    begun = time.perf_counter()
    blocks: BlockNamespace = namespace(store, model) if hasattr(store, "namespace") else store
    run = _Run(model, blocks, _token_ids(input_ids), chunk_tokens, timeout, reserve_tokens, begun)
    run.load(priority)
    logits = run.compute()
    return Prefill(logits, run.cache(), run.report())


@dataclass
class _Run:
    """One prefill, from the match to the report."""

    model: Any
    blocks: BlockNamespace
    tokens: list[int]
    chunk: int
    timeout: float | None
    reserve: int
    begun: float
    reused: int = 0
    matched: int = 0
    loaded: dict[str, int] = field(default_factory=dict)
    load_s: dict[str, float] = field(default_factory=dict)
    compute_s: float = 0.0
    store_s: float = 0.0
    ttft_s: float = 0.0
    stored: int = 0
    refused: int = 0
    why: str = "nothing of this prompt is stored"

    def __post_init__(self) -> None:
        layout = self.blocks.layout
        expected = layout_of(self.model, layout.block_tokens)
        if layout.fingerprint() != expected.fingerprint():
            raise ConfigError(
                f"the namespace has {layout}, but this model keeps {expected}: make the namespace with namespace(store, model)"
            )
        if self.chunk < 1 or self.chunk % layout.block_tokens:
            raise ConfigError(
                f"chunk_tokens={self.chunk} is not allowed; it must be a multiple of the layout's block_tokens={layout.block_tokens}, "
                f"for example {max(1, round(self.chunk / layout.block_tokens)) * layout.block_tokens}"
            )
        self.keys = self.blocks.chain(self.tokens)
        room = len(self.tokens) + self.reserve
        shapes = layer_shapes(layout)
        self.layers = [_RoomyLayer(shape, room, torch_dtype(layout), self.model.device) for shape in shapes]
        self.buffer = BlockBuffer(layout, min(len(self.keys), self.chunk // layout.block_tokens))

    @property
    def room(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [layer.room for layer in self.layers]

    def load(self, priority: int) -> None:
        """Load whole chunks of the prefix until one is missing; the last token's chunk is left to compute."""
        match = self.blocks.match(self.keys)
        self.matched = match.tokens
        usable = min(self.matched, len(self.tokens) - 1) // self.chunk * self.chunk
        if not usable:
            if self.matched:
                self.why = f"{self.matched} tokens are stored, which is less than a chunk of {self.chunk} before the last token"
            return
        step = self.chunk // self.blocks.layout.block_tokens
        wanted = self.keys[: usable // self.blocks.layout.block_tokens]
        self.why = f"{usable} of {len(self.tokens)} tokens are stored"
        transfer = self.blocks.prefetch(wanted, to="dram", deadline=self.timeout, priority=priority)
        try:
            for first in range(0, len(wanted), step):
                problem = self._load_chunk(match, first, wanted[first : first + step])
                if problem is not None:
                    self.why = f"{usable} tokens were stored, but loading failed at token {self.reused}: {problem}"
                    break
                self.reused += self.chunk
        finally:
            transfer.cancel()
        for layer in self.layers:
            layer.fill(self.reused)

    def _load_chunk(self, match: MatchLike, first: int, keys: Sequence[bytes]) -> str | None:
        """Load one chunk; the reason where that failed."""
        begun = time.perf_counter()
        try:
            results = self.blocks.get_into(keys, self.buffer.rows(len(keys)), timeout=self.timeout)
        except _UNAVAILABLE as error:
            return str(error)
        missed = next((result for result in results if not result.hit), None)
        if missed is not None:
            return missed.reason or "the block is gone"
        self.buffer.write_to(self.room, self.reused, len(keys))
        _synchronise(self.model.device)
        share = (time.perf_counter() - begun) / len(keys)
        for tier in match.tiers[first : first + len(keys)]:
            self.loaded[tier] = self.loaded.get(tier, 0) + self.blocks.layout.block_bytes
            self.load_s[tier] = self.load_s.get(tier, 0.0) + share
        return None

    def compute(self) -> torch.Tensor:
        """Run the rest of the prompt through the model, chunk by chunk, and store each chunk's full blocks."""
        cache = self.cache()
        logits = torch.empty(0)
        for start in range(self.reused, len(self.tokens), self.chunk):
            begun = time.perf_counter()
            logits = forward(self.model, self.tokens[start : start + self.chunk], cache)
            _synchronise(self.model.device)
            ended = time.perf_counter()
            self.compute_s += ended - begun
            self.ttft_s = ended - self.begun
            self._store(start)
            self.store_s += time.perf_counter() - ended
        return logits

    def _store(self, start: int) -> None:
        size = self.blocks.layout.block_tokens
        first, last = start // size, min((start + self.chunk) // size, len(self.keys))
        if first == last:
            return
        self.buffer.read_from(self.room, start, last - first)
        parents = [self.keys[i - 1] if i else None for i in range(first, last)]
        try:
            results = self.blocks.put_many(
                self.keys[first:last], self.buffer.rows(last - first), parents=parents, timeout=self.timeout
            )
        except _UNAVAILABLE:
            self.refused += last - first
            return
        self.stored += sum(result.stored for result in results)
        self.refused += sum(not (result.stored or result.present) for result in results)

    def cache(self) -> DynamicCache:
        cache = DynamicCache()
        cache.layers = list(self.layers)
        return cache

    def report(self) -> PrefillReport:
        return PrefillReport(
            tokens=len(self.tokens),
            tokens_matched=self.matched,
            tokens_reused=self.reused,
            bytes=self.loaded,
            load_s=self.load_s,
            compute_s=self.compute_s,
            store_s=self.store_s,
            stalled_s=sum(self.load_s.values()),
            ttft_s=self.ttft_s,
            blocks_stored=self.stored,
            blocks_refused=self.refused,
            decision="load" if self.reused else "recompute",
            why=self.why,
        )


class _RoomyLayer(DynamicLayer):
    """A cache layer that writes new tokens into room set aside at the start, instead of copying all of the past for
    each chunk.

    Where the room runs out, or somebody replaced its tensors, it behaves like its parent.
    """

    def __init__(self, shape: tuple[int, int, int], tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        heads, *widths = shape
        keys, values = (torch.empty((1, heads, tokens, width), dtype=dtype, device=device) for width in widths)
        self.room = keys, values
        self.device = device
        self.is_initialized = True
        self.fill(0)

    def fill(self, tokens: int) -> None:
        """Say that the first ``tokens`` tokens of the room hold the cache."""
        self.keys, self.values = (tensor[:, :, :tokens] for tensor in self.room)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.keys is None:
            keys, values = super().update(key_states, value_states, *args, **kwargs)
            return keys, values
        start = self.keys.shape[-2]
        end = start + key_states.shape[-2]
        ours = self.keys.untyped_storage().data_ptr() == self.room[0].untyped_storage().data_ptr()
        if not ours or end > self.room[0].shape[-2] or key_states.requires_grad:
            keys, values = super().update(key_states, value_states, *args, **kwargs)
            return keys, values
        for room, new in zip(self.room, (key_states, value_states), strict=True):
            if new.dtype != room.dtype or new[:, :, :0].shape != room[:, :, :0].shape:
                raise InvalidBlockError(
                    f"the model caches {new.dtype} tensors of shape {tuple(new.shape)}, the layout has {room.dtype} with {room.shape[1]} heads "
                    f"of {room.shape[3]}: this version of transformers keeps this model's KV in a way that kvtier does not know"
                )
            room[:, :, start:end] = new
        self.fill(end)
        return self.keys, self.values


@torch.no_grad()
def forward(model: Any, tokens: Sequence[int], cache: DynamicCache) -> torch.Tensor:
    """Run ``tokens`` after what ``cache`` holds, and add their KV to it.

    Returns:
        The logits of the last token, ``[1, vocabulary]``. Blocks, except on a GPU.
    """
    return logits_of(model, tokens, cache, 1)[:, -1]


def logits_of(model: Any, tokens: Sequence[int], cache: DynamicCache, last: int) -> torch.Tensor:
    """As :func:`forward`: the logits of the ``last`` tokens, ``[1, last, vocabulary]``; 0 is all."""
    # transformers 5.24 renamed the argument.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    ids = torch.tensor([tokens], dtype=torch.long, device=model.device)
    logits: torch.Tensor = model(input_ids=ids, use_cache=True, logits_to_keep=last, **{name: cache}).logits
    return logits


def _token_ids(input_ids: Sequence[int] | torch.Tensor) -> list[int]:
    if isinstance(input_ids, torch.Tensor):
        if input_ids.dim() == 2 and input_ids.shape[0] == 1:
            input_ids = input_ids[0]
        if input_ids.dim() != 1 or input_ids.is_floating_point():
            raise ConfigError(
                f"input_ids is a {input_ids.dtype} tensor of shape {tuple(input_ids.shape)}; allowed are integers of shape [T] or [1, T]: call prefill once a prompt"
            )
        input_ids = input_ids.tolist()
    tokens = [int(token) for token in input_ids]
    if not tokens:
        raise ConfigError("input_ids is empty; a prompt has at least one token")
    return tokens


def _synchronise(device: torch.device) -> None:
    """Wait for a GPU, so that a time is the work's and not its queueing's."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
