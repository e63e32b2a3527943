"""Block bytes as torch tensors and back, a batch of blocks at a time, without a loop over tokens or blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.errors import UnsupportedError
from kvtier.layout import KVLayout

__all__ = ["BlockBuffer", "layer_shapes", "torch_dtype"]

_TORCH = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "uint8": torch.uint8,
}


def torch_dtype(layout: KVLayout) -> torch.dtype:
    """The torch dtype of a layout's elements."""
    return _TORCH[layout.dtype]


def layer_shapes(layout: KVLayout) -> list[tuple[int, int, int]]:
    """``(heads, key width, value width)`` of each layer's cache tensors ``[1, heads, tokens, width]``.

    With ``mla`` transformers caches the latent as the keys and the rotary key as the values, with one head.

    Raises:
        UnsupportedError: for an opaque layout.
    """
    if layout.kind == "opaque":
        raise UnsupportedError(
            "an opaque layout has no keys and values: give a gqa or mla layout, see KVLayout.from_config"
        )
    if layout.kind == "mla":
        return [(1, layout.rank, layout.rope_dim)] * layout.layers
    return [(heads, dim, dim) for heads, dim in layout.heads]


class BlockBuffer:
    """Room for a batch of full blocks, or of a few layers of each, in ``uint8`` memory, with views of each layer in it.

    Args:
        layout: the blocks' layout, ``gqa`` or ``mla``.
        blocks: how many blocks it holds.
        layers: which layers of them; default all.
        memory: ``uint8`` memory to use, at least as large, on any device; default its own, on the host.
    """

    def __init__(
        self, layout: KVLayout, blocks: int, layers: range | None = None, memory: torch.Tensor | None = None
    ) -> None:
        self._layout = layout
        layers = range(layout.layers) if layers is None else layers
        base = layout.offsets[layers.start]
        size = layout.offsets[layers.stop] - base
        if memory is None:
            memory = torch.empty(blocks * size, dtype=torch.uint8)
        self._bytes = memory[: blocks * size].unflatten(0, (blocks, size))
        dtype, tokens = torch_dtype(layout), layout.block_tokens
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = []
        shapes = layer_shapes(layout)
        for layer in layers:
            heads, key_width, value_width = shapes[layer]
            segment = self._bytes[:, layout.offsets[layer] - base : layout.offsets[layer + 1] - base].view(dtype)
            if layout.kind == "mla":
                both = segment.unflatten(1, (tokens, key_width + value_width)).unsqueeze(0)
                self._views.append((both[..., :key_width], both[..., key_width:]))
            else:
                planes = segment.unflatten(1, (2, tokens, heads, key_width)).permute(1, 3, 0, 2, 4)
                self._views.append((planes[0], planes[1]))
        on_host = memory.device.type == "cpu"
        self._arrays = [(_whole(keys), _whole(values)) for keys, values in self._views] if on_host else []

    def rows(self, blocks: int) -> list[Any]:
        """The first ``blocks`` blocks as writable arrays of bytes, to put from or get into: NumPy's, on a GPU torch's."""
        some = self._bytes[:blocks]
        return list(some.numpy() if some.device.type == "cpu" else some)

    def write_to(
        self, cache: Sequence[tuple[torch.Tensor, torch.Tensor]], start: int, blocks: int, at: int = 0
    ) -> None:
        """Copy blocks into each layer's keys and values, from token ``start`` on.

        Args:
            cache: the keys and values of each of its layers, ``[1, heads, tokens, width]`` in the layout's dtype, on any
                device.
            start: the first block's first token.
            blocks: how many blocks.
            at: which of its blocks is the first.
        """
        for window, block in self._windows(cache, start, blocks, at):
            _copy(window, block)

    def clear(self, blocks: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """Zero some tokens in all of its layers.

        Args:
            blocks: which of its blocks each is in, ``int64[n]``.
            tokens: which token of the block it is.
        """
        for arrays in self._arrays:
            for array in arrays:
                array[:, blocks, tokens] = 0
        if not self._arrays:
            device = self._bytes.device
            places = torch.from_numpy(blocks).to(device), torch.from_numpy(tokens).to(device)
            for views in self._views:
                for view in views:
                    view[:, *places] = 0

    def read_from(self, cache: Sequence[tuple[torch.Tensor, torch.Tensor]], start: int, blocks: int) -> None:
        """Copy each layer's keys and values from token ``start`` on into the first ``blocks`` blocks; the reverse of
        :meth:`write_to`.
        """
        for window, block in self._windows(cache, start, blocks, 0):
            _copy(block, window)

    def _windows(
        self, cache: Sequence[tuple[torch.Tensor, torch.Tensor]], start: int, blocks: int, at: int
    ) -> Iterator[tuple[Any, Any]]:
        """Tokens of each tensor of a cache, and of as many blocks: ``[heads, blocks, block_tokens, width]`` both, views. Within
        the host's memory they are NumPy's: it copies on this thread alone, torch would take the cores that the model uses.
        """
        tokens = self._layout.block_tokens
        on_host = bool(self._arrays) and cache[0][0].device.type == "cpu"
        ours: Sequence[tuple[Any, Any]] = self._arrays if on_host else self._views
        for views, pair in zip(ours, cache, strict=True):
            for view, tensor in zip(views, pair, strict=True):
                one = _whole(tensor) if on_host else tensor.detach()
                some = one[0, :, start : start + blocks * tokens]
                yield some.reshape(some.shape[0], blocks, tokens, some.shape[2]), view[:, at : at + blocks]


def _copy(to: Any, source: Any) -> None:
    if isinstance(to, np.ndarray):
        np.copyto(to, source)
    else:
        to.copy_(source)


def _whole(tensor: torch.Tensor) -> NDArray[Any]:
    """A tensor on the host as whole numbers."""
    return tensor.detach().view(_WHOLE[tensor.element_size()]).numpy()


# NumPy has no bf16 and no fp8, and copies whole numbers of the same size just as well.
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
