"""A namespace: blocks of one meaning, and the verbs on them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier import _kvtier, aio, canonical, keys
from kvtier.errors import InvalidBlockError, UnsupportedError
from kvtier.job import Job
from kvtier.keys import Extras, Tokens
from kvtier.layout import KVLayout, Picks, Span, span_of, tokens_of
from kvtier.lease import Lease
from kvtier.results import Match, PutResult, Result, put_result, put_results, results
from kvtier.tiers.backend import DeviceBackend
from kvtier.tiers.hbm import HbmTier, countdown

__all__ = ["Namespace"]

_GOALS = ("hbm", "dram", "cxl")


class Namespace:
    """Blocks of one meaning: one model, one layout, one tenant. :meth:`Store.namespace` makes it.

    A *key* is 16 to 64 bytes; equal keys must mean equal bytes, so a second ``put`` of a key changes nothing.
    :meth:`chain` makes keys from tokens. A *buffer* is anything with the buffer protocol, a NumPy array, a torch CPU
    tensor of any dtype or an object with ``__dlpack__``; it is C-contiguous, of the layout's dtype (or plain bytes), and
    has exactly the bytes of a block, or of the part of it that is asked for.

    Every verb that may wait takes ``timeout`` in seconds: ``None`` (default) is 30 s, 0 does not wait. A miss is a value,
    never an error. All verbs may be called from any thread, and let go of the interpreter while they move bytes or
    wait. They raise ``ClosedError`` once the store is closed, and in a fork of the process that opened it, and
    ``InvalidBlockError`` for keys and buffers that do not fit; then nothing was changed.

    Attributes:
        layout: how its blocks are arranged.
        digest: the namespace's 32-byte BLAKE3 digest.
    """

    def __init__(self, core: _kvtier.Core, identity: bytes, layout: KVLayout, hbm: HbmTier | None = None) -> None:
        self._core = core
        self._hbm = hbm
        self._space = keys.space_of(identity, layout)
        self.layout = layout
        self.digest: bytes = self._space.digest

    def __repr__(self) -> str:
        return f"Namespace(digest={self.digest.hex()[:12]}…, layout={self.layout})"

    @property
    def emulated(self) -> frozenset[str]:
        """The tiers whose rate is limited for a what-if (``emulate_gbs``): whoever reports a time that one of them took says
        so.
        """
        return frozenset(kind for kind, tier in self._core.report()["tiers"].items() if tier["emulated"])

    @property
    def device(self) -> DeviceBackend | None:
        """The device of the :class:`Hbm` tier, ``None`` without one."""
        return None if self._hbm is None else self._hbm.backend

    def chain(self, token_ids: Tokens, extras: Extras | None = None, *, partial: bool = False) -> list[bytes]:
        """The keys of a prompt's blocks.

        Args:
            token_ids: the prompt, whole numbers from 0 to 2**32 - 1.
            extras: what else a block's meaning depends on, by block number or one a block: digests of images, say.
            partial: also a key for the tokens at the end that fill no block. Default no.

        Returns:
            One 32-byte key for each block of ``layout.block_tokens`` tokens. Equal keys mean equal prefixes. Does not
            block.
        """
        return keys.chain_in(self._space, token_ids, self.layout.block_tokens, extras, partial)

    def beside(self, name: str) -> Namespace:
        """A namespace of opaque blocks for what belongs to the blocks of this one: side values, say, under the same keys.

        Args:
            name: tells several of them apart.

        Returns:
            The namespace; making it twice gives the same blocks. What is in it counts to this one, to its quota and time to
            live, but for hits and misses. Else it has a life of its own: removing a block here removes nothing there. Does
            not block.
        """
        beside = Namespace(self._core, canonical.encode({"beside": name, "of": self.digest}), KVLayout.opaque())
        self._core.count_to(beside._space, self._space)
        return beside

    # Storing

    def put(
        self,
        key: bytes,
        data: Any,
        *,
        parent: bytes | None = None,
        replaces: bytes | None = None,
        importance: float | None = None,
        timeout: float | None = None,
        stream: Any = None,
    ) -> PutResult:
        """Store a block.

        Args:
            key: its key.
            data: its bytes: a full block, or one of fewer whole tokens. With an :class:`Hbm` tier, also an array on its
                device, which is copied to memory first.
            parent: the key of the block before it. It must be in the store: a block never outlives its parent. ``None``
                for the first of a chain.
            replaces: the key of a block that this one makes superfluous, such as the partial one that it completes. It is
                removed once this one is there.
            importance: the caller's score, from 0; default 0.
            timeout: how long to wait for room.
            stream: of an array on a device, as in :meth:`get_into`.

        Returns:
            What became of it. When this returns ``stored``, readers find the block.

        Raises:
            FullError: no room, with ``timeout=0``.
            DeadlineError: no room before the deadline.
        """
        if self._hbm is not None and (arrays := self._hbm.arrays([data], self.layout)) is not None:
            (data,) = self._hbm.fetched(arrays, timeout, self._hbm.stream_of([data], stream))
        code = self._core.put(self._space, key, data, parent, replaces, importance or 0.0, timeout)
        return put_result(code)

    def put_many(
        self,
        keys: Sequence[bytes],
        blocks: Iterable[Any],
        *,
        parents: Sequence[bytes | None] | None = None,
        importance: Sequence[float] | None = None,
        timeout: float | None = None,
        stream: Any = None,
    ) -> list[PutResult]:
        """Store blocks, in order: a parent before its children.

        Args:
            keys: their keys.
            blocks: their bytes, one buffer a key, all of them on the host or all on a device; see :meth:`put`.
            parents: the key of the block before each one, or ``None``; of a whole chain ``[None, *keys[:-1]]``. Default: each
                is the first of a chain of its own. Give them for blocks that follow one another: else one may leave the
                store before those that are of no use without it.
            importance: one score a key; default 0.
            timeout: how long to wait for room, all together.
            stream: of arrays on a device, as in :meth:`get_into`.

        Returns:
            What became of each; a lack of room is a block's own result, with the reason ``"full"`` or ``"deadline"``.
        """
        if self._hbm is not None:
            blocks = list(blocks)
            if (arrays := self._hbm.arrays(blocks, self.layout)) is not None:
                stream = self._hbm.stream_of(blocks, stream)
                return self._put_from_device(keys, arrays, parents, importance, timeout, stream)
        codes = self._core.put_many(self._space, keys, blocks, parents or (), None, importance or (), timeout)
        return put_results(codes)

    def _put_from_device(
        self,
        keys: Sequence[bytes],
        arrays: Sequence[Any],
        parents: Sequence[bytes | None] | None,
        importance: Sequence[float] | None,
        timeout: float | None,
        stream: Any,
    ) -> list[PutResult]:
        """As :meth:`put_many`, a few blocks at a time: what they take on their way is bounded."""
        assert self._hbm is not None
        parents, importance = parents or [None] * len(keys), importance or [0.0] * len(keys)
        if not len(keys) == len(arrays) == len(parents) == len(importance):
            raise InvalidBlockError(
                f"{len(arrays)} blocks, {len(parents)} parents and {len(importance)} importance scores were given for "
                f"{len(keys)} keys; one a key is needed"
            )
        for array in arrays:
            self._space.pieces(array.nbytes, None, None)  # refuses what is no block, before any is stored
        left = countdown(timeout)
        put: list[PutResult] = []
        for some in self._hbm.spans(arrays):
            blocks = self._hbm.fetched(arrays[some], left(), stream)
            put += self.put_many(keys[some], blocks, parents=parents[some], importance=importance[some], timeout=left())
        return put

    async def aput(
        self,
        key: bytes,
        data: Any,
        *,
        parent: bytes | None = None,
        replaces: bytes | None = None,
        importance: float | None = None,
        timeout: float | None = None,
        stream: Any = None,
    ) -> PutResult:
        """As :meth:`put`, without blocking the event loop. ``data`` is the store's until the block is stored, also if
        the await is cancelled.
        """
        if (hbm := self._hbm) is not None and hbm.holds([data], self.layout):
            return await asyncio.to_thread(
                self.put,
                key,
                data,
                parent=parent,
                replaces=replaces,
                importance=importance,
                timeout=timeout,
                stream=hbm.stream_of([data], stream),
            )
        parents, scores = [parent], [importance or 0.0]
        codes = await aio.operation(
            lambda to, token: self._core.start_put_many(
                self._space, [key], [data], parents, replaces, scores, timeout, to, token
            )
        )
        return put_result(codes[0])

    async def aput_many(
        self,
        keys: Sequence[bytes],
        blocks: Iterable[Any],
        *,
        parents: Sequence[bytes | None] | None = None,
        importance: Sequence[float] | None = None,
        timeout: float | None = None,
        stream: Any = None,
    ) -> list[PutResult]:
        """As :meth:`put_many`, without blocking the event loop. The buffers are the store's until it has finished with
        them, also if the await is cancelled.
        """
        if (hbm := self._hbm) is not None:
            blocks = list(blocks)
            if hbm.holds(blocks, self.layout):
                return await asyncio.to_thread(
                    self.put_many,
                    keys,
                    blocks,
                    parents=parents,
                    importance=importance,
                    timeout=timeout,
                    stream=hbm.stream_of(blocks, stream),
                )
        codes = await aio.operation(
            lambda to, token: self._core.start_put_many(
                self._space, keys, blocks, parents or (), None, importance or (), timeout, to, token
            )
        )
        return put_results(codes)

    # Looking

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key is resident in any tier. Does not block; counts as no use."""
        return self._core.contains(self._space, keys)

    def match(self, keys: Sequence[bytes]) -> Match:
        """How long a prefix of ``keys`` is resident, and where. Does not block; counts as no use."""
        blocks, tokens, tiers, sizes = self._core.matching(self._space, keys)
        return Match(blocks, tokens, tiers, dict(sizes))

    # Reading

    def get(
        self, key: bytes, *, layers: Span = None, tokens: Span = None, timeout: float | None = None
    ) -> NDArray[np.uint8] | None:
        """A verified copy of a block, or of a part of it.

        Args:
            key: its key.
            layers: which layers; default all.
            tokens: which tokens of the block; default all.
            timeout: how long to wait for a load.

        Returns:
            ``uint8[bytes]``, in the layout's order; ``None`` for a miss.
        """
        part = span_of("layers", layers), span_of("tokens", tokens)
        (size,) = self._core.sizes(self._space, [key], *part)
        if size is None:
            return None
        out = np.empty(size, np.uint8)
        (result,) = results(self._core.get_into(self._space, [key], [out], *part, timeout))
        return out if result.hit else None

    def get_into(
        self,
        keys: Sequence[bytes],
        outs: Iterable[Any],
        *,
        layers: Span = None,
        tokens: Picks = None,
        timeout: float | None = None,
        stream: Any = None,
    ) -> list[Result]:
        """Copy blocks, or the same part of each, into the caller's memory, and verify them in the same pass.

        Args:
            keys: their keys, in the order of need: later ones load while earlier ones are copied.
            outs: one writable buffer a key; no two may share memory. With an :class:`Hbm` tier, all of them may be arrays
                on its device instead (CuPy, torch CUDA, anything with ``__cuda_array_interface__`` or DLPack): blocks in
                HBM are copied there on the device, others from memory.
            layers: which layers; default all.
            tokens: which tokens of each block; default all. Or ``bool[keys, block_tokens]`` for each block its own, into
                memory of the host: its buffer then has room for all tokens, each of these goes where it would lie among
                all, and what lies at the places of the others stays. Only what is copied counts as read.
            timeout: how long to wait for loads, all together.
            stream: of arrays on a device, the stream behind whose work the copies run (CuPy's, torch's, or its
                address); default the current one of the arrays' library.

        Returns:
            One result a key, once the bytes are there. After a miss the key's buffer holds nothing that may be used. With
            the reason ``"deadline"`` and a buffer inside a registered region, see :meth:`Store.register_region`; an array
            on a device may still be written to until its stream has come that far.

        Raises:
            UnsupportedError: for tokens of each block's own and arrays on a device.
        """
        some, picked = span_of("layers", layers), tokens_of(tokens, self.layout)
        if self._hbm is not None:
            outs = list(outs)
            if (arrays := self._hbm.arrays(outs, self.layout)) is not None:
                stream = self._hbm.stream_of(outs, stream)
                if isinstance(picked, np.ndarray):
                    raise UnsupportedError(
                        "tokens=bool[keys, block_tokens] was given with arrays on a device, where each range would be a copy "
                        "of its own: read the whole blocks, or into memory of the host"
                    )
                return self._hbm.get_into(self._space, keys, arrays, (some, picked), timeout, stream)
        return results(self._core.get_into(self._space, keys, outs, some, picked, timeout))

    async def aget(
        self, key: bytes, *, layers: Span = None, tokens: Span = None, timeout: float | None = None
    ) -> NDArray[np.uint8] | None:
        """As :meth:`get`, without blocking the event loop."""
        part = span_of("layers", layers), span_of("tokens", tokens)
        (size,) = self._core.sizes(self._space, [key], *part)
        if size is None:
            return None
        out = np.empty(size, np.uint8)
        (result,) = await self.aget_into([key], [out], layers=layers, tokens=tokens, timeout=timeout)
        return out if result.hit else None

    async def aget_into(
        self,
        keys: Sequence[bytes],
        outs: Iterable[Any],
        *,
        layers: Span = None,
        tokens: Picks = None,
        timeout: float | None = None,
        stream: Any = None,
    ) -> list[Result]:
        """As :meth:`get_into`, without blocking the event loop. The buffers are the store's until it has finished with
        them, also if the await is cancelled.
        """
        if (hbm := self._hbm) is not None:
            outs = list(outs)
            if hbm.holds(outs, self.layout):
                stream = hbm.stream_of(outs, stream)
                return await asyncio.to_thread(
                    self.get_into, keys, outs, layers=layers, tokens=tokens, timeout=timeout, stream=stream
                )
        some, picked = span_of("layers", layers), tokens_of(tokens, self.layout)
        codes = await aio.operation(
            lambda to, token: self._core.start_get_into(self._space, keys, outs, some, picked, timeout, to, token)
        )
        return results(codes)

    def lease(
        self, keys: Sequence[bytes], *, to: str = "memory", verify: bool = False, timeout: float | None = None
    ) -> Lease:
        """Views of blocks in memory, without a copy; blocks on NVMe are loaded first.

        Args:
            keys: their keys.
            to: ``"memory"`` (default), or ``"hbm"``: arrays on the device of the :class:`Hbm` tier, brought there first.
                Such a lease takes the copies over, since whoever holds them may write to them: others find the blocks in
                the tiers below. Release it ``after`` what the last kernel that reads them records.
            verify: whether to check their bytes now. Default no; loads, and copies to HBM, are always checked.
            timeout: how long to wait for loads, all together.

        Returns:
            A context manager with one read-only view a key.
        """
        if to == "hbm":
            return Lease(self._tier_in_hbm().lease(self._space, list(keys), timeout))
        if to != "memory":
            raise UnsupportedError(f"to={to!r} was given; a lease is in memory or hbm")
        return Lease(self._core.lease(self._space, keys, verify, timeout))

    def _tier_in_hbm(self) -> HbmTier:
        if self._hbm is None:
            raise UnsupportedError('to="hbm" was given to a store without that tier: open it with Hbm(...) in front')
        return self._hbm

    async def alease(
        self, keys: Sequence[bytes], *, to: str = "memory", verify: bool = False, timeout: float | None = None
    ) -> Lease:
        """As :meth:`lease`, without blocking the event loop."""
        if to != "memory":
            return await asyncio.to_thread(self.lease, keys, to=to, verify=verify, timeout=timeout)
        native = await aio.operation(
            lambda to, token: self._core.start_lease(self._space, keys, verify, timeout, to, token)
        )
        return Lease(native)

    def prefetch(
        self, keys: Sequence[bytes], *, to: str = "dram", deadline: float | None = None, priority: int = 0
    ) -> Job:
        """Bring blocks into memory, in this order. Does not block.

        Args:
            keys: their keys, in the order of need.
            to: ``"dram"`` (default), ``"cxl"`` (also satisfied by DRAM) or ``"hbm"`` (by way of memory).
            deadline: seconds from now; keys that are not there by then become misses. Default none.
            priority: jobs of higher priority go first. Default 0; above 0 their reads also pass others in the device's
                queue.

        Returns:
            The running job, also awaitable. Whoever asks for the same block joins the one load.
        """
        if to not in _GOALS:
            raise UnsupportedError(f"to={to!r} was given; blocks are brought to {', '.join(_GOALS)}")
        if to == "hbm":
            self._tier_in_hbm()
        return Job(self._core.prefetch(self._space, keys, to, deadline, priority))

    async def aprefetch(
        self, keys: Sequence[bytes], *, to: str = "dram", deadline: float | None = None, priority: int = 0
    ) -> list[Result]:
        """As ``await prefetch(…)``: one result a key."""
        return await self.prefetch(keys, to=to, deadline=deadline, priority=priority)

    # Keeping

    def pin(self, keys: Sequence[bytes], *, timeout: float | None = None) -> list[bool]:
        """Keep blocks in memory until as many :meth:`unpin`; loads them if needed. Whether each is pinned now."""
        return self._core.pin(self._space, keys, timeout)

    async def apin(self, keys: Sequence[bytes], *, timeout: float | None = None) -> list[bool]:
        """As :meth:`pin`, without blocking the event loop."""
        flags: list[bool] = await aio.operation(
            lambda to, token: self._core.start_pin(self._space, keys, timeout, to, token)
        )
        return flags

    def unpin(self, keys: Sequence[bytes]) -> list[bool]:
        """Take back one :meth:`pin` of each key. Whether it had one. Does not block."""
        return self._core.unpin(self._space, keys)

    def set_importance(self, keys: Sequence[bytes], scores: Sequence[float]) -> list[bool]:
        """Set the caller's score of blocks, finite and from 0: attention mass, say. Whether each is resident. Does not
        block.
        """
        return self._core.set_importance(self._space, keys, scores)

    def remove(self, keys: Sequence[bytes]) -> list[bool]:
        """Remove blocks, and all that follow them in their chains. Whether each was there. Leases keep their bytes.
        Does not block.
        """
        return self._core.remove(self._space, keys)

    def clear(self) -> int:
        """Remove every block of this namespace, also those that an earlier process stored. Returns how many."""
        return self._core.clear(self._space)

    def stats(self) -> dict[str, Any]:
        """Counters of this namespace since the store was opened (``hits``, ``misses``, ``evicted``: left the store to make
        room, ``expired``: older than its quota allows), and under ``"tiers"`` what it holds of each: ``blocks``,
        ``used_bytes`` (whole pages), ``guaranteed_bytes``, ``cap_bytes`` or ``None``. Does not block.
        """
        return self._core.namespace_report(self._space)
