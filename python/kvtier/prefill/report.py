"""What a prefill did: tokens, bytes, seconds predicted and measured, and who was busy when."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from kvtier.prefill.storing import WriteBack
from kvtier.prefill.timeline import Event, picture, rows

__all__ = ["PrefillReport"]


@dataclass(frozen=True)
class PrefillReport:
    """What a prefill did, in tokens, bytes and seconds."""

    tokens: int
    """Tokens of the prompt."""
    tokens_matched: int
    """Tokens of the prefix that the store said it holds."""
    tokens_reused: int
    """Tokens whose KV was loaded."""
    tokens_front: int
    """Matched tokens that were computed on purpose: the front of a split, or all of them."""
    tokens_lost: int
    """Tokens that were to be loaded, but failed to or came too late, and were computed."""
    tokens_left_out: int
    """Stored tokens that were not loaded because ``retain`` asked for a fraction."""
    bytes: Mapping[str, int]
    """Bytes loaded, by the tier where they were found."""
    load_s: Mapping[str, float]
    """Seconds in which a tier was loading, by the tier where the bytes were found."""
    compute_s: float
    """Seconds in the model, without its waits."""
    stalled_s: float
    """Seconds in which the model waited for loads."""
    ttft_s: float
    """Seconds from the call to the logits."""
    decision: Literal["load", "recompute", "split"]
    """Whether stored KV was used: all of it, none, or the tail of it."""
    why: str
    """The decision in words; it ends with "(emulated)" where that is so."""
    emulated: bool
    """Whether a tier that holds a part of the prompt has a rate that was set (``emulate_gbs``): no time here is then what
    this machine takes.
    """
    predicted: Mapping[str, float]
    """Seconds expected of each term: ``load_s, front_s, new_s, ttft_s``; empty where nothing was measured yet."""
    measured: Mapping[str, float]
    """The same terms as they were; ``load_s`` is the time in which anything was loading."""
    stored: WriteBack = field(repr=False, compare=False)
    """The write-back of the new blocks, which may still be running."""
    importance: torch.Tensor | None = field(default=None, repr=False, compare=False)
    """``float32[tokens]``: attention that each token received, where that was asked for; tokens that no query looked at
    that was computed now have 0.
    """
    timeline: tuple[Event, ...] = field(default=(), repr=False)
    """Loads, computation and waits, layer by layer."""

    @property
    def stalled_share(self) -> float:
        """The share of the time to the first token in which the model waited for loads."""
        return self.stalled_s / self.ttft_s if self.ttft_s else 0.0

    @property
    def blocks_stored(self) -> int:
        """New blocks that the store took so far; ``stored.wait()`` waits for all."""
        return self.stored.blocks_stored

    @property
    def blocks_refused(self) -> int:
        """New blocks that it did not take so far, for want of room or a working device."""
        return self.stored.blocks_refused

    @property
    def store_s(self) -> float:
        """Seconds spent storing so far, behind the computation."""
        return self.stored.seconds

    def to_dict(self) -> dict[str, Any]:
        """Everything but the timeline, as plain values."""
        names = [name for name in self.__dataclass_fields__ if name not in ("stored", "timeline", "importance")]
        plain = {name: getattr(self, name) for name in names}
        more = ("stalled_share", "blocks_stored", "blocks_refused", "store_s")
        return plain | {name: getattr(self, name) for name in more}

    def chrome_trace(self) -> str:
        """The timeline as a Chrome trace (JSON), for ``chrome://tracing`` or Perfetto, times in µs: a row for the model, one
        for the write-back, and as many for loads as went on at a time.
        """
        process = "prefill (emulated)" if self.emulated else "prefill"
        events: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": process}}]
        tids: dict[str, int] = {}
        for row, event in rows((*self.timeline, *self.stored.events)):
            if row not in tids:
                tids[row] = len(tids) + 1
                events.append({"ph": "M", "pid": 1, "tid": tids[row], "name": "thread_name", "args": {"name": row}})
            events.append(
                {
                    "ph": "X",
                    "pid": 1,
                    "tid": tids[row],
                    "name": event.kind if event.layer < 0 else f"{event.kind} layer {event.layer}",
                    "ts": event.start_s * 1e6,
                    "dur": (event.end_s - event.start_s) * 1e6,
                    "args": {"tokens": list(event.tokens), "tier": event.tier, "bytes": event.bytes},
                }
            )
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})

    def save_timeline(self, path: str | Path) -> None:
        """Write the timeline to a file: a PNG (see :func:`kvtier.prefill.timeline.picture`) where its name ends with
        ``.png``, else :meth:`chrome_trace`.
        """
        if Path(path).suffix == ".png":
            Path(path).write_bytes(picture((*self.timeline, *self.stored.events), emulated=self.emulated))
        else:
            Path(path).write_text(self.chrome_trace(), encoding="utf-8")
