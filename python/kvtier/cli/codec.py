"""``kvtier codec``: what each codec would save, lose and cost on a model and a text of one's own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from rich.table import Table

from kvtier import _kvtier, codecs
from kvtier.cli import model as models
from kvtier.cli import prompt as prompts
from kvtier.cli.demo import needs_torch, warm_up
from kvtier.cli.options import cache_option
from kvtier.cli.output import console, emit, json_option, seconds
from kvtier.config import Dram, Nvme
from kvtier.errors import ConfigError, KvtierError
from kvtier.layout import KVLayout
from kvtier.scratch import home, scratch
from kvtier.store import Store

if TYPE_CHECKING:
    import torch

__all__ = ["codec"]

_BLOCK = 16


@dataclass(frozen=True)
class Report:
    """What one codec does to one text's keys and values."""

    codec: str
    bytes_saved: float
    """The share of the bytes, headers and scales counted."""
    rel_l2_k: float
    rel_l2_v: float
    kl: float
    """Kullback-Leibler divergence of the next token's distribution from the exact one, in nats, mean over positions."""
    top1: float
    """The share of positions whose likeliest next token is the same."""
    encode_gbs: float
    """GB/s (1e9 bytes) of the blocks as they are, on one thread."""
    decode_gbs: float
    kappa_crit_gain: float
    """The factor on the critical ratio: bytes a token before, over those after."""
    load_s: float
    """Seconds from the NVMe tier to the caller's memory, all blocks, in a store that was just opened."""
    ttft_s: float
    """That, and the seconds of computing what follows the loaded prefix."""


@click.group()
def codec() -> None:
    """Fewer bytes for keys and values, and what that costs."""


@codec.command()
@click.option(
    "--model", "directory", type=click.Path(path_type=Path, exists=True, file_okay=False), help="A Hugging Face model."
)
@click.option("--text", "text_file", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="A text.")
@click.option("--tokens", type=click.IntRange(32), default=2048, show_default=True, help="Tokens that are loaded.")
@click.option(
    "--after", type=click.IntRange(1), default=128, show_default=True, help="Tokens that are judged after them."
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="What keys and values are stored in; the model computes in float32.",
)
@cache_option
@json_option
def report(
    directory: Path | None, text_file: Path | None, tokens: int, after: int, dtype: str, cache: Path, as_json: bool
) -> None:
    """Load a text's keys and values through each codec, and compare what the model makes of them."""
    say: Callable[[str], None] = (lambda line: click.echo(line, err=True)) if as_json else console.print
    needs_torch()
    home(cache)
    directory = directory or models.fetch(cache, say)
    text = prompts.read_text(text_file) if text_file else prompts.python_topics()
    model, tokenizer = models.load(directory)
    ids = [int(i) for i in tokenizer.encode(text[: 16 * (tokens + after)], add_special_tokens=False)][: tokens + after]
    loaded = (len(ids) - 1) // _BLOCK * _BLOCK if len(ids) < tokens + after else tokens // _BLOCK * _BLOCK
    if loaded < _BLOCK:
        raise ConfigError(f"the text has {len(ids)} tokens; at least {_BLOCK + 1} are needed: give a longer one")
    say(f"{directory.name}, keys and values in {dtype}: {loaded} tokens loaded, {len(ids) - loaded} judged")
    rows = []
    with scratch(cache, "codec-") as work:
        for row in _Trial(model, ids, loaded, dtype, work).rows():
            if as_json:
                emit(asdict(row))
            rows.append(row)
    if not as_json:
        console.print(_table(rows))


