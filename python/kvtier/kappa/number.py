"""The numbers that the model computes with: exact whole numbers, or arrays of them, through the same formulas."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import ConfigError

__all__ = ["Number", "positive", "scalar", "tokens", "whole"]

Number: TypeAlias = "float | NDArray[np.float64]"
"""A Python number, or a float64 array; arrays broadcast. Whole Python numbers stay exact, whatever their size."""


def tokens(value: Any, what: str, least: int = 0) -> Any:
    """A number of tokens, or an array of them.

    Args:
        value: an int, or anything that NumPy makes an array of whole numbers from.
        what: its name, for the error.
        least: the smallest that is allowed. Default 0.

    Returns:
        An ``int``, or a float64 array of the same shape.

    Raises:
        ConfigError: for anything that is not whole, or is less than ``least``.
    """
    if isinstance(value, bool):
        raise ConfigError(f"{what}={value!r} is not a number of tokens; allowed are whole numbers from {least}")
    if isinstance(value, int):
        if value < least:
            raise ConfigError(f"{what}={value!r} is not a number of tokens; allowed are whole numbers from {least}")
        return value
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        array = np.array(np.nan)
    if not np.all(np.isfinite(array)) or np.any(array < least) or np.any(array != np.floor(array)):
        raise ConfigError(f"{what}={value!r} is not a number of tokens; allowed are whole numbers from {least}")
    return int(array) if array.ndim == 0 else array


def scalar(value: Any) -> bool:
    """Whether ``value`` is one number and not an array."""
    return not isinstance(value, np.ndarray)


def clip(value: Any, low: Any, high: Any) -> Any:
    """``min(max(value, low), high)``, exact for Python numbers, element by element for arrays."""
    if scalar(value) and scalar(low) and scalar(high):
        return min(max(value, low), high)
    return np.minimum(np.maximum(value, low), high)


def smaller(one: Any, other: Any) -> Any:
    """The smaller of two, exact for Python numbers, element by element for arrays."""
    return min(one, other) if scalar(one) and scalar(other) else np.minimum(one, other)


def larger(one: Any, other: Any) -> Any:
    """The larger of two, exact for Python numbers, element by element for arrays."""
    return max(one, other) if scalar(one) and scalar(other) else np.maximum(one, other)


def whole(what: str, value: object, least: int = 1) -> int:
    """``value``, if it is a whole number of at least ``least``, Python's or NumPy's.

    Raises:
        ConfigError: if it is not.
    """
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{what}={value!r} is not allowed; it must be a whole number of at least {least}")
    return int(value)


def positive(what: str, value: object, *, zero: bool = False) -> float:
    """``value`` as a float, if it is a finite number above 0 (or at least 0, with ``zero``).

    Raises:
        ConfigError: if it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        raise ConfigError(f"{what}={value!r} is not a number; allowed is a finite number above 0")
    if value < 0 or (value == 0 and not zero):
        raise ConfigError(
            f"{what}={value!r} is out of range; allowed is a finite number {'from' if zero else 'above'} 0"
        )
    return float(value)
