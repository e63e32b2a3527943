"""An engine's paged KV, and what a copy between it and blocks needs to be right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtier.errors import InvalidBlockError

__all__ = ["check_slots", "rows_of"]


def rows_of(plane: Any) -> Any:
    """A plane of paged KV as ``uint8[pages, page_tokens, heads, row]``, without a copy: NumPy or CuPy.

    Args:
        plane: ``[pages, page_tokens, heads, head_dim]`` or ``[pages, page_tokens, dim]`` of any dtype, with any strides
            but for the last axis, which is contiguous.
    """
    if len(plane.shape) not in (3, 4) or plane.strides[-1] != plane.itemsize:
        raise InvalidBlockError(
            f"a plane of shape {tuple(plane.shape)} and strides {tuple(plane.strides)} was given; it is "
            "[pages, page_tokens, heads, head_dim] or [pages, page_tokens, dim], the last axis contiguous: transpose it"
        )
    rows = plane.view(np.uint8)
    return rows if len(rows.shape) == 4 else rows[:, :, None, :]


def check_slots(blocks: Sequence[Any], planes: Sequence[Any], slots: Sequence[ArrayLike]) -> list[NDArray[np.int64]]:
    """The slots of each block's tokens as arrays, if all of it fits together.

    Args:
        blocks: ``uint8[bytes]`` each.
        planes: what :func:`rows_of` gave.
        slots: of each block, one number a token.
    """
    token = sum(plane.shape[2] * plane.shape[3] for plane in planes)
    most = min((plane.shape[0] * plane.shape[1] for plane in planes), default=0)
    if len({plane.shape[1] for plane in planes}) > 1:
        raise InvalidBlockError("planes of different page_tokens were given: a slot would mean another place in each")
    if len(blocks) != len(slots):
        raise InvalidBlockError(f"{len(slots)} lists of slots were given for {len(blocks)} blocks: give one a block")
    checked = []
    for block, given in zip(blocks, slots, strict=True):
        where = np.asarray(given)
        if where.ndim != 1 or where.dtype.kind not in "iu":
            raise InvalidBlockError(
                f"slots of shape {where.shape} and {where.dtype} were given: give one number a token"
            )
        where = where.astype(np.int64)
        if block.nbytes != len(where) * token:
            raise InvalidBlockError(
                f"a block of {block.nbytes} bytes was given for {len(where)} slots and planes of {token} bytes a token: "
                "give the planes in the block's order, each layer's keys before its values, and one slot a token"
            )
        if len(where) and not 0 <= where.min() <= where.max() < most:
            raise InvalidBlockError(f"slots {where.min()} to {where.max()} were given; allowed are 0 to {most - 1}")
        checked.append(where)
    return checked
