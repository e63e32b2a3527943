"""Ways into a model's attention, through the registry of transformers: to look at it, and to have several requests in a pass."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

__all__ = ["Member", "attending", "packs"]

_PREFIX = "kvtier_"
_active = threading.local()
_lock = threading.Lock()
_users: Counter[int] = Counter()
"""How many are in :func:`attending` of a model, by the number of its configuration: the last one puts its attention back."""


@dataclass(frozen=True)
class Member:
    """One request's part of a pass."""

    cached: int = 0
    """Tokens before it, which it attends to."""
    new: int = 0
    """Its tokens, behind those of the members before it."""
    seen: torch.Tensor | None = None
    """``bool[1, cached + new]``: which of them are there; ``None`` for all."""
    look: Callable[..., None] | None = None
    """Is told each layer's attention, see :meth:`kvtier.prefill.importance.AttentionMass.look`."""


def packs(model: Any) -> bool:
    """Whether the model attends through the registry, so that a pass may have several members. Some models (Falcon) name a way
    that is in the registry, and have code of their own for it: transformers says of a model's class which it is.
    """
    base = model.config._attn_implementation.removeprefix(_PREFIX)
    known = base in ALL_ATTENTION_FUNCTIONS and base in ALL_MASK_ATTENTION_FUNCTIONS
    return known and bool(getattr(model, "_supports_attention_backend", False))


@contextmanager
def attending(model: Any, members: Sequence[Member]) -> Iterator[None]:
    """What the model computes on this thread meanwhile has these members, each of which attends to its own tokens alone.

    Of one member the results are the same bits as without. A model that attends by something of its own (eager code outside
    of the registry) is left alone: it is not looked at, and takes no more than one.
    """
    config = model.config
    if not packs(model):
        yield
        return
    before = getattr(_active, "members", ())
    with _lock:  # another engine may be in this model right now
        base = config._attn_implementation.removeprefix(_PREFIX)
        if _PREFIX + base not in ALL_ATTENTION_FUNCTIONS:
            _register(_PREFIX + base, base)
        _users[id(config)] += 1
        config._attn_implementation = _PREFIX + base
    _active.members = members
    try:
        yield
    finally:
        _active.members = before
        with _lock:
            _users[id(config)] -= 1
            if not _users[id(config)]:
                del _users[id(config)]
                config._attn_implementation = base


def _register(name: str, base: str) -> None:
    attend, mask_of = ALL_ATTENTION_FUNCTIONS[base], ALL_MASK_ATTENTION_FUNCTIONS[base]

    def each_attends(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        *args: Any,
        **options: Any,
    ) -> Any:
        members: Sequence[Member] = getattr(_active, "members", ())

        def attends(member: Member, q: Any, k: Any, v: Any, mask: Any, own: dict[str, Any]) -> Any:
            if member.look is not None:
                scaling = own.get("scaling") or q.shape[-1] ** -0.5
                layer = getattr(module, "layer_idx", None) or 0
                member.look(layer, q, k, mask, scaling, own.get("sliding_window"))
            return attend(module, q, k, v, mask, *args, **own)

        if len(members) < 2:
            return attends(members[0] if members else Member(), query, key, value, attention_mask, options)
        outputs, first, before = [], 0, 0
        for number, member in enumerate(members):
            last, behind = first + member.new, before + member.cached + member.new
            own = dict(options)
            if own.get("position_ids") is not None:
                own["position_ids"] = own["position_ids"][..., first:last]
            mask = None if attention_mask is None else attention_mask[number]
            parts = query[:, :, first:last], key[:, :, before:behind], value[:, :, before:behind]
            outputs.append(attends(member, *parts, mask, own)[0])
            first, before = last, behind
        return torch.cat(outputs, 1), None

    def each_masks(
        *, q_length: int, kv_length: int, q_offset: int = 0, attention_mask: Any = None, **options: Any
    ) -> Any:
        members: Sequence[Member] = getattr(_active, "members", ())
        if len(members) < 2:
            return mask_of(
                q_length=q_length, kv_length=kv_length, q_offset=q_offset, attention_mask=attention_mask, **options
            )
        return [
            mask_of(
                q_length=member.new,
                kv_length=member.cached + member.new,
                q_offset=member.cached,
                attention_mask=member.seen,
                **options,
            )
            for member in members
        ]

    AttentionInterface.register(name, each_attends)
    AttentionMaskInterface.register(name, each_masks)
