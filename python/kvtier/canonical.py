"""One byte string per value: the encoding under every digest of kvtier.

Each value is a tag of one byte, a length of eight bytes (little endian) and that many bytes, so no two different
values share an encoding: ``None`` differs from an empty string, ``1`` from ``"1"`` and from ``1.0``, and fields
cannot run into each other.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TypeAlias

from kvtier.errors import ConfigError

__all__ = ["Value", "encode"]

Value: TypeAlias = "bool | int | float | str | bytes | list[Value] | tuple[Value, ...] | Mapping[str, Value] | None"


def _frame(tag: bytes, body: bytes) -> bytes:
    return tag + len(body).to_bytes(8, "little") + body


def encode(value: Value) -> bytes:
    """Encode ``value`` so that equal bytes mean equal values.

    Args:
        value: ``None``, ``bool``, ``int``, ``float``, ``str``, ``bytes``, a list or tuple of these (alike), or a
            mapping from ``str`` to these (its order does not count). Nested as deep as you like.

    Returns:
        The encoding. Does not block.

    Raises:
        ConfigError: for any other type, or a mapping whose keys are not strings.
    """
    match value:
        case None:
            return _frame(b"N", b"")
        case bool():
            return _frame(b"?", b"\x01" if value else b"\x00")
        case int():
            return _frame(b"i", str(value).encode())
        case float():
            return _frame(b"f", struct.pack("<d", value))
        case str():
            return _frame(b"s", value.encode("utf-8", "surrogatepass"))
        case bytes():
            return _frame(b"b", value)
        case list() | tuple():
            return _frame(b"l", b"".join(encode(item) for item in value))
        case Mapping():
            for key in value:
                if not isinstance(key, str):
                    raise ConfigError(
                        f"the key {key!r} is a {type(key).__name__}; only str keys can be part of a digest: convert it to str"
                    )
            return _frame(b"m", b"".join(encode(key) + encode(value[key]) for key in sorted(value)))
    raise ConfigError(
        f"a {type(value).__name__} ({value!r}) cannot be part of a digest; allowed are None, bool, int, float, str, bytes, "
        "lists, tuples and mappings of these: convert it first"
    )