class _Trial:
    """One text's keys and values, and what the model says after them."""

    def __init__(self, model: Any, ids: Sequence[int], loaded: int, dtype: str, work: Path) -> None:
        from transformers import DynamicCache

        from kvtier.integrations.tensors import BlockBuffer, torch_dtype
        from kvtier.prefill.model import forward

        self.model, self.ids, self.loaded, self.work = model, ids, loaded, work
        self.layout = KVLayout.from_config(model.config, dtype=dtype, block_tokens=_BLOCK)
        if self.layout.kind != "gqa" or not self.layout.uniform:
            raise ConfigError("the report takes models with keys and values of one shape in all layers")
        warm_up(model)
        filled = DynamicCache(config=model.config)
        forward(model, ids[:loaded], filled)
        self.blocks = loaded // _BLOCK
        self.buffer = BlockBuffer(self.layout, self.blocks)
        kept = torch_dtype(self.layout)
        self.buffer.read_from([(kv.keys.to(kept), kv.values.to(kept)) for kv in filled.layers], 0, self.blocks)
        self.exact, self.compute_s = self._after(self.buffer)

    def _after(self, buffer: Any) -> tuple[torch.Tensor, float]:
        """Log-probabilities of the next token at each position behind the loaded ones, and the seconds that took."""
        import torch
        from transformers import DynamicCache

        from kvtier.prefill.cache import Room
        from kvtier.prefill.model import logits_of

        pairs = Room(self.layout, self.loaded, torch.device("cpu")).pairs
        begun = time.perf_counter()
        buffer.write_to(pairs, 0, self.blocks)
        cache = DynamicCache(config=self.model.config)
        for layer, (keys, values) in enumerate(pairs):
            cache.update(keys.to(self.model.dtype), values.to(self.model.dtype), layer)
        logits = logits_of(self.model, self.ids[self.loaded :], cache, 0)[0]
        taken = time.perf_counter() - begun
        return torch.log_softmax(logits.double(), -1), taken

    def rows(self) -> Iterator[Report]:
        """As they are measured; the first is without a codec."""
        for name in (None, *codecs.NAMES):
            yield self._row(name)

    def _row(self, name: str | None) -> Report:
        from kvtier.integrations.tensors import BlockBuffer

        raw = np.stack(self.buffer.rows(self.blocks))
        loaded = BlockBuffer(self.layout, self.blocks)
        saved, encode_gbs, decode_gbs = (0.0, 0.0, 0.0) if name is None else self._speed(name, raw)
        load_s = self._through_nvme(name, loaded)
        back = np.stack(loaded.rows(self.blocks))
        if name not in codecs.LOSSY and not np.array_equal(raw, back):
            raise KvtierError(f"{name} gave other bytes than were put")
        got, compute_s = self._after(loaded)
        chance = self.exact.exp()
        errors = [self._error(raw, back, plane) for plane in (0, 1)]
        return Report(
            name or "none",
            saved,
            errors[0],
            errors[1],
            float((chance * (self.exact - got)).sum(-1).mean()),
            float((self.exact.argmax(-1) == got.argmax(-1)).double().mean()),
            encode_gbs,
            decode_gbs,
            1 / (1 - saved),
            load_s,
            load_s + compute_s,
        )

    def _values(self, raw: Any) -> torch.Tensor:
        import torch

        from kvtier.integrations.tensors import torch_dtype

        return torch.from_numpy(raw).view(torch_dtype(self.layout)).reshape(self.blocks, *self.layout.shape()).double()

    def _error(self, raw: Any, back: Any, plane: int) -> float:
        exact, given = self._values(raw)[:, :, plane], self._values(back)[:, :, plane]
        return float((exact - given).norm() / exact.norm())

    def _speed(self, name: str, raw: Any) -> tuple[float, float, float]:
        """The share of bytes saved, and GB/s of coding and decoding: the median of some laps over all blocks."""
        flat, out = raw.reshape(-1), np.empty(raw.size, np.uint8)
        dims, element = codecs.segment_dims(self.layout, _BLOCK)[0], codecs.element(self.layout.dtype)
        frames, encode, decode = b"", [], []
        for _ in range(5):
            begun = time.perf_counter()
            frames = _kvtier.codec_encode(name, element, dims, flat, 1)
            middle = time.perf_counter()
            codecs.decode(frames, out=out)
            decode.append(time.perf_counter() - middle)
            encode.append(middle - begun)
        rates = [raw.nbytes / statistics.median(laps) / 1e9 for laps in (encode, decode)]
        return 1 - len(frames) / raw.nbytes, rates[0], rates[1]

    def _through_nvme(self, name: str | None, loaded: Any) -> float:
        """Put the blocks, open the store again, and read them: the seconds of the last."""
        path = self.work / (name or "none")
        names = [i.to_bytes(32, "little") for i in range(1, self.blocks + 1)]
        total = self.blocks * self.layout.block_bytes

        def store() -> Store:
            return Store(Dram(2 * total + (64 << 20)), Nvme(path, 2 * total + (64 << 20)))

        with store() as first:
            cache = first.namespace(b"codec report", self.layout, codec=name)
            cache.put_many(names, self.buffer.rows(self.blocks))
            first.flush()
        with store() as second:
            second.prefaulted(timeout=60)
            cache = second.namespace(b"codec report", self.layout, codec=name)
            begun = time.perf_counter()
            results = cache.get_into(names, loaded.rows(self.blocks))
            taken = time.perf_counter() - begun
        if not all(result.hit and result.tier == "nvme" for result in results):
            raise KvtierError(f"not every block came back from NVMe through {name}")
        return taken


def _table(rows: Sequence[Report]) -> Table:
    table = Table(box=None)
    table.add_column("")
    for head in ("saved", "error of K", "of V", "KL", "top 1", "encode", "decode", "κ_crit", "load", "TTFT"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        none = row.codec == "none"
        table.add_row(
            row.codec,
            f"{row.bytes_saved:.1%}",
            f"{row.rel_l2_k:.2%}",
            f"{row.rel_l2_v:.2%}",
            f"{row.kl:.1e}",
            f"{row.top1:.1%}",
            "" if none else f"{row.encode_gbs:.2f} GB/s",
            "" if none else f"{row.decode_gbs:.2f} GB/s",
            f"x{row.kappa_crit_gain:.2f}",
            seconds(row.load_s),
            seconds(row.ttft_s),
        )
    return table
