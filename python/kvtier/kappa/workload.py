"""A workload's κ: what each request of a trace would find cached, and what loading it saves.

Every request is taken as its K (the longest prefix of blocks seen before) and T (the rest, at least one token), with the
*reuse distance* of the prefix: the tokens of other blocks used since, which is what a cache in least-recently-used order
must hold to still have it.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import ConfigError
from kvtier.kappa.cost import kv_bytes
from kvtier.kappa.hardware import HardwareSpec, LinkSpec
from kvtier.kappa.model import ModelSpec
from kvtier.kappa.number import whole
from kvtier.kappa.ratio import kappa_crit, kappa_ratio, kappa_turn
from kvtier.kappa.ttft import compute

__all__ = ["TierSaving", "Workload", "WorkloadReport", "read_trace", "report"]

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


@dataclass(frozen=True)
class Workload:
    """Requests, one entry each in arrays of the same length."""

    name: str
    """For people."""
    cached: NDArray[np.int64]
    """K, tokens, with a cache that never forgets."""
    new: NDArray[np.int64]
    """T, tokens, at least 1."""
    generated: NDArray[np.int64]
    """O, tokens."""
    distance: NDArray[np.float64]
    """Tokens of distinct blocks that a cache must hold to have the whole prefix; 0 where nothing is cached."""
    weight: NDArray[np.float64]
    """How often each occurs; all 1 for a trace."""

    @property
    def tokens(self) -> int:
        """Prompt tokens of all requests, each counted once."""
        return int((self.cached + self.new).sum())


@dataclass(frozen=True)
class TierSaving:
    """What loading every prefix from one tier would save against computing it again, over all requests. Seconds."""

    tier: str
    """Its name."""
    rate: float
    """Bytes/s."""
    faster: float
    """Share of requests with a cached prefix for which loading it is faster."""
    recompute_s: float
    """TTFT summed over requests, everything computed."""
    loaded_s: float
    """TTFT summed over requests, each by the faster of the two."""
    mean_saved_s: float
    """Saved a request."""

    @property
    def saved(self) -> float:
        """Share of the TTFT that goes away."""
        return 1 - self.loaded_s / self.recompute_s if self.recompute_s else 0.0


@dataclass(frozen=True)
class WorkloadReport:
    """The κ of a workload on a machine."""

    name: str
    """The workload."""
    requests: int
    """How many."""
    token_hit: float
    """Share of prompt tokens that are cached."""
    quantiles: Mapping[float, float]
    """κ_ratio at each of :data:`QUANTILES`."""
    with_prefix: float
    """Share of requests with anything cached."""
    beyond_crit: float
    """Share of requests whose κ_ratio is above κ_crit(T): the link binds, if products are all that counts."""
    beyond_turn: float
    """The same with the streaming of the weights counted (:func:`kvtier.kappa.kappa_turn`)."""
    tiers: tuple[TierSaving, ...]
    """What each tier saves."""


def read_trace(path: str | Path, block_tokens: int = 512) -> Workload:
    """Read a trace of requests.

    Args:
        path: JSON Lines, gzipped or not: ``input_length``, ``output_length`` and the prompt's blocks, as ``hash_ids`` or
            as ``runs`` (``[start, length, ...]``); or the same as CSV with columns ``cached, new`` and perhaps
            ``generated``, where the hits are known.
        block_tokens: tokens a block. Default 512, as in both public traces.

    Raises:
        ConfigError: where the file cannot be read, has a line of another form, or counts tokens but names no blocks.
    """
    whole("block_tokens", block_tokens)
    path = Path(path)
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error}): give the path of a trace") from error
    except (ValueError, EOFError) as error:
        raise ConfigError(f"{path} is no text: give a trace as JSON Lines or CSV, gzipped or not") from error
    if text.lstrip()[:1] != "{":
        return _counted(path, text)
    return _chained(path, text, block_tokens)


def report(
    workload: Workload,
    model: ModelSpec,
    hardware: HardwareSpec,
    link: LinkSpec,
    tiers: Sequence[tuple[str, float]] = (),
) -> WorkloadReport:
    """The κ distribution of a workload, and what each tier would save.

    Args:
        workload: the requests.
        model: the model.
        hardware: the GPU.
        link: the link to it, the first tier.
        tiers: further ones, ``(name, bytes/s)``; the link caps their rate.

    Returns:
        The report; the TTFTs are serial ones, and each request takes the faster of load and recompute.

    Raises:
        ConfigError: for an empty workload.
    """
    if not workload.new.size:
        raise ConfigError(f"{workload.name} has no requests: give a trace that has some")
    k, t, weight = workload.cached, workload.new, workload.weight
    ratio = kappa_ratio(k, t)
    lengths, back = np.unique(t, return_inverse=True)
    crit = np.asarray(kappa_crit(model, hardware, link, lengths))[back]
    turn = np.asarray(kappa_turn(model, hardware, link, lengths))[back]
    hits = k > 0
    again = np.asarray(compute(model, hardware, np.zeros_like(k), k + t).total)
    after = np.asarray(compute(model, hardware, k, t).total)
    size = np.asarray(kv_bytes(model, k))
    savings = []
    for name, rate in (("link", link.read), *tiers):
        rate = min(rate, link.read)
        loaded = size / rate + after
        best = np.where(hits, np.minimum(loaded, again), again)
        savings.append(
            TierSaving(
                name,
                rate,
                _share(weight * hits, loaded < again),
                float((weight * again).sum()),
                float((weight * best).sum()),
                float((weight * (again - best)).sum() / weight.sum()),
            )
        )
    return WorkloadReport(
        workload.name,
        len(t),
        float((weight * k).sum() / (weight * (k + t)).sum()),
        {q: float(np.quantile(ratio, q)) for q in QUANTILES},
        _share(weight, hits),
        _share(weight, ratio > crit),
        _share(weight, ratio > turn),
        tuple(savings),
    )


def _share(weight: NDArray[np.float64], chosen: NDArray[np.bool_]) -> float:
    total = weight.sum()
    return float((weight * chosen).sum() / total) if total else 0.0


def _counted(path: Path, text: str) -> Workload:
    rows = csv.DictReader(io.StringIO(text))
    names = set(rows.fieldnames or ())
    if not {"cached", "new"} <= names:
        raise ConfigError(
            f"{path} has the columns {', '.join(sorted(names))}: without block ids nobody knows what was cached. Give "
            "JSON Lines with hash_ids or runs, or a CSV with cached and new"
        )
    try:
        lines = [(int(row["cached"]), int(row["new"]), int(row.get("generated") or 0)) for row in rows]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: line {rows.line_num} is not whole numbers: {error}") from error
    k, t, o = (
        (np.array(column, np.int64) for column in zip(*lines, strict=True)) if lines else (np.zeros(0, np.int64),) * 3
    )
    kappa_ratio(k, t)
    return Workload(path.name, k, t, o, k.astype(np.float64), np.ones(len(k)))


def _chained(path: Path, text: str, block_tokens: int) -> Workload:
    stack = _ReuseStack()
    rows: list[tuple[int, int, int, float]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            length, blocks = int(entry["input_length"]), list(_blocks(entry))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}: line {number} is no request ({error}): it needs input_length, and hash_ids or runs"
            ) from error
        if length < 1:
            raise ConfigError(f"{path}: line {number} has input_length={length}; allowed is at least 1")
        hit, distance = stack.touch(blocks)
        cached = min(hit * block_tokens, length - 1)
        rows.append((cached, length - cached, int(entry.get("output_length") or 0), float(distance * block_tokens)))
    table = np.array(rows, np.float64).reshape(-1, 4)
    whole_columns = table[:, :3].astype(np.int64)
    return Workload(
        path.name,
        whole_columns[:, 0],
        whole_columns[:, 1],
        whole_columns[:, 2],
        np.where(table[:, 0] > 0, table[:, 3], 0.0),
        np.ones(len(table)),
    )


def _blocks(entry: Mapping[str, Any]) -> Iterator[int]:
    if "hash_ids" in entry:
        yield from entry["hash_ids"]
        return
    runs = entry["runs"]
    for start, length in zip(runs[::2], runs[1::2], strict=True):
        yield from range(start, start + length)


class _ReuseStack:
    """Blocks in order of their last use, as a Fenwick tree over time, to count the distinct ones used since then."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        self._tree = [0] * (1 << 16)
        self._clock = 0

    def touch(self, blocks: Sequence[int]) -> tuple[int, int]:
        """Use a request's blocks, its tail first.

        Returns:
            How many from the front were used before, and how many distinct blocks the cache holds if it just still has
            the one of them used longest ago.
        """
        hit = next((i for i, block in enumerate(blocks) if block not in self._last), len(blocks))
        oldest = min((self._last[block] for block in blocks[:hit]), default=0)
        distance = len(self._last) - self._before(oldest) if hit else 0
        for block in reversed(blocks):
            if block in self._last:
                self._add(self._last[block], -1)
            self._clock += 1
            self._last[block] = self._clock
            self._add(self._clock, 1)
        return hit, distance

    def _before(self, time: int) -> int:
        """How many distinct blocks were last used before ``time``."""
        total, at = 0, time - 1
        while at > 0:
            total += self._tree[at]
            at &= at - 1
        return total

    def _add(self, time: int, change: int) -> None:
        while time >= len(self._tree):
            self._tree += [0] * len(self._tree)
            # The new root of the lower half's sums.
            self._tree[len(self._tree) // 2] = len(self._last) - (1 if change > 0 else 0)
        at = time
        while at < len(self._tree):
            self._tree[at] += change
            at += at & -at
