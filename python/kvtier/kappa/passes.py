"""Seconds of a prefill that runs in passes of bounded length, from a table of passes that were measured."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.errors import ConfigError
from kvtier.kappa.number import positive

__all__ = ["Passes"]


@dataclass(frozen=True)
class Passes:
    """What a pass of T tokens behind K cached ones was measured to take.

    A real prefill is no roofline: short passes multiply less efficiently, each pass streams the weights again, and
    attention reads the KV of all tokens before it. A table holds all of that. Between its points it is linear in K and in
    T, beyond its last K it goes on as between the last two.

    Args:
        cached: K, whole numbers that rise, the first 0; at least two.
        new: T, whole numbers that rise, the first 1; at least two. The last one is the longest pass, the chunk: a longer
            prefill is cut into passes of it.
        seconds: what was measured, ``seconds[i][j]`` for ``cached[i]`` and ``new[j]``.

    Raises:
        ConfigError: for anything else.
    """

    cached: tuple[int, ...]
    new: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    _sums: tuple[float, ...] = field(init=False, repr=False, compare=False, default=(0.0,))

    def __post_init__(self) -> None:
        for name, first in (("cached", 0), ("new", 1)):
            points: Sequence[object] = getattr(self, name)
            whole = all(type(point) is int for point in points)
            if len(points) < 2 or not whole or points[0] != first or sorted(set(points)) != list(points):  # type: ignore[type-var]
                raise ConfigError(
                    f"{name}={points!r} is not allowed; it must be at least two whole numbers that rise from {first}"
                )
            object.__setattr__(self, name, tuple(points))
        rows = tuple(tuple(positive("seconds", each) for each in row) for row in self.seconds)
        if len(rows) != len(self.cached) or any(len(row) != len(self.new) for row in rows):
            raise ConfigError(
                f"seconds has rows of {[len(row) for row in rows]}; it needs {len(self.cached)} rows (cached) of {len(self.new)} (new)"
            )
        object.__setattr__(self, "seconds", rows)

    @property
    def chunk(self) -> int:
        """Tokens of the longest pass."""
        return self.new[-1]

    def one(self, cached: float, new: float) -> float:
        """Seconds of one pass of at most a chunk."""
        i = min(bisect_right(self.cached, cached), len(self.cached) - 1)
        j = min(bisect_right(self.new, new), len(self.new) - 1)
        k, t = self.cached, self.new
        down = (cached - k[i - 1]) / (k[i] - k[i - 1])
        right = (new - t[j - 1]) / (t[j] - t[j - 1])
        above, below = self.seconds[i - 1], self.seconds[i]
        low = above[j - 1] + (below[j - 1] - above[j - 1]) * down
        high = above[j] + (below[j] - above[j]) * down
        return low + (high - low) * right

    def last(self, cached: int, new: int) -> float:
        """Seconds to compute ``new`` tokens behind ``cached``: passes of a chunk from there on, and the rest.

        Exact where ``cached`` is a multiple of the chunk; else the full passes are interpolated between those that are.
        """
        if new <= self.chunk:
            return self.one(cached, new)
        full, rest = divmod(new, self.chunk)
        behind = cached + full * self.chunk
        total = self._upto(behind) - self._upto(cached)
        return total + self.one(behind, rest) if rest else total

    def prefix(self, tokens: int) -> float:
        """Seconds to compute the first ``tokens`` of a prompt; 0 for none."""
        return self.last(0, tokens) if tokens else 0.0

    def chunks(self, count: int) -> tuple[float, ...]:
        """Seconds of the first 0, 1, ... full chunks of a prompt; at least ``count`` of them and the 0."""
        if count >= len(self._sums):
            self._extend(2 * count)
        return self._sums

    def _upto(self, tokens: int) -> float:
        """Seconds of the chunks before ``tokens``, with a share of the one that it cuts."""
        count, part = divmod(tokens, self.chunk)
        sums = self.chunks(count + 1)
        before = sums[count]
        return before + (sums[count + 1] - before) * part / self.chunk if part else before

    def _extend(self, count: int) -> None:
        """Sum up so many chunks. A second thread at worst does it again."""
        sums = list(self._sums)
        while len(sums) <= count:
            sums.append(sums[-1] + self.one((len(sums) - 1) * self.chunk, self.chunk))
        object.__setattr__(self, "_sums", tuple(sums))
