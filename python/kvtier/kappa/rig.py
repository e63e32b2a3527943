"""A model on this machine and its KV in a store's tiers: loads and computations under a clock. Needs torch and transformers."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from kvtier.config import MIN_TIER, Cxl, Dram, Nvme
from kvtier.errors import ConfigError, KvtierError
from kvtier.identity import Identity
from kvtier.integrations.tensors import BlockBuffer
from kvtier.namespace import Namespace
from kvtier.prefill import forward, layout_of
from kvtier.prefill.cache import Room
from kvtier.store import Store

__all__ = ["Rig", "RigTier"]

RigTier = Literal["dram", "cxl", "nvme"]
_SLACK = 32 << 20  # the index, and what the store keeps free


class Rig:
    """A prompt whose KV is computed once, and then loaded and computed again in parts.

    Args:
        model: a loaded Hugging Face causal language model, on a CPU or a CUDA GPU.
        directory: on the drive of the NVMe tier; about ``tokens`` tokens of KV are written there.
        tokens: K at most; a multiple of ``chunk``.
        chunk: tokens of one pass, as in :func:`kvtier.integrations.transformers.prefill`. Default 256.
        room: new tokens at most. Default ``chunk``.
        cxl_node: the NUMA node of the CXL tier, where one is measured. Default none.

    Raises:
        ConfigError: for tokens that are no multiple of the chunk, or more than the model allows.

    Blocks while it computes the prompt's KV and writes it.
    """

    def __init__(
        self,
        model: Any,
        directory: Path,
        tokens: int,
        *,
        chunk: int = 256,
        room: int | None = None,
        cxl_node: int | None = None,
    ) -> None:
        room = chunk if room is None else room
        limit = getattr(model.config, "max_position_embeddings", None)
        if tokens % chunk or tokens < chunk or (limit and tokens + room > limit):
            raise ConfigError(
                f"{tokens} tokens are not allowed; it must be a multiple of the chunk of {chunk}, and with {room} new ones no "
                f"more than the model's {limit}"
            )
        self.model, self.tokens, self.chunk = model, tokens, chunk
        self.layout = layout_of(model)
        count = tokens // self.layout.block_tokens
        numbers = random.Random(1)
        self.prompt = [numbers.randrange(model.config.vocab_size) for _ in range(tokens + room)]
        self.kv = Room(self.layout, tokens + room, model.device)
        self.layers = self.kv.layers
        self.seconds(lambda: self._compute(0, tokens))
        self.source, self.buffer = BlockBuffer(self.layout, count), BlockBuffer(self.layout, count)
        for buffer in (self.source, self.buffer):
            buffer.read_from(self.kv.pairs, 0, count)
        self.identity = Identity(b"calibration")
        self.directory = directory
        self.cxl_node = cxl_node
        with self._store(Dram(self.room), Nvme(directory, self.room)) as blocks:
            self.keys = blocks.chain(self.prompt[:tokens])
            self.put(blocks)

    @property
    def room(self) -> int:
        """Bytes of a tier that holds all blocks."""
        return self.layout.bytes_per_token * self.tokens * 5 // 4 + _SLACK

    def seconds(self, work: Callable[[], object]) -> float:
        """What ``work`` takes until the device has done it: by CUDA events where there is a GPU."""
        if self.model.device.type != "cuda":
            begun = time.perf_counter()
            work()
            return time.perf_counter() - begun
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.model.device)
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    @contextmanager
    def _store(self, *tiers: Dram | Nvme) -> Iterator[Namespace]:
        with Store(*tiers) as store:
            store.prefaulted(timeout=60)
            yield store.namespace(self.identity, self.layout)

    def put(self, blocks: Namespace) -> None:
        """Put all blocks; they must not be there yet."""
        done = blocks.put_many(self.keys, self.source.rows(len(self.keys)), parents=[None, *self.keys[:-1]])
        if not all(result.stored for result in done):
            raise KvtierError("a block was not stored: the tier is too small, or holds it already")

    def write(self, tier: RigTier, directory: Path) -> float:
        """Seconds to put all blocks into an empty store: in memory, until all have left DRAM for the CXL tier, or until they
        are durable in ``directory``.
        """
        if tier == "cxl":
            with self._over_cxl(None) as (store, blocks):
                return self.seconds(lambda: self._fill_cxl(store, blocks))
        disk = () if tier == "dram" else (Nvme(directory, self.room),)
        with Store(Dram(self.room), *disk) as store:
            store.prefaulted(timeout=60)
            blocks = store.namespace(self.identity, self.layout)

            def run() -> None:
                self.put(blocks)
                store.flush(timeout=120)

            return self.seconds(run)

    @contextmanager
    def holding(self, tier: RigTier, gbs: float | None = None) -> Iterator[Namespace]:
        """A store that has all blocks in one tier only, limited to ``gbs`` GB/s where that is given.

        A block of the NVMe tier is in memory too once it was loaded: open another for the next load.
        """
        if tier == "dram":
            with self._store(Dram(self.room, emulate_gbs=gbs)) as blocks:
                self.put(blocks)
                yield blocks
        elif tier == "cxl":
            with self._over_cxl(gbs) as (store, blocks):
                self._fill_cxl(store, blocks)
                yield blocks
        else:
            with self._store(Dram(self.room), Nvme(self.directory, self.room, emulate_gbs=gbs)) as blocks:
                yield blocks

    @property
    def _front(self) -> int:
        """Bytes of a DRAM tier that is only passed through."""
        return max(MIN_TIER, 2 * self.layout.block_bytes)

    @contextmanager
    def _over_cxl(self, gbs: float | None) -> Iterator[tuple[Store, Namespace]]:
        below = Cxl(self.room + 4 * self._front, numa_node=self.cxl_node, emulate_gbs=gbs)
        with Store(Dram(self._front), below, policy="lru-leaf") as store:  # what comes pushes down what is there
            store.prefaulted(timeout=60)
            yield store, store.namespace(self.identity, self.layout)

    def _fill_cxl(self, store: Store, blocks: Namespace) -> None:
        """Put all blocks, and a few others until none of the rig's is in DRAM any more."""
        self.put(blocks)
        for number in range(16):
            if set(blocks.match(self.keys).tiers) == {"cxl"}:
                return
            store.put(number.to_bytes(16, "big"), bytes(self._front // 4), timeout=60)
        raise KvtierError("the blocks did not leave DRAM for the CXL tier")

    def compute(self, cached: int, new: int) -> float:
        """Seconds to compute ``new`` tokens behind ``cached``, in passes of a chunk from there on."""
        return self.seconds(lambda: self._compute(cached, new))

    def _compute(self, cached: int, new: int) -> None:
        self.kv.fill(cached)
        for start in range(cached, cached + new, self.chunk):
            forward(self.model, self.prompt[start : min(start + self.chunk, cached + new)], self.kv.cache)

    def fetch(self, blocks: Namespace, keys: Sequence[bytes], tier: RigTier) -> float:
        """Seconds to get blocks into the buffer on the host, checked to come from ``tier``."""
        return self.seconds(lambda: self._fetch(blocks, keys, tier))

    def _fetch(self, blocks: Namespace, keys: Sequence[bytes], tier: RigTier) -> None:
        for result in blocks.get_into(keys, self.buffer.rows(len(keys)), timeout=60):
            if result.tier != tier:
                raise KvtierError(f"a block came from {result.tier or result.reason}, not from {tier}")

    def hit(self, blocks: Namespace) -> float:
        """Seconds of the smallest hit: look one block up, and get the first token of its first layer."""
        out = [self.buffer.rows(1)[0][: self.layout.offsets[1] // self.layout.block_tokens]]

        def run() -> None:
            keys = blocks.chain(self.prompt[: self.layout.block_tokens])
            blocks.match(keys)
            (result,) = blocks.get_into(keys, out, layers=range(1), tokens=range(1))
            if not result.hit:
                raise KvtierError(f"a block is not there: {result.reason}")

        return self.seconds(run)

    def copy(self, count: int) -> float:
        """Seconds to copy the buffer's first ``count`` blocks into the model's tensors."""
        return self.seconds(lambda: self.buffer.write_to(self.kv.pairs, 0, count))

    def serial(self, blocks: Namespace, cached: int, new: int, tier: RigTier) -> float:
        """Seconds to the first token: look up, load ``cached`` tokens into the model's tensors, then compute ``new``."""

        def run() -> None:
            keys = blocks.chain(self.prompt[:cached])
            if blocks.match(keys).tokens != cached:
                raise KvtierError(f"the store does not hold the first {cached} tokens")
            self._fetch(blocks, keys, tier)
            self.buffer.write_to(self.kv.pairs, 0, len(keys))
            self._compute(cached, new)

        return self.seconds(run)

    def peak(self) -> float:
        """FLOP/s of large square matrix products in the model's dtype, the best of five."""
        size = 8192 if self.model.device.type == "cuda" else 1536
        one, other = (torch.ones((size, size), dtype=self.model.dtype, device=self.model.device) for _ in range(2))
        out = one @ other
        return 2 * size**3 / min(self.seconds(lambda: torch.mm(one, other, out=out)) for _ in range(5))
