"""Measure the store and write docs/BENCHMARKS.md: every figure beside its bound and its aim, and why one is missed.

Usage: benchmarks.py [--runs N]       how often all is measured (5; each takes a minute and a half)
                     [--from FILE]    FILE: the runs, as `--save` kept them, one a line; measured now if not given
                     [--save FILE]    keep the runs that are measured
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvtier import machine

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "BENCHMARKS.md"

Row = dict[str, Any]

AIMS: dict[str, tuple[str, float]] = {
    "dram_get_64k": (">=", 0.9),
    "dram_get_64k_single": (">=", 0.6),
    "dram_put_64k": (">=", 0.9),
    "dram_put_64k_single": (">=", 0.6),
    "dram_put_64k_chained": (">=", 0.9),
    **{f"dram_{verb}_{size}": (">=", 1.0) for verb in ("get", "put") for size in ("1m", "4m")},
    "nvme_read_64k": (">=", 0.9),
    "nvme_write_64k": (">=", 0.9),
    **{f"nvme_{verb}_{size}": (">=", 0.95) for verb in ("read", "write") for size in ("256k", "1m", "4m")},
    "nvme_read_64k_single": ("<=", 1.15),
    "lease_1000": ("<=", 1.0),
    "match_4096": ("<=", 1.0),
    "index_bytes_per_block": ("<=", 1.0),
    "index_bytes_per_block_nvme": ("<=", 1.0),
    "restart_s_per_million": ("<=", 1.0),
    "victim_share": (">=", 0.97),
    "nvme_read_1m_beside_writes": (">=", 0.8),
    "nvme_read_1m_behind_writes": ("<=", 1.0),
    "asyncio_tick": ("<=", 1.0),
    "longest_insert_of_10m": ("<=", 1.0),
    "victim_share_64k": (">=", 0.97),
}
"""The aim of a row's ratio."""

CPU_AIM = 0.12
"""CPU seconds per GiB of a transfer, for rows of their own."""

REASONS = {
    "dram_put_64k": "a put into a full tier also evicts. In a profile, before the last 3 %, 55 % is the copy with its checksum, which goes past the cache "
    "at the pace of memory; 19 % is `auto`, naming what leaves and learning from each put; 21 % is index, locks and allocator, a third of it "
    "taking out the entry of the block that leaves, which left the cache long ago; the rest is BLAKE3 and the call. Run "
    "in turns, `lru-leaf` came to 0.94, chained 0.90, where `auto` had 0.82 and 0.77. "
    "Fetching ahead the next blocks to leave gained 2 to 3 % without parents and nothing in chains, through eight files, and was left out",
    "dram_get_64k": "in a profile 77 % is the copy with its checksum, which waits for memory, 4 % waits for it to arrive, 3 % is BLAKE3, and "
    "6 % is what `auto` notes of hits: run in turns, `lru-leaf` came to 0.89 where it had 0.86. Pinning eight blocks, copying them one "
    "right after the other and only then checking them was tried: the waits moved into the copies, and nothing was gained",
    "nvme_read_64k_single": "whoever asks sends the read and waits for the device himself, without a thread between. On the other machine, where it was 1.15, two fifths "
    "of the store's own time were the check and the copy, as from memory; the rest makes room for the block and enters it into the "
    "index, through tables that left the cache while the device was waited for",
    "nvme_read": "who asked verifies and copies what was read, beside a device that is emulated on the same processors, and the "
    "pipeline fills and drains once a call",
    "nvme_read_1m_beside_writes": "memory is full of blocks that must be written before they leave. The first reads wait for "
    "that; those after them take the places of the first, so fewer are under way than without the puts. Both share the drive. "
    "Run by itself, not after all other rows, it came to 0.79 to 0.83 on the other machine",
    "nvme_write": "a put copies and the mover verifies, where the bare loop only writes, and the device is emulated on the same "
    "processors: beside two threads that copy as fast the bare loop itself comes to no more "
    "(`nvme_write_1m_beside_copies`). Of a MiB the thread that puts works 70 µs outside the kernel and the mover 62, nine "
    "tenths of it copy and check: 0.12 s/GiB. Smaller blocks also cost more work each: in a profile of 64 KiB, copy "
    "and verification are three tenths of the CPU time, the kernel a quarter, and the rest is the index, policies, journal and "
    "hand-overs between four threads",
    "victim_share_64k": "borrowing 4,096 arrays, and making as many results, takes the interpreter's lock",
}
"""Why an aim is missed, by the beginning of the row's name; the longest that fits."""

