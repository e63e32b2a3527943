#!/usr/bin/env python
"""The tables of docs/POLICIES.md: `auto` against the best classic policy, in one tier and in two above one another, and in stores.

    KVTIER_SHARED=DIR scripts/policies.py [--choose] [--tiers 1|2 | --stores | --plot FILE] [--trace NAME]...

Without KVTIER_SHARED only the synthetic traces are replayed. `--choose` replays what settings are chosen on (the first half of each
trace, seed 1) instead of what is reported (the second half, seed 0).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path

import numpy as np

from kvtier import Dram, Nvme, Store
from kvtier.config import Policy
from kvtier.traces import Trace, agent, chat, docqa, read
from kvtier.traces.plot import Point, draw

CLASSICS = ("fifo", "lru", "lfu", "clock", "sieve", "s3-fifo", "arc", "w-tinylfu", "gdsf")
SHARES = {1: ("0.01", "0.02", "0.05", "0.1", "0.2", "0.5"), 2: ("0.02", "0.05", "0.1", "0.2", "0.5")}
# Policies, and shares for DRAM and NVMe, of stores.
COMPARED: tuple[Policy, ...] = ("lru-leaf", "auto")
STORES = (("0.02", "0.1"), ("0.05", "0.3"), ("0.05", "0.05"), ("0.1", "0.05"), ("0.1", "0.02"), ("0.2", "0.1"))
# Bytes of a block there, and more than the index takes for one.
BLOCK, ENTRY = 16 << 10, 230
# The upper of two tiers is so much of both.
UPPER = Decimal("0.2")
FILES = {
    "Conversation (Mooncake)": "mooncake_conversation_trace.jsonl.gz",
    "Agents": "agentic64_b512.jsonl.gz",
}
SYNTHETIC: dict[str, Callable[[int], Trace]] = {
    "synthetic:chat": lambda seed: chat(10_000, seed=seed),
    "synthetic:docqa": lambda seed: docqa(10_000, seed=seed),
    "synthetic:agent": lambda seed: agent(5_000, seed=seed),
}


def traces(choose: bool, only: list[str]) -> Iterator[tuple[str, Trace]]:
    """The traces by name: of what is chosen on, or of what is reported."""
    shared = os.environ.get("KVTIER_SHARED")
    for name, file in FILES.items():
        if shared and (not only or name in only):
            whole = read(Path(shared) / "traces" / file)
            half = whole.part(Decimal(0), Decimal("0.5")) if choose else whole.part(Decimal("0.5"), Decimal(1))
            yield f"{name}, {'first' if choose else 'second'} half", half
    for name, generate in SYNTHETIC.items():
        if not only or name in only:
            yield name, generate(int(choose))


def capacities(trace: Trace, share: Decimal, tiers: int) -> int | list[int]:
    """Blocks of each tier, where all together hold this share of a trace's blocks."""
    if tiers == 1:
        return trace.capacity(share)
    upper, both = trace.capacity(share * UPPER), trace.capacity(share)
    return [upper, both - upper]


def percent(ratio: float) -> str:
    """A ratio as the tables have it."""
    return f"{100 * ratio:.2f}"


def rows(trace: Trace, tiers: int) -> Iterator[list[str]]:
    """The table's rows for one trace."""
    best, auto, ceiling, lru = [], [], [], []
    for share in map(Decimal, SHARES[tiers]):
        sizes = capacities(trace, share, tiers)
        classics = {name: trace.replay(name, sizes).token_hit for base in CLASSICS for name in (base, f"{base}-leaf")}
        best.append(max((ratio, name) for name, ratio in classics.items()))
        lru.append(classics["lru-leaf"])
        auto.append(trace.replay("auto", sizes).token_hit)
        ceiling.append(trace.replay("min-bypass", sizes).token_hit)
    yield ["best classic", *(f"{percent(ratio)} {name}" for ratio, name in best)]
    yield ["`auto`", *map(percent, auto)]
    yield ["difference", *(f"{100 * (a - b):+.2f}" for a, (b, _) in zip(auto, best, strict=True))]
    gaps = [(a - b, c - b) for a, (b, _), c in zip(auto, best, ceiling, strict=True)]
    yield ["gap to MIN closed", *(f"{100 * gain / gap:.0f} %" if gap > 0.005 else "-" for gain, gap in gaps)]
    yield ["`auto` less `lru-leaf`", *(f"{100 * (a - b):+.2f}" for a, b in zip(auto, lru, strict=True))]
    yield ["`min-bypass`", *map(percent, ceiling)]


