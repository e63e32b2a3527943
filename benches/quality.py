"""What a prefix in fewer bytes costs in quality: lossy codecs and `retain`, through the prefill engine, on real text.

    python benches/quality.py MODEL_DIRECTORY [--cached 1024] [--new 256] [--passages 1] [--dtype float32] [--only NAME ...]

Prints JSON Lines, and ends with status 1 if a codec misses its bound; three minutes on two cores in fp32, 10 s a codec. The prefix is loaded from NVMe after a restart (codecs) or from memory (`retain`), then NEW tokens of the
same text are judged: ``kl`` is the mean divergence of the next token's distribution from that over the exact KV, in nats,
``top1`` the share of positions with the same likeliest token, ``bound`` what is allowed. Codecs are judged by so many passages one after the
other, each with a prefix of its own. ``chunks_N`` is the floor: no codec, but the prefix computed in chunks of N tokens instead of
256, which in exact arithmetic changes nothing. ``first_and_last`` is what `retain` is worth:
as many tokens, the first four and the latest ones.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from kvtier import Dram, Nvme, Store, codecs
from kvtier.cli import prompt as prompts
from kvtier.cli.model import load
from kvtier.identity import Identity
from kvtier.integrations.reference import DictNamespace
from kvtier.prefill import Prefill, PrefillEngine, layout_of, logits_of
from kvtier.prefill.attended import most_attended
from kvtier.prefill.importance import SINKS

FRACTIONS = (0.75, 0.5, 0.25, 0.1)
BOUNDS = {
    "exact": (0.0, 1.0),
    "zstd": (0.0, 1.0),
    "int8": (0.01, 0.97),
    "int8_token": (0.01, 0.97),
    "fp8_e4m3": (0.01, 0.97),
    "fp8_e5m2": (0.02, 0.93),
    "int4": (0.02, 0.93),
}
"""The largest KL and the smallest share of equal top tokens, in exact arithmetic; with zstd behind it a codec gives the same bits.
`retain` has none: it is measured.
"""
CHUNKS = (512, 1024)
"""Other chunks than the engine's own 256: twice, and all of the prefix at once. Half of it gives the same bits, so it is no second run."""


def allowed(label: str, floor: dict[str, float]) -> tuple[float, float]:
    """The bound of a codec where the model itself rounds, as it does in bf16: two runs of the same prompt differ by ``floor``
    without any codec. The errors of codec and rounding are independent, so their squares add. KL goes with the square of an
    error of logits, and the share of changed top tokens with the error. What loses nothing must give the same bits.
    """
    kl, top1 = BOUNDS[label.removesuffix("+zstd")]
    if (kl, top1) == (0.0, 1.0):
        return kl, top1
    return kl + floor["kl"], 1 - math.hypot(1 - top1, 1 - floor["top1"])


def with_whole_logits(model: Any) -> Any:
    """The model, with logits in fp32 of the hidden state as it is. In bf16 they have steps of 0.125 near 16, so that the two likeliest
    tokens are often equal, and which one is the first of equals says nothing of the KV.
    """
    head = model.get_output_embeddings()
    weight = head.weight.detach().float()
    head.forward = lambda hidden: torch.nn.functional.linear(hidden.float(), weight)
    return model


def first_and_last(attended: torch.Tensor, fraction: float) -> torch.Tensor:
    """As many tokens as :func:`kvtier.prefill.attended.most_attended` keeps, without looking at attention."""
    kept = torch.zeros(attended.shape[1], dtype=torch.bool)
    kept[:SINKS] = True
    kept[-(math.ceil(fraction * kept.numel()) - SINKS) :] = True
    return kept


class Judge:
    """Tokens behind a prefix, the prefix's KV, and what the model says over that."""

    def __init__(self, model: Any, cached: list[int], new: list[int]) -> None:
        self.model, self.cached, self.new = model, cached, new
        self.prompt = [*cached, new[0]]
        self.blocks = DictNamespace(layout_of(model))
        with PrefillEngine(model, self.blocks) as engine:
            result = engine.run(self.prompt)
            engine.flush(result)
        self.exact = self._told(result)

    def over(self, result: Prefill) -> dict[str, float]:
        """Compare what it says over the cache of a prefill of the prompt."""
        told = self._told(result)
        return {
            "kl": float((self.exact.exp() * (self.exact - told)).sum(-1).mean()),
            "top1": float((self.exact.argmax(-1) == told.argmax(-1)).double().mean()),
        }

    def _told(self, result: Prefill) -> torch.Tensor:
        logits = torch.cat([result.logits, logits_of(self.model, self.new[1:], result.cache, 0)[0]])
        return torch.log_softmax(logits.double(), -1)