BESIDE = """
## On another machine

The ratios are as much the machine's. Before this, also on 2026-11-30, the page was of another one, also 2 cores of AMD EPYC, where libc copies
blocks of 64 KiB at 23 GB/s (past the cache 1.12 times as fast) and a bare loop writes at 4.9 GB/s and reads at 3.4. There the code before puts
were done some at a time came to these medians of 5 runs; what came after it was not measured there:

| row | ratio | aim |
|---|---|---|
| `dram_get_64k`, `_single` | 0.86, 0.61 | 0.9, 0.6 |
| `dram_put_64k`, `_single`, `_chained` | 0.66, 0.61, 0.62 | 0.9, 0.6, 0.9 |
| `dram_get_1m`, `_put_1m`, `_get_4m`, `_put_4m` | 1.22, 1.20, 1.23, 1.23 | 1.0 |
| `nvme_read_64k`, `_256k`, `_1m`, `_4m` | 0.93, 0.97, 0.99, 0.99 | 0.9, then 0.95 |
| `nvme_read_64k_single` | 1.15 | 1.15 |
| `nvme_write_64k`, `_256k`, `_1m`, `_4m` | 0.83, 0.86, 0.93, 0.93 | 0.9, then 0.95 |
| CPU s/GiB of reads of 64 KiB, 256 KiB, 1 MiB, 4 MiB | 0.135, 0.086, 0.065, 0.060 | 0.12 |
| CPU s/GiB of writes of the same | 0.229, 0.149, 0.122, 0.103 | 0.12 |
| `nvme_read_1m_beside_writes` | 0.68 | 0.8 |
| `victim_share`, `_64k` | 1.00, 0.97 | 0.97 |

## Beside other stores

`scripts/peers.py` prints this table; it is kept by hand, as the peers are no requirement of kvtier. Measured on 2026-11-30 on 2
cores of AMD EPYC, Linux 6.18: blocks of 64 KiB, 256 MiB of data, source and destination the caller's, on huge pages; one
thread calls, for one block or for 512 (32 MiB). Each cell is kvtier's GB/s / the store's = the ratio, medians of 15 alternating
pairs, and the interquartile range of the ratios. Each store's own memory is as it allocates it: on huge pages that of
kvtier and the arena. Copies of the same blocks and nothing else came to 21.4 GB/s by libc in
that run, and to 24.2 past the cache.

| store | get, one a call | get, 512 a call | put, one a call | put, 512 a call |
|---|---|---|---|---|
| arena + numpy copy | 13.9 / 17.6 = **0.8** (9%) | - | 13.6 / 18 = **0.8** (8%) | - |
| lmcache 0.5.6 | 14.2 / 10.8 = **1.3** (5%) | 18.4 / 10.9 = **1.7** (2%) | 12.2 / 2.9 = **4.2** (4%) | 14.6 / 2.88 = **5.1** (4%) |
| mooncake 0.3.13.post1 | 13.8 / 0.742 = **18.8** (7%) | 18.4 / 10.5 = **1.8** (9%) | 12.6 / 0.438 = **28.7** (9%) | 14.2 / 7.88 = **1.9** (8%) |
| lmdb 3.0.0, writemap | 13.9 / 12.9 = **1.1** (8%) | 18.7 / 15.1 = **1.3** (6%) | 12.6 / 10.3 = **1.2** (4%) | 14.3 / 12.5 = **1.2** (5%) |
| redis 7.0.15, one connection | 13.8 / 0.754 = **17.9** (12%) | 18.8 / 1.12 = **16.6** (67%) | 13.2 / 0.789 = **17.2** (8%) | 14.4 / 0.837 = **18.2** (10%) |

kvtier runs with its defaults: every get verifies the block's checksum, every put makes one and evicts. None of the others
verifies a payload. What they do:

- **arena + numpy copy**: one array on huge pages: no index, no eviction, nothing but the bytes.
- **LMCache**: its `LocalCPUBackend` alone, without the engine around it: a dictionary under a lock, LRU that evicts on put, and lent
  tensors, which are copied out with torch on one thread (on two, torch's default here, gets came to 1.7 and 2.8 in
  an earlier run of their own). A get notes no use.
- **Mooncake** (the wheel without CUDA): a master in a process of its own, which each call asks; over half of what this process
  works for it is on threads of its own, beside the caller. Emptied between laps of puts, so none evicts.
- **lmdb**: a writable map in a file in memory, never synced; it lends memory, which is copied out. A put replaces a block, nothing
  is ever evicted; a batch is a transaction.
- **Redis** (client 8.1.0 with hiredis 3.5.0): a server in a process of its own over a Unix socket; LRU that evicts on put; what it answers
  is copied out.

The aim is twice each of them in gets. One block a call reaches it against Mooncake (18.8) and Redis (17.9), not against
LMCache (1.3) and lmdb (1.1); 512 a call against Redis (16.6), not against LMCache (1.7), Mooncake (1.8) and lmdb (1.3).

That was on the other machine. On this one, where libc copies the same blocks at 14.6 GB/s and a copy past the cache comes to 20.6, gets
are 1.3 times lmdb's one a call and 1.7 times 512 a call, puts 1.9 and 2.2 times, and 0.9 of the bare arena's; the others were not run there.

A get in batches is little more than the copy: on the other machine 18.7 GB/s are 0.87 of libc's. Twice lmdb would be 30.2 there, more than
one thread copies in either way (two together, measured on this machine, come to 24.0), and twice LMCache and Mooncake 21.8 and 21.0. A block of its own takes kvtier about 1.2 µs more
than one of a batch (the call from Python, and nothing is fetched ahead); the arena alone, without index, pin, policy and
checksum, is faster there (0.8). Puts reach twice LMCache, Redis and, for one block, Mooncake (in batches 1.9); they
are 1.2 times lmdb's, which overwrites in place of evicting, and 0.8 of the arena's.
"""
"""The end of the page, kept by hand: what another machine came to, and what `scripts/peers.py` printed."""


