"""The same verbs over a plain ``dict``: what a store's answers are compared with."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvtier import canonical
from kvtier.errors import InvalidBlockError
from kvtier.layout import KVLayout
from kvtier.tiers.backend import DeviceBackend

__all__ = ["DictNamespace"]


@dataclass(frozen=True)
class _Match:
    blocks: int
    tokens: int
    tiers: list[str]
    bytes: dict[str, int]


@dataclass(frozen=True)
class _Result:
    hit: bool
    tier: str | None
    reason: str | None


@dataclass(frozen=True)
class _PutResult:
    stored: bool
    present: bool
    tier: str


class _Done:
    """A prefetch with nothing to do: everything is in memory already."""

    def cancel(self) -> bool:
        return False


@dataclass
class DictNamespace:
    """Blocks in a Python ``dict``: no capacity, no eviction, no checksum, no threads. For comparison and for tests,
    not for serving.

    Args:
        layout: the layout of the blocks.

    Its keys are a chain of BLAKE2b digests, so they are not those of a :class:`kvtier.Namespace`. No verb blocks.
    """

    layout: KVLayout
    blocks: dict[bytes, bytes] = field(default_factory=dict)
    importance: dict[bytes, float] = field(default_factory=dict)
    besides: dict[str, DictNamespace] = field(default_factory=dict)

    @property
    def emulated(self) -> tuple[str, ...]:
        """None: a dict is as fast as it is."""
        return ()

    @property
    def device(self) -> DeviceBackend | None:
        """None: all of it is in the process's memory."""
        return None

    def chain(self, token_ids: Sequence[int], extras: None = None) -> list[bytes]:
        """One 32-byte key a full block of ``token_ids``; equal keys mean equal prefixes."""
        size = self.layout.block_tokens
        keys, previous = [], b""
        for start in range(0, len(token_ids) - size + 1, size):
            text = canonical.encode([previous, [int(token) for token in token_ids[start : start + size]]])
            previous = hashlib.blake2b(text, digest_size=32).digest()
            keys.append(previous)
        return keys

    def beside(self, name: str) -> DictNamespace:
        """Opaque blocks for what belongs to the blocks of this one, under the same keys."""
        return self.besides.setdefault(name, DictNamespace(KVLayout.opaque()))

    def match(self, keys: Sequence[bytes]) -> _Match:
        """How many of the first ``keys`` are here, without a gap."""
        count = next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))
        size = count * self.layout.block_bytes
        return _Match(count, count * self.layout.block_tokens, ["dict"] * count, {"dict": size} if count else {})

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key is here."""
        return [key in self.blocks for key in keys]

    def remove(self, keys: Sequence[bytes]) -> list[bool]:
        """Forget blocks. Whether each was here."""
        return [self.blocks.pop(key, None) is not None for key in keys]

    def set_importance(self, keys: Sequence[bytes], scores: Sequence[float]) -> list[bool]:
        """Keep the score of each key that is here."""
        held = self.contains(keys)
        self.importance |= {key: score for key, score, here in zip(keys, scores, held, strict=True) if here}
        return held

    def prefetch(
        self, keys: Sequence[bytes], *, to: str = "dram", deadline: float | None = None, priority: int = 0
    ) -> _Done:
        """Nothing to do."""
        return _Done()

    def put_many(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[NDArray[np.uint8]],
        *,
        parents: Sequence[bytes | None] | None = None,
        timeout: float | None = None,
    ) -> list[_PutResult]:
        """Copy each block (``uint8``, ``layout.block_bytes`` long) unless its key is here already.

        Raises:
            InvalidBlockError: for a block of another size.
        """
        results = []
        for key, block in zip(keys, blocks, strict=True):
            present = key in self.blocks
            if not present:
                if self.layout.kind != "opaque":
                    self._check(block, self.layout.block_bytes)
                self.blocks[key] = block.tobytes()
            results.append(_PutResult(stored=not present, present=present, tier="dict"))
        return results

    def get_into(
        self,
        keys: Sequence[bytes],
        outs: Sequence[NDArray[np.uint8]],
        *,
        layers: tuple[int, int] | None = None,
        tokens: tuple[int, int] | NDArray[np.bool_] | None = None,
        timeout: float | None = None,
    ) -> list[_Result]:
        """Copy each block, or some layers or tokens of it, into its buffer (``uint8``, exactly as long). Tokens of each
        block's own go where they would lie among all.

        Raises:
            InvalidBlockError: for a buffer of another size.
        """
        results = []
        only, span = (tokens, None) if isinstance(tokens, np.ndarray) else (None, tokens)
        ranges = [
            each
            for layer in range(*(layers or (0, self.layout.layers)))
            for each in self.layout.byte_range(layer, span)
        ]
        for number, (key, out) in enumerate(zip(keys, outs, strict=True)):
            block = self.blocks.get(key)
            if block is None:
                results.append(_Result(False, None, "absent"))
                continue
            parts = [block[start:stop] for start, stop in ranges] if ranges else [block]
            part = np.frombuffer(b"".join(parts), np.uint8)
            self._check(out, part.nbytes)
            if only is None:
                out[:] = part
            else:
                at = 0
                for start, stop in ranges:  # a plane each
                    plane = at, at + stop - start
                    to, source = (each[slice(*plane)].reshape(only.shape[1], -1) for each in (out, part))
                    to[only[number]] = source[only[number]]
                    at = plane[1]
            results.append(_Result(True, "dict", None))
        return results

    def get(self, key: bytes) -> NDArray[np.uint8] | None:
        """A copy of a block, or ``None``."""
        block = self.blocks.get(key)
        return None if block is None else np.frombuffer(block, np.uint8).copy()

    def _check(self, block: NDArray[np.uint8], size: int) -> None:
        if block.nbytes != size:
            raise InvalidBlockError(f"a buffer of {block.nbytes} bytes was given; it takes {size}: give as many")
