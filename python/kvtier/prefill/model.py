"""What a prefill needs to know of a Hugging Face model: its layout, its namespace, and how to run tokens through it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from kvtier.identity import Identity
from kvtier.layout import KVLayout

__all__ = ["cache_argument", "forward", "layout_of", "logits_of", "namespace", "synchronise"]


def namespace(store: Any, model: Any, *, block_tokens: int = 16, quota: Any = None, **identity: Any) -> Any:
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
    ids = torch.tensor([tokens], dtype=torch.long, device=model.device)
    options: dict[str, Any] = {cache_argument(model): cache}
    hidden = getattr(cache, "hidden", None)
    if hidden is not None:
        length = cache.get_seq_length()
        hidden[length : length + len(tokens)] = False  # there they are now
        if hidden[:length].any():
            seen = torch.ones(1, length + len(tokens), dtype=torch.long, device=model.device)
            seen[0, : hidden.numel()] = ~hidden[: seen.shape[1]]
            options["attention_mask"] = seen
    logits: torch.Tensor = model(input_ids=ids, use_cache=True, logits_to_keep=last, **options).logits
    return logits


def synchronise(device: torch.device) -> None:
    """Wait for a GPU, so that a time is the work's and not its queueing's."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
