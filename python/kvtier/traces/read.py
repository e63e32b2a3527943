"""Trace files: Mooncake's JSON Lines, the same with runs of ids, and CSVs of lengths; gzipped or not."""

from __future__ import annotations

import csv
import gzip
import json
import math
import re
import zlib
from collections.abc import Callable, Hashable, Iterator
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import IO, Any

from kvtier.errors import ConfigError
from kvtier.traces.trace import Trace

__all__ = ["read"]

Request = tuple[float, int, list[Hashable]]

MOST_BLOCKS = 1 << 24
"""Blocks of one request at most; more is a damaged line."""
MOST_TOKENS = 1 << 32
"""Tokens of one request, or of a block, at most; more is a damaged line."""


def read(path: str | Path, *, block_tokens: int | None = None, skip_bad: bool = False) -> Trace:
    """Read a trace file into memory.

    A line of JSON Lines has ``timestamp`` (milliseconds), ``input_length`` (tokens) and either ``hash_ids`` (Mooncake:
    a list of ids) or ``runs`` (``[start, length, …]``: consecutive whole numbers). A CSV has a column of arrival times
    (``timestamp``, or a date and time) and one of lengths (``input_length``, ``ContextTokens`` or ``tokens``); it says
    nothing of shared prefixes, so each of its requests is a chain of its own.

    Args:
        path: the file, perhaps ending in ``.gz``.
        block_tokens: tokens in a block. Default: what the name says (``…_b512…``), else 512 as in Mooncake's traces.
        skip_bad: leave out lines that cannot be read, and count them in ``Trace.skipped``.

    Raises:
        ConfigError: for a file or line that cannot be read, with the line's number and the reason.
    """
    path = Path(path)
    if block_tokens is None:
        named = re.search(r"_b(\d+)", path.name)
        block_tokens = int(named[1]) if named else 512
    if not 1 <= block_tokens <= MOST_TOKENS:
        raise ConfigError(f"{path}: blocks of {block_tokens} tokens; 1 to {MOST_TOKENS} are allowed (block_tokens)")
    skipped = 0
    requests: list[Request] = []
    try:
        with _open(path) as file:
            for number, parse in _lines(file, path, block_tokens):
                try:
                    requests.append(parse())
                except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
                    if not skip_bad:
                        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
                        raise ConfigError(
                            f"{path}, line {number}: {reason}. Correct it, or leave such lines out with --skip-bad"
                        ) from error
                    skipped += 1
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, csv.Error) as error:
        raise ConfigError(f"{path}: {error}. Give a trace as JSON Lines or CSV, gzipped or not") from error
    if not requests:
        raise ConfigError(f"{path}: no request in it ({skipped} bad lines skipped); give a trace as JSON Lines or CSV")
    name = path.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".csv")
    return Trace(name, requests, block_tokens, skipped)


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _lines(file: IO[str], path: Path, block_tokens: int) -> Iterator[tuple[int, Callable[[], Request]]]:
    """Every line's number, and what reads it."""
    if ".csv" not in path.suffixes:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, lambda line=line: _from_json(line)  # type: ignore[misc]
        return
    rows = csv.DictReader(file)
    columns = {name.strip().lower(): name for name in rows.fieldnames or ()}
    time = next((columns[name] for name in ("timestamp", "time", "arrived_at") if name in columns), None)
    length = next((columns[name] for name in ("input_length", "contexttokens", "tokens") if name in columns), None)
    if time is None or length is None:
        raise ConfigError(
            f"{path}, line 1: columns {', '.join(columns) or 'none'}; a time (timestamp) and a length (input_length, "
            "ContextTokens or tokens) are needed"
        )
    for number, row in enumerate(rows, 2):
        yield number, lambda row=row, number=number: _from_csv(row[time], row[length], number, block_tokens)  # type: ignore[misc]


def _from_json(line: str) -> Request:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(fields, dict):
        raise ValueError("not an object")
    seconds = _finite(float(fields["timestamp"])) / 1000
    tokens = _tokens(fields["input_length"], "input_length")
    if "hash_ids" in fields:
        ids = fields["hash_ids"]
        if not isinstance(ids, list) or not all(isinstance(block, int | str) for block in ids):
            raise ValueError("hash_ids must be a list of numbers or texts")
        return seconds, tokens, ids
    if "runs" not in fields:
        raise KeyError("hash_ids or runs")
    runs = [_count(value, "runs") for value in fields["runs"]]
    if len(runs) % 2:
        raise ValueError("runs must be pairs of start and length")
    _few(sum(runs[1::2]))
    pairs = zip(runs[::2], runs[1::2], strict=True)
    return seconds, tokens, list(chain.from_iterable(range(start, start + length) for start, length in pairs))


def _from_csv(time: str | None, length: str | None, number: int, block_tokens: int) -> Request:
    if time is None or length is None:
        raise ValueError("too few columns")
    tokens = _tokens(length, "the length")
    try:
        seconds = float(time)
    except ValueError:
        # Seven digits of a second are more than Python reads.
        seconds = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", time.strip())).timestamp()
    return _finite(seconds), tokens, [(number, i) for i in range(_few(tokens // block_tokens))]


def _finite(time: float) -> float:
    if not math.isfinite(time):
        raise ValueError(f"the time is {time}; it must be finite")
    return time


def _few(blocks: int) -> int:
    if blocks > MOST_BLOCKS:
        raise ValueError(f"{blocks} blocks in a request; at most {MOST_BLOCKS} are allowed")
    return blocks


def _tokens(value: Any, what: str) -> int:
    tokens = _count(value, what)
    if tokens > MOST_TOKENS:
        raise ValueError(f"{what} is {tokens} tokens; at most {MOST_TOKENS} are allowed")
    return tokens


def _count(value: Any, what: str) -> int:
    count = int(value)
    if count < 0 or (isinstance(value, float) and count != value) or isinstance(value, bool):
        raise ValueError(f"{what} is {value!r}; whole numbers of at least 0 are allowed")
    return count
