"""The KV of one request: room for all of it from the start, filled by loads and by the model, in any order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvtier.errors import InvalidBlockError
from kvtier.integrations.tensors import layer_shapes, torch_dtype
from kvtier.layout import KVLayout

__all__ = ["Readers", "Room", "RoomyCache", "RoomyLayer", "packed_cache"]

Pair = tuple[torch.Tensor, torch.Tensor]


class Readers:
    """Who still reads the tokens below ``end``: they must not be overwritten before that."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self.end = 0

    def enter(self, end: int) -> None:
        """Somebody reads tokens below ``end`` from now on."""
        with self._changed:
            self._count += 1
            self.end = max(self.end, end)

    def leave(self) -> None:
        """They have finished."""
        with self._changed:
            self._count -= 1
            if not self._count:
                self.end = 0
                self._changed.notify_all()

    def wait(self) -> None:
        """Block until nobody reads. A reader copies memory and does nothing else, so this is short."""
        with self._changed:
            self._changed.wait_for(lambda: not self._count)


class RoomyLayer(DynamicLayer):
    """A cache layer that writes new tokens into room set aside at the start, instead of copying all of the past for
    each chunk.

    Where the room runs out, or somebody replaced its tensors, it behaves like its parent.
    """

    def __init__(self, index: int, pair: Pair, readers: Readers) -> None:
        super().__init__()
        self.index = index
        self.room = pair
        self.device = pair[0].device
        self.is_initialized = True
        self.readers = readers
        self.before: Callable[[int], None] | None = None
        """Called with the layer's number before each update, while a request runs."""
        self.fill(0)

    def fill(self, tokens: int) -> None:
        """Say that the first ``tokens`` tokens of the room hold the cache."""
        self.keys, self.values = (tensor[:, :, :tokens] for tensor in self.room)

    def update(  # noqa: D102
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.before is not None:
            self.before(self.index)
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
        if start < self.readers.end:
            self.readers.wait()
        for room, new in zip(self.room, (key_states, value_states), strict=True):
            room[:, :, start:end] = new
        self.fill(end)
        return self.keys, self.values

    def reset(self) -> None:  # noqa: D102
        self.readers.wait()
        super().reset()


class RoomyCache(DynamicCache):
    """The cache that the model sees."""

    hidden: torch.Tensor | None = None
    """``bool[tokens]`` on the model's device: the first tokens, and which of them were left out, so that there is nothing to
    attend to at their places; ``None`` if none were. :func:`kvtier.prefill.forward` masks them.
    """


class _PackedLayer(DynamicLayer):
    """A layer of several caches: new tokens lie behind each other, and so does what is attended to."""

    def __init__(self, layers: Sequence[Any], counts: Sequence[int]) -> None:
        super().__init__()
        self.layers, self.counts = layers, list(counts)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[torch.Tensor, torch.Tensor]:
        new = zip(self.layers, key_states.split(self.counts, 2), value_states.split(self.counts, 2), strict=True)
        found = [layer.update(keys, values) for layer, keys, values in new]
        return torch.cat([keys for keys, _ in found], 2), torch.cat([values for _, values in found], 2)


def packed_cache(caches: Sequence[DynamicCache], counts: Sequence[int]) -> DynamicCache:
    """Several caches as one, for a pass of as many new tokens each; see :func:`kvtier.prefill.registry.attending`."""
    packed = DynamicCache()
    packed.layers = [_PackedLayer(layers, counts) for layers in zip(*(cache.layers for cache in caches), strict=True)]
    return packed


class Room:
    """The tensors of a request's KV, ``[1, heads, tokens, width]`` a layer, and the cache that the model sees.

    Args:
        layout: the model's layout.
        tokens: how many it takes.
        device: where.
    """

    def __init__(self, layout: KVLayout, tokens: int, device: torch.device) -> None:
        dtype = torch_dtype(layout)
        self.pairs: list[Pair] = [
            (
                torch.empty((1, heads, tokens, key_width), dtype=dtype, device=device),
                torch.empty((1, heads, tokens, value_width), dtype=dtype, device=device),
            )
            for heads, key_width, value_width in layer_shapes(layout)
        ]
        self.readers = Readers()
        self.layers = [RoomyLayer(i, pair, self.readers) for i, pair in enumerate(self.pairs)]
        self.cache = RoomyCache()
        self.cache.layers = list(self.layers)

    @classmethod
    def of(cls, cache: DynamicCache) -> list[Pair] | None:
        """Each layer's keys and values of a cache of one sequence, whoever made it; ``None`` where it has none."""
        pairs = [(layer.keys, layer.values) for layer in cache.layers]
        if any(keys is None or keys.dim() != 4 or keys.shape[0] != 1 for keys, _ in pairs):
            return None
        return pairs

    def hide(self, hidden: torch.Tensor) -> None:
        """Leave tokens out, see :attr:`RoomyCache.hidden`. At their places there must be numbers."""
        self.cache.hidden = hidden.to(self.pairs[0][0].device)

    def clear(self, tokens: torch.Tensor) -> None:
        """Zero some tokens, ``int64[n]``, in all layers: what happens to lie there might be NaN, which stays NaN times a
        weight of 0.
        """
        tokens = tokens.to(self.pairs[0][0].device)
        for pair in self.pairs:
            for tensor in pair:
                tensor.index_fill_(2, tokens, 0)

    def fill(self, tokens: int) -> None:
        """Let the model see the first ``tokens`` tokens, whatever lies behind them."""
        for layer in self.layers:
            layer.fill(tokens)

    def watch(self, before: Callable[[int], None] | None) -> None:
        """Call ``before`` ahead of each layer's update, or nothing any more."""
        for layer in self.layers:
            layer.before = before

    def slice(self, layers: Iterable[int]) -> list[Pair]:
        """The tensors of some layers."""
        return [self.pairs[i] for i in layers]
