"""The attention that stored tokens received, kept beside their blocks, and which of them to load by it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.integrations.verbs import BlockNamespace
from kvtier.prefill.importance import SINKS

__all__ = ["Attended", "most_attended"]


_PASSING = ("deadline", "full", "cancelled")
"""Why a read fails that may succeed the next time."""


class Attended:
    """What :class:`kvtier.prefill.importance.AttentionMass` counted of the tokens of stored blocks, over all requests.

    It lies in a namespace beside the blocks, under their keys, so it goes down to NVMe as they do and survives a restart. A
    block's part is ``float32[2, block_tokens]``: mass, and how often the token was visible.

    Args:
        blocks: the namespace of the blocks.
    """

    def __init__(self, blocks: BlockNamespace) -> None:
        self._beside = blocks.beside("attention")
        self._tokens = blocks.layout.block_tokens

    def read(self, keys: Sequence[bytes], timeout: float | None = None) -> torch.Tensor:
        """Mass and visibility of the tokens of blocks, ``float32[2, tokens]``; 0 where nothing is known. Blocks as long as
        a load of a few bytes takes, and for ``timeout`` seconds at most; ``None`` is the store's default.

        Raises:
            DeadlineError, StorageError, CorruptError, FullError: where the store cannot serve.
        """
        found, _ = self._read(keys, timeout)
        return torch.from_numpy(found.swapaxes(0, 1).reshape(2, -1))

    def _read(self, keys: Sequence[bytes], timeout: float | None) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """What is known of each block, ``float32[blocks, 2, block_tokens]``, and whether that is all that there is."""
        found = np.zeros((len(keys), 2, self._tokens), np.float32)
        results = self._beside.get_into(keys, list(_bytes(found)), timeout=timeout)
        for part, result in zip(found, results, strict=True):
            if not result.hit:
                part[:] = 0
        return found, np.array([result.reason not in _PASSING for result in results], np.bool_)

    def add(self, keys: Sequence[bytes], more: torch.Tensor, timeout: float | None = None) -> torch.Tensor:
        """Count ``more``, ``float32[2, tokens]``, to blocks. Returns the sums. Blocks until they are stored, and for ``timeout``
        seconds at most for what was counted before; ``None`` is the store's default. Where that does not come in time, it
        stays as it is, and ``more`` alone is returned. Where the store has no room for the sums, counting begins anew.
        """
        sums, known = self._read(keys, timeout)
        sums += more.numpy().reshape(2, len(keys), self._tokens).swapaxes(0, 1)
        counted = [key for key, all_of_it in zip(keys, known, strict=True) if all_of_it]
        self._beside.remove(counted)  # a key's bytes do not change, so they are replaced
        self._beside.put_many(counted, list(_bytes(sums[known])))
        return torch.from_numpy(sums.swapaxes(0, 1).reshape(2, -1))


def _bytes(parts: NDArray[np.float32]) -> NDArray[np.uint8]:
    """``float32[blocks, 2, block_tokens]`` as a row of bytes a block; of no blocks too."""
    return parts.view(np.uint8).reshape(len(parts), parts.itemsize * math.prod(parts.shape[1:]))


def most_attended(attended: torch.Tensor, fraction: float) -> torch.Tensor:
    """Which tokens to keep of a prefix.

    Args:
        attended: ``float32[2, tokens]``, see :meth:`Attended.read`.
        fraction: how many of them, above 0, at most 1.

    Returns:
        ``bool[tokens]``: the first four, which every query attends to, those of which nothing is known, and of the others
        the most attended ones, as many as the fraction leaves room for.
    """
    mass, seen = attended
    scores = torch.where(seen > 0, mass / seen.clamp(min=1), torch.inf)
    scores[:SINKS] = torch.inf
    count = max(math.ceil(fraction * scores.numel()), int(scores.isinf().sum()))
    kept = torch.zeros(scores.numel(), dtype=torch.bool)
    kept[torch.argsort(scores, descending=True, stable=True)[:count]] = True
    return kept
