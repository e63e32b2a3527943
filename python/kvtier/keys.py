"""Keys of blocks: the namespace digest and the chain, both BLAKE3.

``namespace = BLAKE3(canonical identity and layout)`` and
``key_i = BLAKE3(namespace, key_{i-1}, tokens_i, extras_i)``, where every field is preceded by its length in bytes as a
little-endian ``u64``, tokens are little-endian ``u32``, ``key_{-1}`` is empty and so is an absent extra. Equal keys mean
equal prefixes. Test vectors are in ``docs/FORMAT.md``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvtier import _kvtier
from kvtier.errors import InvalidBlockError
from kvtier.layout import KVLayout

__all__ = ["Extras", "Tokens", "chain", "namespace_digest", "token_array"]

Tokens: TypeAlias = Sequence[int] | NDArray[np.integer]
"""Token ids, each 0 to 2**32 - 1: a sequence of ``int``, or an array (NumPy, torch) of any integer dtype, 1-D."""

Extras: TypeAlias = Mapping[int, bytes] | Sequence[bytes | None]
"""What else a block's meaning depends on (the digest of an image, say): by block number, or one a block."""


def namespace_digest(identity: bytes) -> bytes:
    """The 32-byte BLAKE3 digest of a canonical identity, such as :meth:`kvtier.Identity.to_bytes` gives."""
    return _kvtier.Space(identity, [], 0, "uint8", 1).digest


def chain(
    identity: bytes, tokens: Tokens, block_tokens: int, *, extras: Extras | None = None, partial: bool = False
) -> list[bytes]:
    """The keys of a prompt's blocks; :meth:`kvtier.Namespace.chain` is the usual way to them.

    Args:
        identity: the canonical identity of the namespace.
        tokens: the prompt; see :data:`Tokens`.
        block_tokens: tokens a full block.
        extras: see :data:`Extras`. Default none.
        partial: also a key for the tokens that fill no block. Default no.

    Returns:
        One 32-byte key a block. Hashes about 1 GB of tokens a second and holds no lock meanwhile.

    Raises:
        InvalidBlockError: for tokens that are not whole numbers in range, or extras for blocks that there are not.
    """
    return chain_in(_kvtier.Space(identity, [], 0, "uint8", 1), tokens, block_tokens, extras, partial)


def chain_in(
    space: _kvtier.Space, tokens: Tokens, block_tokens: int, extras: Extras | None, partial: bool
) -> list[bytes]:
    """As :func:`chain`, in a namespace that is open already."""
    if block_tokens < 1:
        raise InvalidBlockError(f"block_tokens={block_tokens} was given; a block has at least 1 token")
    ids = token_array(tokens)
    blocks = -(-len(ids) // block_tokens) if partial else len(ids) // block_tokens
    return space.chain(ids, block_tokens, partial, _extras(extras, blocks))


def token_array(tokens: Tokens) -> NDArray[np.uint32]:
    """Token ids as a contiguous array of ``uint32``.

    Raises:
        InvalidBlockError: for anything but whole numbers from 0 to 2**32 - 1 in one dimension.
    """
    ids = np.asarray(tokens)
    if ids.size == 0:
        return np.empty(0, np.uint32)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise InvalidBlockError(
            f"tokens of dtype {ids.dtype} and shape {ids.shape} were given; allowed is one dimension of whole numbers"
        )
    if ids.min() < 0 or ids.max() > 0xFFFF_FFFF:
        raise InvalidBlockError(
            f"tokens from {ids.min()} to {ids.max()} were given; allowed are 0 to {0xFFFF_FFFF}: leave padding out"
        )
    return np.ascontiguousarray(ids, dtype=np.uint32)


def _extras(extras: Extras | None, blocks: int) -> list[bytes]:
    if not extras:
        return []
    if isinstance(extras, Mapping):
        strange = [i for i in extras if not isinstance(i, int) or not 0 <= i < blocks]
        listed = [extras.get(i) for i in range(blocks)]
    else:
        strange = list(range(blocks, len(extras)))
        listed = list(extras)
    if strange:
        raise InvalidBlockError(f"extras for blocks {strange} were given; the tokens make blocks 0 to {blocks - 1}")
    if not all(isinstance(extra, bytes | None) for extra in listed):
        raise InvalidBlockError("extras must be bytes, such as a digest of the image: str and others are ambiguous")
    return [extra or b"" for extra in listed]


def space_of(identity: bytes, layout: KVLayout) -> _kvtier.Space:
    """The native namespace of an identity and a layout."""
    shape: tuple[int, ...] | None = None
    if layout.kind == "mla" or (layout.kind == "gqa" and layout.uniform):
        shape = layout.shape()
    axis = 1 if layout.kind == "mla" else 2
    segments = [(segment.planes, segment.token_bytes) for segment in layout.segments]
    return _kvtier.Space(identity, segments, layout.block_tokens, layout.dtype, layout.itemsize, shape, axis)
