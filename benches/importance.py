"""What sampling the attention costs, and how well its ranks agree with those of all queries, on real text.

    python benches/importance.py MODEL_DIRECTORY [TOKENS]

Prints JSON Lines: ``cost`` is the median over interleaved pairs of (compute with) / (compute without) - 1, ``rank`` the rank
correlation of sampled scores with those of every query.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from kvtier.bench.prefill import interval
from kvtier.cli import prompt as prompts
from kvtier.cli.model import load
from kvtier.integrations.reference import DictNamespace
from kvtier.prefill import PrefillEngine, layout_of
from kvtier.prefill.importance import QUERIES, AttentionMass

PAIRS = 15


def main(directory: Path, tokens: int) -> None:
    """Measure, and print."""
    model, tokenizer = load(directory)
    prompt = prompts.build(tokenizer, prompts.python_topics(), "What is this text about?", tokens)[:tokens]

    blocks = DictNamespace(layout_of(model))

    def run(importance: bool, queries: int | None = QUERIES) -> tuple[float, torch.Tensor | None]:
        with (
            mock.patch("kvtier.prefill.request.AttentionMass", lambda count, **_: AttentionMass(count, queries)),
            PrefillEngine(model, blocks, importance=importance) as engine,
        ):
            report = engine.run(prompt, front=tokens).report  # all is computed, and after the first run nothing stored
        return report.compute_s, report.importance

    run(True)
    costs = []
    for i in range(PAIRS):
        seconds = {importance: run(importance)[0] for importance in (i % 2 == 0, i % 2 != 0)}
        costs.append(seconds[True] / seconds[False] - 1)
    print(
        json.dumps({"name": "cost", "value": statistics.median(costs), "interval": interval(costs), "tokens": tokens})
    )
    sampled, every = run(True)[1], run(True, None)[1]
    assert sampled is not None
    assert every is not None
    for skip in (0, 256):  # few queries see the last tokens
        ranks = [torch.argsort(torch.argsort(values[: tokens - skip])).numpy() for values in (sampled, every)]
        print(json.dumps({"name": "rank", "value": float(np.corrcoef(*ranks)[0, 1]), "without_last": skip}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 768)
