"""Ways into memory that lends no plain buffer: torch tensors, extension dtypes, DLPack.

The extension calls :func:`export` for every object that the buffer protocol refuses; plain buffers never come here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvtier import _kvtier
from kvtier.errors import ConfigError, InvalidBlockError
from kvtier.layout import DTYPES, dtype_name

__all__ = ["check", "export"]

_CPU_DEVICES = (1, 3)  # kDLCPU, kDLCUDAHost


def export(obj: Any, dtype: str | None, shape: Sequence[int] | None, token_axis: int, writable: bool) -> Any:
    """A plain C-contiguous byte buffer over the memory of ``obj``, without a copy.

    Args:
        obj: a torch CPU tensor, a NumPy array (also of an extension dtype such as ``ml_dtypes.bfloat16``), or anything
            with ``__dlpack__``.
        dtype: the layout's dtype; ``obj`` must be of it, or plain bytes. ``None`` takes any.
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
    if isinstance(obj, np.ndarray):
        return _from_numpy(obj, dtype, shape, token_axis, writable)
    if isinstance(obj, np.generic):
        return _from_numpy(_frozen(obj), dtype, shape, token_axis, writable)
    if hasattr(obj, "__dlpack__"):
        return _from_dlpack(obj, dtype, shape, token_axis, writable)
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


def _from_torch(tensor: Any, dtype: str | None, shape: Sequence[int] | None, token_axis: int) -> Any:
    import torch

    if tensor.device.type != "cpu":
        raise InvalidBlockError(
            f"a tensor on {tensor.device} was given; without an Hbm tier on it, only CPU memory is read and written: call .cpu() first"
        )
    if tensor.layout != torch.strided:
        raise InvalidBlockError(
            f"a tensor of layout {tensor.layout} was given; it must be dense: call .to_dense() first"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise InvalidBlockError(
            "a lazily conjugated or negated tensor was given, whose memory holds other values: call .resolve_conj() and "
            ".resolve_neg() first"
        )
    if not tensor.is_contiguous():
        raise InvalidBlockError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous: "
            "call .contiguous() first"
        )
    check(str(tensor.dtype), tuple(tensor.shape), dtype, shape, token_axis)
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def _from_numpy(
    array: np.ndarray, dtype: str | None, shape: Sequence[int] | None, token_axis: int, writable: bool
) -> Any:
    if array.dtype.hasobject:
        raise InvalidBlockError(f"an array of dtype {array.dtype} was given; it holds objects, not bytes: convert it")
    if not array.flags.c_contiguous:
        raise InvalidBlockError(
            f"an array of shape {array.shape} and strides {array.strides} is not contiguous: "
            "use np.ascontiguousarray first"
        )
    if writable and not array.flags.writeable:
        raise InvalidBlockError("a read-only array was given; a target must be writable")
    check(array.dtype.name, array.shape, dtype, shape, token_axis)
    return array.reshape(-1).view(np.uint8)


def _frozen(scalar: np.generic) -> np.ndarray:
    """A scalar has no memory of its own to write to."""
    array = np.asarray(scalar)
    array.flags.writeable = False
    return array


def _from_dlpack(
    obj: Any, dtype: str | None, shape: Sequence[int] | None, token_axis: int, writable: bool
) -> _kvtier.DlpackView:
    name = type(obj).__name__
    if hasattr(obj, "__dlpack_device__") and obj.__dlpack_device__()[0] not in _CPU_DEVICES:
        raise InvalidBlockError(
            f"a {name} on DLPack device {tuple(obj.__dlpack_device__())} was given; without an Hbm tier on it, only CPU "
            "memory is read and written: copy it to the CPU first"
        )
    try:
        try:
            capsule = obj.__dlpack__(max_version=(1, 0))
        except TypeError:  # from before DLPack 1.0
            capsule = obj.__dlpack__()
    except BufferError as error:
        raise InvalidBlockError(f"a {name} was given whose memory DLPack cannot lend: {error}") from error
    view = _kvtier.DlpackView(capsule)
    if writable and view.readonly:
        raise InvalidBlockError(f"a read-only {name} was given; a target must be writable")
    check(view.dtype, view.shape, dtype, shape, token_axis)
    return view


def check(
    given: str, given_shape: tuple[int, ...], dtype: str | None, shape: Sequence[int] | None, token_axis: int
) -> None:
    """Refuse an array of another dtype or shape than a layout takes; see :func:`export`."""
    if dtype is not None:
        try:
            name = dtype_name(given)
        except ConfigError:
            name = given
        bits = given.removeprefix("torch.") == f"uint{8 * DTYPES[dtype]}"  # the bit patterns of its elements
        if name not in (dtype, "uint8") and not bits:
            raise InvalidBlockError(
                f"{given} was given; this layout takes {dtype} or plain bytes (uint8): convert it, or view it as uint8 "
                "if its bits are right already"
            )
    if shape is None or len(given_shape) != len(shape):
        return
    allowed = [list(shape)]
    if dtype is not None and given.endswith("int8"):  # bytes, viewed from larger elements
        allowed.append([*shape[:-1], shape[-1] * DTYPES[dtype]])
    if not any(_same(given_shape, each, token_axis) for each in allowed):
        raise InvalidBlockError(
            f"shape {given_shape} was given; this layout's blocks are {tuple(shape)}, with up to {shape[token_axis]} "
            f"tokens on axis {token_axis}: transpose it, or pass flat bytes in that order"
        )


def _same(given: Sequence[int], wanted: Sequence[int], token_axis: int) -> bool:
    return all(a == b for axis, (a, b) in enumerate(zip(given, wanted, strict=True)) if axis != token_axis)