def main() -> None:
    """Measure, or read what was measured, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--from", dest="source", type=Path)
    parser.add_argument("--save", dest="target", type=Path)
    arguments = parser.parse_args()
    source: Path | None = arguments.source
    if source is None:
        runs = [_measured() for _ in range(max(1, arguments.runs))]
        if arguments.target:
            arguments.target.write_text("".join(json.dumps(run) + "\n" for run in runs))
        measured = datetime.datetime.now(datetime.UTC)
    else:
        runs = [json.loads(line) for line in source.read_text().splitlines()]
        measured = datetime.datetime.fromtimestamp(source.stat().st_mtime, datetime.UTC)
    rows = _combined(runs)
    PAGE.write_text(_page(rows, measured, len(runs)))
    print(f"{PAGE}: {len(rows)} rows, {sum(_is_missed(row) for row in rows)} aims missed")


def _measured() -> list[Row]:
    def run(*command: str) -> str:
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT).stdout

    rows = [
        json.loads(line) for line in run(sys.executable, "-m", "kvtier.cli", "bench", "--quick", "--json").splitlines()
    ]
    # The core alone: so many blocks would need 40 GB of space.
    index = json.loads(run("cargo", "bench", "--quiet", "-p", "kvtier-core", "--bench", "index"))
    row = {
        "name": "longest_insert_of_10m",
        "value": index["longest_s"],
        "unit": "s",
        "bound": 5e-3,
        "bound_name": "aim",
    }
    return [*rows, row | {"ratio": index["longest_s"] / 5e-3, "spread": None}]


def _combined(runs: list[list[Row]]) -> list[Row]:
    """Each row of the run in which what its aim judges is the median, with the lowest and the highest of that of all runs."""
    rows = []
    for same in zip(*runs, strict=True):
        ordered = sorted(same, key=lambda row: _judged(row) or 0.0)
        rows.append(ordered[len(ordered) // 2] | {"range": (_judged(ordered[0]), _judged(ordered[-1]))})
    return rows


def _page(rows: list[Row], measured: datetime.datetime, runs: int) -> str:
    lines = [
        "# Benchmarks",
        "",
        f"`make benchmarks` measures and writes this page. Measured on {measured:%Y-%m-%d}: {_machine()}.",
        "Each figure stands beside a bound of the same run: medians of alternating pairs, checksums on; spread is the",
        f"interquartile range of the ratios. Each row is the median of {runs} runs by its ratio (of CPU, by its value), and stands beside",
        "the lowest and the highest: the machine is not ours alone. Rates are 1e9 bytes a second. For rates and shares a larger ratio is",
        "better, for times, sizes and CPU a smaller one.",
        "",
        "| row | value | bound | ratio | spread | of all runs | aim | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(_cells(row))} |" for row in rows]
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if _is_missed(row):
            reasons.setdefault(_reason(row["name"]), []).append(f"`{row['name']}` {_by_how_much(row)}")
    lines += ["", "## Aims that are missed, and why", ""]
    lines += [f"- {', '.join(missed)}: {why}" for why, missed in reasons.items()] or ["None."]
    return "\n".join(lines) + "\n" + BESIDE


def _cells(row: Row) -> list[str]:
    bound = "" if row["bound"] is None else f"{row['bound']:.4g} ({row['bound_name']})"
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
    spread = "" if row["spread"] is None else f"{row['spread']:.0%}"
    value = "not measured" if row["value"] is None else f"{row['value']:.4g} {row['unit']}"
    low, high = row["range"]
    of_all = "" if low is None or high is None else f"{low:.2f} to {high:.2f}"
    verdict = "" if _aim(row) is None else "missed" if _is_missed(row) else "met"
    return [f"`{row['name']}`", value, bound, ratio, spread, of_all, _aim(row) or "", verdict]


def _aim(row: Row) -> str | None:
    if row["name"].endswith("cpu_s_per_gib"):
        return f"<= {CPU_AIM} s/GiB"
    known = AIMS.get(row["name"])
    return None if known is None else f"{known[0]} {known[1]}"


def _is_missed(row: Row) -> bool:
    if row["value"] is None:
        return False
    if row["name"].endswith("cpu_s_per_gib"):
        return bool(row["value"] > CPU_AIM)
    known, ratio = AIMS.get(row["name"]), row["ratio"]
    if known is None or ratio is None:
        return False
    return bool(ratio < known[1] if known[0] == ">=" else ratio > known[1])


def _judged(row: Row) -> float | None:
    """What the row's aim is an aim of."""
    judged: float | None = row["value"] if row["name"].endswith("cpu_s_per_gib") else row["ratio"]
    return judged


def _by_how_much(row: Row) -> str:
    if row["name"].endswith("cpu_s_per_gib"):
        return f"{row['value']:.2f} s/GiB"
    return f"{row['ratio']:.2f}"


def _reason(name: str) -> str:
    fitting = [start for start in REASONS if name.startswith(start)]
    return f"{REASONS[max(fitting, key=len)]}." if fitting else "Not explained yet."


def _machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return f"{os.cpu_count()} cores of {machine.cpu_name()}, {memory:.0f} GB of memory, Linux {platform.release()}"


if __name__ == "__main__":
    main()