def of_codecs(model: Any, judges: Sequence[Judge], work: Path, kinds: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row a codec, behind ``"exact"``, which is without one, and the floor."""
    tokens, floor = sum(len(judge.cached) for judge in judges), {"kl": 0.0, "top1": 1.0}
    for label in ["exact", *kinds]:
        told = [_coded(model, judge, work / f"{label}-{i}", label) for i, judge in enumerate(judges)]
        row: dict[str, Any] = {"name": f"codec_{label}", "tokens": tokens} | _mean(told)
        kl, top1 = allowed(label, floor)
        met = row["kl"] <= kl and row["top1"] >= top1
        yield row | {"bound": {"kl": kl, "top1": top1}, "met": met}
        if label == "exact":
            others = [_mean([_in_chunks(model, judge, chunk) for judge in judges]) for chunk in CHUNKS]
            yield from (
                {"name": f"chunks_{n}", "tokens": tokens} | each for n, each in zip(CHUNKS, others, strict=True)
            )
            floor = _mean(others)


def _mean(told: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean(each[name] for each in told) for name in told[0]}


def _in_chunks(model: Any, judge: Judge, chunk: int) -> dict[str, float]:
    """What is said of a passage whose prefix is computed in other chunks."""
    with PrefillEngine(model, DictNamespace(judge.blocks.layout), chunk_tokens=chunk) as engine:
        return judge.over(engine.run(judge.prompt))


def _coded(model: Any, judge: Judge, path: Path, label: str) -> dict[str, float]:
    """What is said of a passage whose prefix comes back from NVMe through a codec, in a store that was opened anew."""
    layout, name = judge.blocks.layout, None if label == "exact" else label
    size = 3 * len(judge.cached) * layout.bytes_per_token + (256 << 20)
    with Store(Dram(size), Nvme(path, size)) as store:
        blocks = store.namespace(Identity(b"quality"), layout, codec=name)
        keys, kept = blocks.chain(judge.cached), judge.blocks.chain(judge.cached)
        blocks.put_many(keys, [judge.blocks.get(key) for key in kept], parents=[None, *keys[:-1]])
        store.flush()
    with (
        Store(Dram(size), Nvme(path, size)) as store,
        PrefillEngine(model, store.namespace(Identity(b"quality"), layout, codec=name)) as engine,
    ):
        result = engine.run(judge.prompt, front=0)
        told = judge.over(result)
    assert set(result.report.bytes) == {"nvme"}
    assert result.report.tokens_reused == len(judge.cached)
    shutil.rmtree(path)
    return told


def of_retain(model: Any, judge: Judge) -> Iterator[dict[str, Any]]:
    """A row a fraction and way to choose."""
    blocks = DictNamespace(layout_of(model))
    with PrefillEngine(model, blocks, importance=True) as engine:
        engine.flush(engine.run(judge.cached))
    with PrefillEngine(model, blocks) as engine:
        for fraction in (1.0, *FRACTIONS):
            for choose in (most_attended, first_and_last)[: 1 if fraction == 1 else 2]:
                with mock.patch("kvtier.prefill.request.most_attended", choose):
                    result = engine.run(judge.prompt, front=0, retain=fraction)
                read = sum(result.report.bytes.values())
                row = {"name": f"{choose.__name__}_{fraction:g}", "tokens": result.report.tokens_reused, "bytes": read}
                yield row | judge.over(result)


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--cached", type=int, default=1024)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--passages", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--only", nargs="+", choices=["retain", "exact", *codecs.NAMES], help="default: everything")
    asked = parser.parse_args()
    names = asked.only or ["retain", "exact", *codecs.NAMES]
    model, tokenizer = load(asked.model, asked.dtype)
    with_whole_logits(model)
    each = asked.cached + asked.new
    ids = prompts.build(tokenizer, prompts.python_topics(), "", each * asked.passages)
    judges = [
        Judge(model, ids[at : at + asked.cached], ids[at + asked.cached : at + each])
        for at in range(0, each * asked.passages, each)
    ]
    for row in of_retain(model, judges[0]) if "retain" in names else ():
        print(json.dumps(row), flush=True)
    kinds = [name for name in codecs.NAMES if name in names]
    missed = False
    with tempfile.TemporaryDirectory(prefix="quality-") as work:
        for row in of_codecs(model, judges, Path(work), kinds) if names != ["retain"] else ():
            print(json.dumps(row), flush=True)
            missed |= not row.get("met", True)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
