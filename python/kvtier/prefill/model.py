"""What a prefill needs to know of a Hugging Face model: its layout, its namespace, and how to run tokens through it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from kvtier.identity import Identity
from kvtier.layout import KVLayout
from kvtier.prefill.cache import packed_cache
from kvtier.prefill.prompt import check_parts
from kvtier.prefill.registry import Member, attending

__all__ = ["cache_argument", "forward", "forward_all", "layout_of", "logits_of", "namespace", "synchronise"]


def namespace(
    store: Any, model: Any, *, block_tokens: int = 16, codec: str | None = None, quota: Any = None, **identity: Any
) -> Any:
    """The namespace of a loaded Hugging Face model in a store.

    Args:
        store: a :class:`kvtier.Store`.
        model: a loaded causal language model.
        block_tokens: tokens a block. Default 16.
        codec: how blocks are coded on NVMe, see :meth:`kvtier.Store.namespace`. Default the tier's own, which loses nothing.
        quota: see there.
        identity: fields of :class:`kvtier.identity.Identity` that a model does not tell: ``revision``, ``lora``,
            ``salt``, or ``weights`` where the fingerprint is known already.

    Blocks while it hashes the weights (about 1 s a GB) unless ``weights`` is given: do it once a model.

    Raises:
        ConfigError: for what is no store, or no loaded model, or a codec that does not take it.
        ConfigError, UnsupportedError: see :meth:`kvtier.layout.KVLayout.from_config`.
    """
    check_parts(model, store, "store, model")
    return store.namespace(Identity.from_model(model, **identity), layout_of(model, block_tokens), codec, quota)


def layout_of(model: Any, block_tokens: int = 16) -> KVLayout:
    """The layout of the KV that transformers caches for ``model``, which must be whole: not a tensor-parallel slice."""
    return KVLayout.from_config(model.config, dtype=model.dtype, block_tokens=block_tokens)


def cache_argument(model: Any) -> str:
    """What ``model.forward`` calls its cache: transformers 5.24 renamed the argument."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@torch.no_grad()
def forward(model: Any, tokens: Sequence[int], cache: DynamicCache) -> torch.Tensor:
    """Run ``tokens`` after what ``cache`` holds, and add their KV to it.

    Returns:
        The logits of the last token, ``[1, vocabulary]``. Blocks, except on a GPU.
    """
    return logits_of(model, tokens, cache, 1)[:, -1]


@torch.no_grad()
def logits_of(model: Any, tokens: Sequence[int], cache: DynamicCache, last: int) -> torch.Tensor:
    """As :func:`forward`: the logits of the ``last`` tokens, ``[1, last, vocabulary]``; 0 is all. Tokens that a
    :class:`kvtier.prefill.cache.RoomyCache` hides are attended to by none.
    """
    seen = _seen(cache, len(tokens))
    mask = {} if seen is None else {"attention_mask": seen.long()}
    return _logits(model, tokens, cache, last, mask)


@torch.no_grad()
def forward_all(
    model: Any, parts: Sequence[tuple[Sequence[int], DynamicCache]], looks: Sequence[Callable[..., None] | None]
) -> torch.Tensor:
    """:func:`forward` of several requests, each with tokens and a cache of its own, in one pass: the tokens of all go through
    the weights together, and attend to those of their own request, as they would alone.

    Args:
        model: one that takes several, see :func:`kvtier.prefill.registry.packs`; of one request any does.
        parts: tokens and cache of each. The caches differ.
        looks: who is told of the attention of each.

    Returns:
        The logits of the last token of each, ``[requests, vocabulary]``. Blocks, except on a GPU.
    """
    if len(parts) == 1:
        with attending(model, [Member(look=looks[0])]) if looks[0] is not None else nullcontext():
            return forward(model, *parts[0])
    members, positions = [], []
    for (tokens, cache), look in zip(parts, looks, strict=True):
        length = cache.get_seq_length()
        members.append(Member(length, len(tokens), _seen(cache, len(tokens)), look))
        positions.append(torch.arange(length, length + len(tokens), device=model.device))
    counts = [member.new for member in members]
    all_tokens = [token for tokens, _ in parts for token in tokens]
    last = torch.tensor(counts, device=model.device).cumsum(0) - 1
    packed = packed_cache([cache for _, cache in parts], counts)
    with attending(model, members):
        return _logits(model, all_tokens, packed, last, {"position_ids": torch.cat(positions)[None]})[0]


def _seen(cache: DynamicCache, new: int) -> torch.Tensor | None:
    """``bool[1, tokens]``: which tokens of a cache and of ``new`` ones behind it are there; ``None`` for all."""
    hidden: torch.Tensor | None = getattr(cache, "hidden", None)
    if hidden is None:
        return None
    length = cache.get_seq_length()
    hidden[length : length + new] = False  # there they are now
    if not hidden[:length].any():
        return None
    seen = torch.ones(1, length + new, dtype=torch.bool, device=hidden.device)
    seen[0, : hidden.numel()] = ~hidden[: seen.shape[1]]
    return seen


def _logits(
    model: Any, tokens: Sequence[int], cache: DynamicCache, last: int | torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    ids = torch.tensor([tokens], dtype=torch.long, device=model.device)
    options[cache_argument(model)] = cache
    logits: torch.Tensor = model(input_ids=ids, use_cache=True, logits_to_keep=last, **options).logits
    return logits


def synchronise(device: torch.device) -> None:
    """Wait for what this thread has queued on a GPU, so that a time is the work's and not its queueing's, and other streams may
    use what was written. For that alone: copies into HBM go on.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