def plot(path: Path, choose: bool, only: list[str]) -> None:
    """Draws policies in chain order, and the ceiling, on the traces of real traffic."""
    points = [
        Point(name, policy, blocks, trace.replay(policy, blocks).token_hit)
        for name, trace in traces(choose, only or list(FILES))
        for policy in ("min-bypass", "auto", "lru-leaf", *(f"{base}-leaf" for base in CLASSICS if base != "lru"))
        for blocks in (trace.capacity(Decimal(share)) for share in SHARES[1])
    ]
    path.write_text(draw(points))


def in_store(trace: Trace, policy: Policy, dram: Decimal, nvme: Decimal) -> tuple[float, int]:
    """What a store that holds these shares of a trace's blocks serves of its tokens, and the blocks that it writes."""
    block = np.zeros(BLOCK, np.uint8)
    outs = np.empty((max(len(blocks) for _, _, blocks in trace.requests()), BLOCK), np.uint8)
    found = 0
    with tempfile.TemporaryDirectory() as path:
        tiers = Dram(trace.capacity(dram) * (BLOCK + ENTRY)), Nvme(path, max(1 << 20, trace.capacity(nvme) * BLOCK))
        with Store(*tiers, policy=policy) as store:
            namespace = store.namespace(b"trace")
            for _, tokens, blocks in trace.requests():
                keys = [number.to_bytes(16, "little") for number in blocks]
                hits = namespace.match(keys).blocks
                namespace.get_into(keys[:hits], outs[:hits])
                parents = [None, *keys][hits : len(keys)]
                namespace.put_many(keys[hits:], [block] * (len(keys) - hits), parents=parents)
                found += min(hits * trace.block_tokens, tokens)
            return found / sum(trace.tokens), store.stats()["tiers"]["nvme"]["writes"]


def stores(choose: bool, only: list[str]) -> None:
    """Prints what stores serve."""
    chosen = list(traces(choose, only))
    print("\n| DRAM, NVMe | |", *(f"{name} |" for name, _ in chosen))
    print("|---" * (2 + len(chosen)) + "|")
    for dram, nvme in STORES:
        label = f"{100 * float(dram):g} %, {100 * float(nvme):g} %"
        for policy in COMPARED:
            print(f"| {label} | `{policy}` |", end="")
            for _, trace in chosen:
                ratio, writes = in_store(trace, policy, Decimal(dram), Decimal(nvme))
                print(f" {percent(ratio)}, {writes / 1000:.0f} |", end="", flush=True)
            label = ""
            print()


def main() -> None:
    """Prints all tables, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--choose", action="store_true", help="what settings are chosen on")
    parser.add_argument("--tiers", type=int, choices=(1, 2), help="one table of replays alone")
    parser.add_argument("--stores", action="store_true", help="the table of stores alone")
    parser.add_argument("--plot", type=Path, help="instead, draw the first table's replays into this SVG")
    parser.add_argument("--trace", action="append", default=[], choices=[*FILES, *SYNTHETIC], help="these alone")
    asked = parser.parse_args()
    if asked.plot:
        plot(asked.plot, asked.choose, asked.trace)
        return
    for tiers in () if asked.stores else (asked.tiers,) if asked.tiers else (1, 2):
        print(f"\n| {'two tiers, the upper a fifth' if tiers == 2 else 'trace'} | | ", end="")
        print(*(f"{float(share) * 100:g} %" for share in SHARES[tiers]), sep=" | ", end=" |\n")
        print("|---" * (2 + len(SHARES[tiers])) + "|")
        for name, trace in traces(asked.choose, asked.trace):
            for label, row in zip([name, *[""] * 9], rows(trace, tiers), strict=False):
                print(f"| {label} |", *(f"{cell} |" for cell in row), flush=True)
    if asked.stores or not asked.tiers:
        stores(asked.choose, asked.trace)


if __name__ == "__main__":
    main()
