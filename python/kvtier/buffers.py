"""Ways into memory that lends no plain buffer: torch tensors, extension dtypes, DLPack.

The extension calls :func:`export` for every object that the buffer protocol refuses; plain buffers never come here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvtier import _kvtier
from kvtier.errors import ConfigError, InvalidBlockError
from kvtier.layout import dtype_name

__all__ = ["export"]


def export(obj: Any, dtype: str, shape: Sequence[int] | None, token_axis: int, writable: bool) -> Any:
    """A plain C-contiguous byte buffer over the memory of ``obj``, without a copy.

    Args:
        obj: a torch CPU tensor, a NumPy array (also of an extension dtype such as ``ml_dtypes.bfloat16``), or anything
            with ``__dlpack__``.
        dtype: the layout's dtype; ``obj`` must be of it, or plain bytes.
        shape: the shape of a full block, or ``None`` for flat bytes; only an ``obj`` with as many axes is held to it.
        token_axis: the axis of ``shape`` that may be shorter.
        writable: whether the memory is a target.

    Returns:
        An object with the buffer protocol. Does not block.

    Raises:
        InvalidBlockError: what was given, and what is expected.
    """
    if hasattr(obj, "data_ptr") and hasattr(obj, "is_contiguous"):
        return _from_torch(obj, dtype, shape, token_axis)
    if isinstance(obj, np.ndarray | np.generic):
        return _from_numpy(np.asanyarray(obj), dtype, shape, token_axis, writable)
    if hasattr(obj, "__dlpack__"):
        view = _kvtier.DlpackView(obj.__dlpack__())
        if writable and memoryview(view).readonly:
            raise InvalidBlockError(f"a read-only {type(obj).__name__} was given; a target must be writable")
        return view
    try:
        view = memoryview(obj)
    except TypeError:
        raise InvalidBlockError(
            f"a {type(obj).__name__} was given; a block is bytes, or anything with the buffer protocol or __dlpack__ "
            "(NumPy arrays, torch CPU tensors)"
        ) from None
    if not view.c_contiguous:
        raise InvalidBlockError(
            f"a {type(obj).__name__} of shape {view.shape} and strides {view.strides} is not contiguous: copy it first"
        )
    raise InvalidBlockError(f"a read-only {type(obj).__name__} was given; a target must be writable")


def _from_torch(tensor: Any, dtype: str, shape: Sequence[int] | None, token_axis: int) -> Any:
    import torch

    if tensor.device.type != "cpu":
        raise InvalidBlockError(
            f"a tensor on {tensor.device} was given; this version reads and writes CPU memory: call .cpu() first"
        )
    if not tensor.is_contiguous():
        raise InvalidBlockError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous: "
            "call .contiguous() first"
        )
    _check(str(tensor.dtype), tuple(tensor.shape), dtype, shape, token_axis)
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def _from_numpy(array: np.ndarray, dtype: str, shape: Sequence[int] | None, token_axis: int, writable: bool) -> Any:
    if not array.flags.c_contiguous:
        raise InvalidBlockError(
            f"an array of shape {array.shape} and strides {array.strides} is not contiguous: "
            "use np.ascontiguousarray first"
        )
    if writable and not array.flags.writeable:
        raise InvalidBlockError("a read-only array was given; a target must be writable")
    _check(array.dtype.name, array.shape, dtype, shape, token_axis)
    return array.reshape(-1).view(np.uint8)


def _check(given: str, given_shape: tuple[int, ...], dtype: str, shape: Sequence[int] | None, token_axis: int) -> None:
    try:
        name = dtype_name(given)
    except ConfigError:
        name = given
    if name not in (dtype, "uint8"):
        raise InvalidBlockError(
            f"{given} was given; this layout takes {dtype} or plain bytes (uint8): convert it, or view it as uint8 if "
            "its bits are right already"
        )
    if shape is None or len(given_shape) != len(shape):
        return
    if any(a != b for axis, (a, b) in enumerate(zip(given_shape, shape, strict=True)) if axis != token_axis):
        raise InvalidBlockError(
            f"shape {given_shape} was given; this layout's blocks are {tuple(shape)}, with up to {shape[token_axis]} "
            f"tokens on axis {token_axis}: transpose it, or pass flat bytes in that order"
        )
