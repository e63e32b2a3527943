"""Who was busy when, within one request."""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

__all__ = ["Event", "busy", "picture", "rows"]

Kind = Literal["load", "compute", "stall", "store"]


class Event(NamedTuple):
    """Something that took time."""

    kind: Kind
    """``"load"``, ``"compute"``, ``"stall"`` (the model waited for a load) or ``"store"``."""
    layer: int
    """The layer, or the first of several; -1 for what no layer has to itself."""
    tokens: tuple[int, int]
    """Of which tokens."""
    start_s: float
    """Seconds since the request began."""
    end_s: float
    tier: str | None = None
    """Of a load: where the bytes were found."""
    bytes: int = 0
    """Of a load or store."""


def busy(events: Iterable[Event]) -> float:
    """Seconds in which at least one of the events was going on."""
    total, until = 0.0, 0.0
    for event in sorted(events, key=lambda e: e.start_s):
        if event.end_s > until:
            total += event.end_s - max(event.start_s, until)
            until = event.end_s
    return total


_ROWS = {"compute": "model", "stall": "model", "load": "loads", "store": "write-back"}


def rows(events: Iterable[Event]) -> list[tuple[str, Event]]:
    """The events by their start, each with the name of a row in which it overlaps no other: viewers drop those that do."""
    ends: dict[str, float] = {}
    placed = []
    for event in sorted(events, key=lambda e: e.start_s):
        kind = _ROWS[event.kind]
        names = itertools.chain([kind], (f"{kind} {number}" for number in itertools.count(2)))
        row = next(name for name in names if ends.get(name, 0.0) <= event.start_s)
        ends[row] = event.end_s
        placed.append((row, event))
    return placed


_COLOURS = {"load": (11, 111, 184), "compute": (21, 128, 61), "stall": (194, 65, 12), "store": (126, 34, 206)}


def picture(events: Sequence[Event], width: int = 1200, *, emulated: bool = False) -> bytes:
    """The timeline as a PNG: time from left to right, a row for each layer from top to bottom.

    The upper half of a row is the layer's load (blue), the lower one its computation (green); red is a wait for a load. The
    last row is what no layer has to itself: waits for all layers (red), write-back (violet).

    Args:
        events: what to draw.
        width: pixels of the longest time.
        emulated: whether a rate was set; the file's comment then says so.
    """
    layers = 1 + max((event.layer for event in events), default=0)
    end = max((event.end_s for event in events), default=1.0) or 1.0
    half = max(2, 240 // (layers + 1))
    pixels = np.full(((layers + 1) * 2 * half, width, 3), 255, np.uint8)
    pixels[:: 2 * half] = 226
    for event in sorted(events, key=lambda e: e.kind == "stall"):  # waits lie over what they are part of
        top = (event.layer if event.layer >= 0 else layers) * 2 * half + 1
        first = top if event.kind in ("load", "store") else top + half - 1
        begins, ends = int(event.start_s / end * (width - 1)), int(event.end_s / end * (width - 1)) + 1
        pixels[first : first + half - 1, begins:ends] = _COLOURS[event.kind]
    rows = np.zeros((pixels.shape[0], 1 + 3 * width), np.uint8)  # each begins with its filter: none
    rows[:, 1:] = pixels.reshape(pixels.shape[0], -1)
    header = struct.pack(">IIBBBBB", width, pixels.shape[0], 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b"")]
    if emulated:
        chunks.insert(1, (b"tEXt", b"Comment\0emulated"))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
