"""The store: its tiers, and its namespaces."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvtier import _kvtier, aio, canonical, codecs, rates
from kvtier.config import Cxl, Dram, Hbm, Nvme, Policy, Size, StoreConfig, Tier
from kvtier.errors import ClosedError, ConfigError, DeadlineError
from kvtier.identity import Identity
from kvtier.layout import KVLayout
from kvtier.machine import usable_memory
from kvtier.namespace import Namespace
from kvtier.quota import Amount, Quota
from kvtier.tiers.backend import DeviceBackend
from kvtier.tiers.hbm import HbmTier, countdown, open_tier, resolved

__all__ = ["Store"]

_log = logging.getLogger("kvtier")


class Store(Namespace):
    """A tiered store of KV blocks in this process.

    Args:
        tiers: fastest first, at most one of each kind: :class:`Hbm`, :class:`Dram`, :class:`Cxl`, :class:`Nvme`. None at all is DRAM
            of a quarter of what the process may use (cgroup limits respected), at most 8 GiB.
        policy: which block leaves first, always in chain order: ``"auto"`` (default), which learns online, or another of docs/POLICIES.md.
        verify: whether reads from memory check the checksums made at put (default). Reads from NVMe always do.
        watermarks: ``(high, low)`` shares of a memory tier: above the first blocks start to move down, until the second.
            Over NVMe, 16 MiB are kept free as well, or a sixteenth of a small tier.
        write_budget: bytes a day that may be written to NVMe, such as ``"500GB"``; blocks beyond it leave the store.
            Default no limit.

    It is itself a namespace of opaque blocks. A context manager; closing it writes what is only in memory to NVMe.
    Blocks while it maps memory and reads the journal; memory is prefaulted in the background.

    Raises:
        ConfigError: for settings that cannot work.
        LockedError: another process has the directory open; the message names it.
        UnsupportedError: the directory was written by a newer version; it is left as it is.
        StorageError: the machine refuses the memory, the file or the device.
    """

    def __init__(
        self,
        *tiers: Tier,
        policy: Policy | str = "auto",
        verify: bool = True,
        watermarks: tuple[float, float] = StoreConfig.watermarks,
        write_budget: Size | None = None,
    ) -> None:
        self._open(StoreConfig(tuple(tiers), policy, verify, watermarks, write_budget))

    def _open(self, config: StoreConfig) -> None:
        config = replace(
            config, tiers=tuple(resolved(tier) if isinstance(tier, Hbm) else tier for tier in config.tiers)
        )
        self.config = config
        _fits(config.tiers)
        self._progress = _kvtier.Progress()
        high, low = config.watermarks
        first = config.tiers[0]
        pool = open_tier(first) if isinstance(first, Hbm) else None
        core = None
        try:
            core = _kvtier.Core(
                [_native(tier) for tier in config.tiers],
                config.policy,
                config.verify,
                high,
                low,
                config.write_budget_bytes,
                self._progress,
            )
            feed, hbm = core.feed(), None
            if feed is not None and pool is not None:
                dram = sum(tier.size_bytes for tier in config.tiers if isinstance(tier, Dram))
                hbm = HbmTier(core, feed, pool, dram, config.verify)
        except BaseException:
            if core is not None:
                core.close(None)
            if pool is not None:
                pool.close()
            raise
        super().__init__(core, b"", KVLayout.opaque(), hbm)

    @classmethod
    def from_toml(cls, path: str | Path) -> Self:
        """The store that a TOML file describes; see :meth:`StoreConfig.from_toml`."""
        store = cls.__new__(cls)
        store._open(StoreConfig.from_toml(path))
        return store

    def namespace(
        self,
        identity: Identity | bytes,
        layout: KVLayout | None = None,
        codec: str | None = None,
        quota: Quota | Amount | None = None,
    ) -> Namespace:
        """The blocks of one model, layout and tenant.

        Args:
            identity: what the bytes mean: an :class:`Identity`, or canonical bytes of the caller's own that name
                weights, revision, configuration, dtype, parallel slice, adapter content and tenant.
            layout: how blocks are arranged; default opaque.
            codec: how blocks are coded on NVMe, one of :data:`kvtier.codecs.NAMES`; default the NVMe tier's own. With a
                lossy one, a block that left memory comes back within the bounds that :mod:`kvtier.codecs` states, and a
                second ``put`` of it replaces that by what was put. Such blocks have a namespace of their own: who asks
                for none, or another, never gets them. Memory holds blocks as they are.
            quota: what it may hold, a :class:`Quota`; an amount alone is its cap. It holds until another is given, or
                the store is closed. Default: as it was, at first a part of what no namespace has a guarantee of.

        Returns:
            The namespace; making it twice gives the same blocks. Does not block, but for a store's first namespace without a
            codec over ``Nvme(codec="auto")``, which tries the drive (part of a second).

        Raises:
            ConfigError: for an unknown codec, or a lossy one for bytes that are no bf16, fp16 or fp32; for a quota that
                guarantees more than there is, or the 256th namespace with one. Nothing was changed then.
        """
        quota = quota if isinstance(quota, Quota | None) else Quota(cap=quota)
        layout = KVLayout.opaque() if layout is None else layout
        if not isinstance(layout, KVLayout):
            raise ConfigError(
                f"a {type(layout).__name__} was given as the layout; allowed is a KVLayout, such as "
                "KVLayout.from_config(model.config), or None for opaque bytes"
            )
        codecs.check(codec, layout)
        if isinstance(identity, Identity):
            text = identity.to_bytes(layout)
        elif isinstance(identity, bytes) and identity:
            text = canonical.encode({"identity": 0, "own": identity, "layout": layout.fingerprint()})
        else:
            given = repr(identity) if isinstance(identity, str | bytes) else f"a {type(identity).__name__}"
            raise ConfigError(
                f"{given} was given as the identity; allowed are an Identity, such as Identity.from_model(...) with a loaded "
                "model or its directory, or bytes of your own that name everything that changes the meaning of a block"
            )
        if codec in codecs.LOSSY:
            text = canonical.encode({"lossy": codec, "of": text})
        namespace = Namespace(self._core, text, layout, self._hbm)
        if quota is not None:
            guaranteed, cap = quota.of(self.config.tiers)
            self._core.set_quota(namespace._space, guaranteed, cap, quota.priority, quota.ttl)
        own = codec or self._codec_below
        layers = [(planes, heads, dim) for planes, _, heads, dim in codecs.segment_dims(layout, 1)]
        self._core.set_coding(namespace._space, own, codecs.element(layout.dtype), layers)
        return namespace

    @functools.cached_property
    def _codec_below(self) -> str | None:
        """The codec of what lies on NVMe, of the namespaces that name none."""
        tier = next((tier for tier in self.config.tiers if isinstance(tier, Nvme)), None)
        if tier is None or tier.codec != "auto":
            return tier.codec if tier else None
        choice = rates.codec_of(tier)
        _log.info("the nvme tier's codec is %s: %s", choice.codec or "none", choice.why)
        return choice.codec

    def __repr__(self) -> str:
        try:
            held = f"{self.stats()['blocks']} blocks"
        except ClosedError:
            held = "closed"
        return f"<Store({', '.join(map(repr, self.config.tiers))}, policy={self.config.policy!r}): {held}>"

    def register_region(self, buffer: Any) -> _kvtier.Region:
        """Make memory of the caller a direct target of reads from NVMe.

        Args:
            buffer: a writable C-contiguous buffer. Whole blocks that are read to a 4096-byte boundary in it go past DRAM;
                huge pages under it double the rate.

        Returns:
            The region, ``in_flight()`` of which says how many reads still use it. After a result with the reason
            ``"deadline"`` the key's buffer may still be written to: do not use it until that is 0. The memory is kept
            until the store is closed.
        """
        return self._core.register_region(buffer)

    @property
    def device(self) -> DeviceBackend | None:
        """The pool of the :class:`Hbm` tier, for arrays and copies of the caller's own; ``None`` without one."""
        return None if self._hbm is None else self._hbm.backend

    def prefaulted(self, progress: Callable[[int, int], None] | None = None, timeout: float | None = None) -> bool:
        """Block until all memory is backed; whether it is.

        Args:
            progress: called on this thread with (bytes done, bytes in all) as it goes on.
            timeout: how long to wait.
        """
        self._core.contains(self._space, [])  # refuses a store that is closed
        return self._progress.wait(progress, timeout)

    def flush(self, timeout: float | None = None) -> None:
        """Write every block that is only in memory to NVMe, and block until all of it is durable. Without an NVMe tier it
        does nothing.

        Raises:
            DeadlineError: not done in time; what was written is kept.
            FullError: some blocks fit neither there nor into the write budget, and stay in memory only; the others are
                durable.
            StorageError: the device failed.
        """
        self._core.flush(timeout)

    async def aflush(self, timeout: float | None = None) -> None:
        """As :meth:`flush`, without blocking the event loop."""
        await aio.operation(lambda to, token: self._core.start_flush(timeout, to, token))

    def clear(self) -> int:
        """Remove every block of every namespace. Returns how many."""
        return self._core.clear(None)

    def stats(self) -> dict[str, Any]:
        """Counters, sizes in bytes and latencies in seconds since the store was opened, by tier under ``"tiers"``, and of
        each namespace under ``"namespaces"``, by the first 16 digits of its digest; see :meth:`Namespace.stats`. What
        an :class:`Hbm` tier lies on is its ``"device"``: ``"cuda:0"``, or ``"host"``. Does not block.

        Raises:
            ClosedError: the store is closed: ask before.
        """
        report = self._core.report()
        if self._hbm is not None:
            report["tiers"]["hbm"]["device"] = self._hbm.backend.name
        return report

    def close(self, timeout: float | None = None) -> None:
        """Flush, end all threads, let go of the directory and of the memory that no lease holds. Blocks for at most
        ``timeout`` seconds (default 30), even if a device hangs. Leases stay valid; blocks that fit neither on NVMe nor
        into the write budget are lost. Closing twice is allowed.

        Raises:
            DeadlineError: not all was written in time.
            StorageError: the device failed.
        """
        left = countdown(timeout)
        try:
            self._core.close(timeout)  # first: a device that hangs must not take the time to write
        finally:
            ended = self._hbm is None or self._hbm.close(left())
            aio.sweep()
        if not ended:
            raise DeadlineError(
                "copies to the device did not end in time, and are left to themselves: see whether it hangs"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _fits(tiers: Iterable[Tier]) -> None:
    """Refuse more memory than there is: the kernel would end the process when it is touched."""
    own = [tier for tier in tiers if isinstance(tier, Dram) or (isinstance(tier, Hbm) and tier.backend == "host")]
    given, usable = sum(tier.size_bytes for tier in own), usable_memory()
    if given > usable:
        names = " and ".join(type(tier).__name__ for tier in reversed(own))
        raise ConfigError(
            f"a {names} tier of {_kvtier.show_bytes(given)} was given, and this process may use "
            f"{_kvtier.show_bytes(usable)}. Give less, or make room first"
        )


def _native(tier: Tier) -> dict[str, Any]:
    match tier:
        case Hbm():
            return {"kind": "hbm", "size": tier.size_bytes}
        case Dram():
            own: dict[str, Any] = {"kind": "dram", "huge_pages": tier.huge_pages, "prefault": tier.prefault}
        case Cxl():
            own = {"kind": "cxl", "numa_node": tier.numa_node, "path": tier.path}
        case Nvme():
            own = {"kind": "nvme", "paths": list(tier.paths), "engine": tier.engine}
    return own | {"size": tier.size_bytes, "emulate_gbs": tier.emulate_gbs}
