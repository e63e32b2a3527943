"""What a prefill is given, checked: a model, a store and a prompt."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kvtier.errors import ConfigError

__all__ = ["check_fraction", "check_parts", "check_positions", "token_ids"]


def check_parts(model: Any, store: Any, order: str = "model, store, input_ids") -> None:
    """Whether these are a model and a store; ``order`` is that of the caller's arguments.

    Raises:
        ConfigError: where they are not.
    """
    if not (callable(getattr(model, "forward", None)) and hasattr(model, "config")):
        raise ConfigError(
            f"{_given(model)} was given as the model; allowed is a loaded Hugging Face causal language model, which "
            f"transformers.AutoModelForCausalLM.from_pretrained(...) returns. The order is {order}"
        )
    if isinstance(store, torch.nn.Module) or not (hasattr(store, "namespace") or hasattr(store, "layout")):
        raise ConfigError(
            f"{_given(store)} was given as the store; allowed is a kvtier.Store, or a namespace of one. The order is {order}"
        )


def _given(value: Any) -> str:
    """What it is, shortly: a model's own text has a page."""
    shown = f" ({value!r})" if isinstance(value, str | Path) else ""
    return f"a {type(value).__name__}{shown}"


def check_fraction(retain: float | None) -> None:
    """Whether this is a fraction of tokens.

    Raises:
        ConfigError: where it is not.
    """
    try:
        good = retain is None or 0 < retain <= 1
    except TypeError:
        good = False
    if not good:
        raise ConfigError(
            f"retain={retain!r} is not a fraction; allowed are numbers above 0 up to 1, where 1 loads all"
        )


def token_ids(input_ids: Sequence[int] | torch.Tensor, model: Any = None) -> list[int]:
    """A prompt as whole numbers, each in the vocabulary of ``model`` where that is given.

    Raises:
        ConfigError: for an empty prompt, a batch, what is no tokens, or more of them than the model has positions for.
    """
    if isinstance(input_ids, str):
        raise ConfigError(f"input_ids={input_ids[:40]!r} is text; allowed are tokens: pass tokenizer(text).input_ids")
    if isinstance(input_ids, Mapping):
        raise ConfigError(
            f"input_ids is a {type(input_ids).__name__}; allowed are tokens: pass its input_ids, as in encoding.input_ids"
        )
    if isinstance(input_ids, torch.Tensor):
        if input_ids.dim() == 2 and input_ids.shape[0] == 1:
            input_ids = input_ids[0]
        if input_ids.dim() != 1 or input_ids.is_floating_point():
            raise ConfigError(
                f"input_ids is a {input_ids.dtype} tensor of shape {tuple(input_ids.shape)}; allowed are integers of shape [T] or [1, T]: call prefill once a prompt"
            )
        input_ids = input_ids.tolist()
    try:
        tokens = [operator.index(token) for token in input_ids]
    except TypeError:
        raise ConfigError(
            f"input_ids is a {type(input_ids).__name__} of something else than whole numbers; allowed are the tokens of one "
            "prompt, as ints or as an integer tensor [T] or [1, T]"
        ) from None
    if not tokens:
        raise ConfigError("input_ids is empty; a prompt has at least one token")
    size = _vocabulary(model)
    if min(tokens) < 0 or (size is not None and max(tokens) >= size):
        strange = next(token for token in tokens if token < 0 or (size is not None and token >= size))
        raise ConfigError(
            f"input_ids has the token {strange}; allowed are 0 to {'' if size is None else size - 1}: use the model's own "
            "tokenizer, and leave padding out"
        )
    check_positions(model, len(tokens))
    return tokens


def check_positions(model: Any, count: int) -> None:
    """Whether the model can place so many tokens; behind the last learned position it would fail deep within.

    Positions that are computed (RoPE) have no end, save where they are computed in another way for longer prompts (`longrope`,
    `dynamic`): the keys of all tokens are others then, and those that are stored are no prefix's.

    Raises:
        ConfigError: for more tokens than a learned table of positions has places, or than have the same keys in any prompt.
    """
    config = getattr(model, "config", None)
    limit = getattr(config, "max_position_embeddings", None)
    turns = min(_turns(getattr(config, "rope_parameters", None), limit), default=count)
    if count > turns:
        raise ConfigError(
            f"{count} tokens were given; the keys of this model's first tokens are others where a prompt has more than {turns} "
            "(its rope_type says so), so no stored prefix fits. Shorten the prompt, or generate fewer tokens"
        )
    if not isinstance(limit, int) or count <= limit:
        return
    words, more = model.get_input_embeddings(), range(limit, limit + 8)  # OPT's table has two that no token takes
    tables = (part for part in model.modules() if isinstance(part, torch.nn.Embedding) and part is not words)
    if any(table.num_embeddings in more for table in tables):
        raise ConfigError(
            f"{count} tokens were given; the model has learned {limit} positions, and allows no more. Shorten the prompt, or "
            "generate fewer tokens"
        )


def _turns(rope: Any, limit: int | None) -> Iterator[int]:
    """How many tokens may be there before RoPE changes for all of them, of each kind of layer in which it does."""
    if not isinstance(rope, Mapping):
        return
    kind = rope.get("rope_type")
    if kind is None:  # by the type of layer
        for each in rope.values():
            yield from _turns(each, limit)
    elif "dynamic" in kind and limit is not None:
        yield limit
    elif kind == "longrope":
        yield int(rope["original_max_position_embeddings"])


def _vocabulary(model: Any) -> int | None:
    """How many tokens the model embeds."""
    find = getattr(model, "get_input_embeddings", None)
    weight = getattr(find(), "weight", None) if callable(find) else None
    return None if weight is None else int(weight.shape[0])
