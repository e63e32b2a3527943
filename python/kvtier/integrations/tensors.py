"""Block bytes as torch tensors and back, a batch of blocks at a time, without a loop over tokens or blocks."""

from __future__ import annotations

from collections.abc import Sequence

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
    """Room for a batch of full blocks in one ``uint8`` tensor on the host, with views of each layer in it.

    Args:
        layout: the blocks' layout, ``gqa`` or ``mla``.
        blocks: how many blocks it holds.
    """

    def __init__(self, layout: KVLayout, blocks: int) -> None:
        self._layout = layout
        self._bytes = torch.empty((blocks, layout.block_bytes), dtype=torch.uint8)
        dtype, tokens = torch_dtype(layout), layout.block_tokens
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = []
        for layer, (heads, key_width, value_width) in enumerate(layer_shapes(layout)):
            segment = self._bytes[:, layout.offsets[layer] : layout.offsets[layer + 1]].view(dtype)
            if layout.kind == "mla":
                both = segment.unflatten(1, (tokens, key_width + value_width)).unsqueeze(0)
                self._views.append((both[..., :key_width], both[..., key_width:]))
            else:
                planes = segment.unflatten(1, (2, tokens, heads, key_width)).permute(1, 3, 0, 2, 4)
                self._views.append((planes[0], planes[1]))

    def rows(self, blocks: int) -> list[NDArray[np.uint8]]:
        """The first ``blocks`` blocks as writable arrays of ``block_bytes`` bytes, to put from or get into."""
        return list(self._bytes[:blocks].numpy())

    def write_to(self, cache: Sequence[tuple[torch.Tensor, torch.Tensor]], start: int, blocks: int) -> None:
        """Copy the first ``blocks`` blocks into each layer's keys and values, from token ``start`` on.

        Args:
            cache: each layer's keys and values, ``[1, heads, tokens, width]`` in the layout's dtype, on any device.
            start: the first block's first token.
            blocks: how many blocks.
        """
        for views, pair in zip(self._views, cache, strict=True):
            for view, tensor in zip(views, pair, strict=True):
                self._window(tensor, start, blocks).copy_(view[:, :blocks])

    def read_from(self, cache: Sequence[tuple[torch.Tensor, torch.Tensor]], start: int, blocks: int) -> None:
        """Copy each layer's keys and values from token ``start`` on into the first ``blocks`` blocks; the reverse of
        :meth:`write_to`.
        """
        for views, pair in zip(self._views, cache, strict=True):
            for view, tensor in zip(views, pair, strict=True):
                view[:, :blocks].copy_(self._window(tensor, start, blocks))

    def _window(self, tensor: torch.Tensor, start: int, blocks: int) -> torch.Tensor:
        """``[heads, blocks, block_tokens, width]``, a view of ``tensor``."""
        tokens = self._layout.block_tokens
        window: torch.Tensor = tensor[0].narrow(1, start, blocks * tokens).unflatten(1, (blocks, tokens))
        return window
