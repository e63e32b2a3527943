"""What does not move bytes: leases, matches, the size of the index, restarts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvtier.bench.figures import Row, measured
from kvtier.bench.memory import Keys, chunks, huge_buffer
from kvtier.bench.plan import Plan
from kvtier.config import Dram, Nvme, StoreConfig
from kvtier.errors import KvtierError
from kvtier.layout import KVLayout
from kvtier.store import Store

__all__ = ["index_size", "lookups", "restart"]

_WAIT = 120.0
_PAGE = 4096
_CHAIN = 64  # blocks of one prompt
_LEAN = "lru-leaf"  # keeps least of a block


def lookups(plan: Plan) -> Iterator[Row]:
    """``lease_1000`` and ``match_4096``, in memory."""
    keys, data = Keys(), huge_buffer(64 << 10)
    with Store(Dram("160MiB")) as store:
        leased = keys.take(1000)
        store.put_many(leased, [data] * len(leased))

        def lease() -> None:
            with store.lease(leased) as blocks:
                if None in blocks.views:
                    raise KvtierError("a resident block was not leased")

        yield _timed(
            "lease_1000", plan, lease, 1e-3, "1,000 resident blocks of 64 KiB, not verified, and their release"
        )

        matched = keys.take(4096)
        store.put_many(matched, [data[:_PAGE]] * len(matched), parents=[None, *matched[:-1]])

        def match() -> None:
            if store.match(matched).blocks != len(matched):
                raise KvtierError("a resident block was not matched")

        yield _timed("match_4096", plan, match, 1e-3, "4,096 resident blocks")


def _timed(name: str, plan: Plan, call: Callable[[], None], aim: float, note: str) -> Row:
    def once() -> float:
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun

    for _ in range(3):
        once()
    return measured(name, "s", [once() for _ in range(10 * plan.pairs)], aim, note)


def index_size(plan: Plan) -> Iterator[Row]:
    """Bytes that the store keeps for each block in memory, at 10 and at 126 segments, and beside the default policy."""
    for layers, policy, suffix in ((10, _LEAN, ""), (126, _LEAN, "_126"), (10, StoreConfig.policy, "_default")):
        layout = KVLayout(layers=layers, kv_heads=1, head_dim=8 if layers == 10 else 1)
        image = -(-(layout.block_bytes + 16 * layers) // _PAGE) * _PAGE
        dram = Dram(int(plan.index_blocks * (image + 256) * 1.1) + (8 << 20), prefault=False)
        with Store(dram, policy=policy) as store:
            blocks = store.namespace(b"bench", layout)
            empty = store.stats()["metadata_bytes"]
            keys, data = Keys().take(plan.index_blocks), huge_buffer(layout.block_bytes)
            each: list[float] = []
            for at in chunks(len(keys), max(1, len(keys) // (2 * plan.pairs))):
                wanted = keys[at]
                parents = [None if i % _CHAIN == 0 else keys[at.start + i - 1] for i in range(len(wanted))]
                if not all(result.stored for result in blocks.put_many(wanted, [data] * len(wanted), parents=parents)):
                    raise KvtierError("a block was not stored")
                each.append((store.stats()["metadata_bytes"] - empty) / at.stop)
        note = f"in memory, beside `{policy}`, at {plan.index_blocks // 2:,} to {plan.index_blocks:,} blocks; tables grow in steps"
        yield measured(f"index_bytes_per_block{suffix}", "B", each[len(each) // 2 :], 200.0, note)


def restart(plan: Plan, directory: Path) -> Iterator[Row]:
    """``restart_s_per_million``, and bytes a block that is only on NVMe, of the leanest policy and of the default one."""
    count = plan.restart_blocks
    # The index of so many blocks is charged to the DRAM tier, of which it takes half at most.
    tiers = Dram((64 << 20) + 1024 * count, prefault=False), Nvme(directory / "restart", plan.restart_bytes)
    with Store(*tiers) as store:
        empty = store.stats()["metadata_bytes"]
        keys, data = Keys().take(count), huge_buffer(_PAGE)
        for at in chunks(count, 64 * _CHAIN):
            wanted = keys[at]
            parents = [None if i % _CHAIN == 0 else wanted[i - 1] for i in range(len(wanted))]
            results = store.put_many(wanted, [data] * len(wanted), parents=parents, timeout=_WAIT)
            if not all(result.stored for result in results):
                raise KvtierError("a block was not stored")
        store.flush(timeout=_WAIT)
    times: dict[str, list[float]] = {_LEAN: [], StoreConfig.policy: []}
    sizes: dict[str, list[float]] = {_LEAN: [], StoreConfig.policy: []}
    for policy in max(3, plan.pairs // 3) * [*times]:
        begun = time.perf_counter()
        with Store(*tiers, policy=policy) as store:
            times[policy].append((time.perf_counter() - begun) * 1e6 / count)
            report = store.stats()
            if report["blocks"] != count or store.match(keys[:_CHAIN]).blocks != _CHAIN:
                raise KvtierError(f"{report['blocks']} of {count} blocks were there after a restart")
            sizes[policy].append((report["metadata_bytes"] - empty) / count)
    exact = f"{count:,} blocks of 4 KiB in chains of {_CHAIN}"
    scaled = "" if count == 1_000_000 else ", extrapolated linearly to a million"
    yield measured("restart_s_per_million", "s", times[StoreConfig.policy], 3.0, exact + scaled)
    for policy, suffix in ((_LEAN, ""), (StoreConfig.policy, "_default")):
        note = f"{exact}, on NVMe only, after a restart, beside `{policy}`"
        yield measured(f"index_bytes_per_block_nvme{suffix}", "B", sizes[policy], 200.0, note)
