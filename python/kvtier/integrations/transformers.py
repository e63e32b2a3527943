"""One prefill of a Hugging Face model, through the store.

A warm run does the very same arithmetic as a cold one: prompts are cut on a fixed grid of ``chunk_tokens``, and a
reused prefix ends on that grid, so the logits of a hit are bit-identical to those of a run that computed everything
on the same grid. :class:`kvtier.prefill.PrefillEngine` is what runs it; a server keeps one of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvtier.prefill import Prefill, PrefillEngine, PrefillReport, forward, layout_of, logits_of, namespace

__all__ = ["Prefill", "PrefillReport", "forward", "layout_of", "logits_of", "namespace", "prefill"]


def prefill(
    model: Any,
    store: Any,
    input_ids: Sequence[int] | torch.Tensor,
    *,
    chunk_tokens: int = 256,
    timeout: float | None = 30.0,
    reserve_tokens: int = 256,
) -> Prefill:
    """Run a prompt through a model, with the KV that the store has of its prefix, and store the KV that it did not
    have.

    Args:
        model: as in :class:`kvtier.prefill.PrefillEngine`.
        store: as there.
        input_ids: the prompt's tokens: ints, or an integer tensor ``[T]`` or ``[1, T]``. T is at least 1.
        chunk_tokens: the grid, as there. Default 256.
        timeout: seconds for loads and for stores, as there. Default 30.
        reserve_tokens: as there. Default 256.

    Returns:
        Logits, cache and report. Blocks until the logits are there and the new blocks are stored. Everything stored
        is loaded: one call has measured nothing to decide by.

    Raises:
        As :class:`kvtier.prefill.PrefillEngine` and its ``run``.
    """
    with PrefillEngine(
        model, store, chunk_tokens=chunk_tokens, timeout=timeout, reserve_tokens=reserve_tokens
    ) as engine:
        result = engine.run(input_ids)
    result.report.stored.wait()
    return result
