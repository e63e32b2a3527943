#!/usr/bin/env python
"""The table of docs/POLICIES.md about traffic that nothing was chosen on: `auto` against the best of 18 classic policies.

    scripts/other_traffic.py [--seed N]

Takes a minute and a half on two cores.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from itertools import accumulate, chain, count

from policies import CLASSICS, SHARES

from kvtier.traces import Trace, agent, chat, docqa

TOKENS = 512


class Library:
    """Documents of blocks that nothing else has, some more popular than others."""

    def __init__(self, seed: int, documents: int, exponent: float, blocks: int, spread: float) -> None:
        self.rng, self.fresh = random.Random(seed), count()
        sizes = (max(1, round(blocks * math.exp(self.rng.gauss(0, spread)))) for _ in range(documents))
        self.order = [[next(self.fresh) for _ in range(size)] for size in sizes]
        self.weights = list(accumulate(rank**-exponent for rank in range(1, documents + 1)))

    def pick(self) -> list[int]:
        """A document, by the popularity of its rank."""
        return self.order[self.rng.choices(range(len(self.order)), cum_weights=self.weights)[0]]


def popular(
    seed: int,
    requests: int,
    documents: int = 2000,
    exponent: float = 0.9,
    blocks: int = 12,
    spread: float = 0.7,
    rises: int = 0,
    question: bool = True,
) -> Trace:
    """Each request a document, and a question behind it; every so many requests a document rises to the top."""
    library, out = Library(seed, documents, exponent, blocks, spread), []
    for n in range(requests):
        if rises and n and n % rises == 0:
            library.order.insert(0, library.order.pop(library.rng.randrange(documents)))
        document = library.pick()
        tokens = len(document) * TOKENS
        if question:
            tokens += library.rng.randrange(1, TOKENS)
            document = [*document, next(library.fresh)]
        out.append((float(n), tokens, document))
    return Trace("popular", out, TOKENS)


def phases(seed: int, requests: int, every: int) -> Trace:
    """As ``popular``, where all documents change places every so many requests."""
    library, out = Library(seed, 1000, 1.0, 12, 0.7), []
    for n in range(requests):
        if n % every == 0:
            library.rng.shuffle(library.order)
        document = library.pick()
        out.append((float(n), len(document) * TOKENS + 7, [*document, next(library.fresh)]))
    return Trace("phases", out, TOKENS)


def loop(seed: int, documents: int, scan: float, requests: int = 6000, blocks: int = 16) -> Trace:
    """Documents asked for in turn, over and over; a share of the requests is never seen again."""
    rng, fresh, out, turn = random.Random(seed), count(), [], 0
    library = [[next(fresh) for _ in range(blocks)] for _ in range(documents)]
    for n in range(requests):
        if rng.random() < scan:
            asked = [next(fresh) for _ in range(blocks)]
        else:
            asked, turn = library[turn % documents], turn + 1
        out.append((float(n), blocks * TOKENS, asked))
    return Trace("loop", out, TOKENS)


def mixed(*traces: Trace) -> Trace:
    """All of their requests, by time."""
    requests = (
        (at, number, tokens, [(number, block) for block in blocks])
        for number, trace in enumerate(traces)
        for at, tokens, blocks in trace.requests()
    )
    ordered = sorted(requests, key=lambda request: request[:2])
    return Trace("mixed", [(at, tokens, blocks) for at, _, tokens, blocks in ordered], TOKENS)


def traffic(seed: int) -> Iterator[tuple[str, Trace]]:
    """What kind of traffic, and a trace of it."""
    kind = "static popularity"
    for exponent in (0.6, 0.8, 1.0, 1.2):
        yield kind, popular(seed, 12_000, 3000, exponent)
    for blocks, requests, documents in ((1, 60_000, 10_000), (4, 30_000, 5000), (40, 5000, 1000)):
        yield kind, popular(seed, requests, documents, 0.9, blocks, 0.5)
    yield kind, popular(seed, 12_000, 3000, question=False)
    yield kind, popular(seed, 60_000, 3000, blocks=8)
    kind = "document QA, other statistics"
    for questions, zipf, documents in (
        (1, 0.9, 2000),
        (1, 0.7, 2000),
        (1, 1.1, 5000),
        (1.3, 0.9, 5000),
        (3, 0.6, 500),
        (2, 1.2, 10_000),
    ):
        yield kind, docqa(8000, seed=seed, questions=questions, zipf=zipf, documents=documents)
    yield kind, docqa(10_000, seed=seed + 10)
    yield kind, docqa(10_000, seed=seed, document_blocks=6)
    kind = "chat, other statistics"
    yield kind, chat(10_000, seed=seed, think_s=600)
    yield kind, chat(8000, seed=seed, turns=12, first_blocks=4)
    yield kind, chat(10_000, seed=seed, turns=1.3)
    yield kind, chat(10_000, seed=seed, system_prompts=200, first_blocks=3)
    kind = "agents, other statistics"
    yield kind, agent(4000, seed=seed, tool_s=30, session_gap_s=60)
    yield kind, agent(5000, seed=seed, steps=12, session_gap_s=8)
    yield kind, agent(4000, seed=seed, session_gap_s=8)
    yield kind, agent(4000, seed=seed, pause_share=0.3)
    kind = "700 to 3,000 requests of each"
    for requests in (1000, 2000, 3000):
        yield kind, docqa(requests, seed=seed)
        yield kind, chat(requests, seed=seed)
    yield kind, agent(1000, seed=seed)
    yield kind, popular(seed, 2000, 1000)
    for other in (seed + 20, seed + 30, seed + 40):
        yield kind, docqa(1000, seed=other)
        yield kind, docqa(2000, seed=other)
        yield kind, chat(1500, seed=other)
        yield kind, agent(700, seed=other)
        yield kind, popular(other, 2000, 1000)
    kind = "popularity that moves"
    for other in (seed + 20, seed + 30, seed + 40):
        yield kind, phases(other, 9000, 2000)
        yield kind, popular(other, 9000, rises=50)
    yield kind, popular(seed, 12_000, exponent=1.0, rises=10)
    yield kind, popular(seed, 12_000, rises=100)
    yield kind, phases(seed, 12_000, 3000)
    kind = "loops with scans"
    for documents, scan in ((400, 0.0), (300, 0.3), (100, 0.7)):
        yield kind, loop(seed, documents, scan)
    kind = "mixtures"
    yield kind, mixed(docqa(4000, seed=seed), chat(6000, seed=seed))
    yield kind, mixed(docqa(3000, seed=seed, questions=1), chat(5000, seed=seed), agent(1500, seed=seed))
    yield kind, mixed(agent(3000, seed=seed), popular(seed, 6000))


def compare(trace: Trace) -> dict[str, list[float]]:
    """Points of token hit ratio to the best classic at each capacity, by policy."""
    names = [name + end for name in CLASSICS for end in ("", "-leaf")]
    points: dict[str, list[float]] = {name: [] for name in ("auto", *names)}
    for share in SHARES[1]:
        hits = {name: trace.replay(name, max(1, trace.capacity(Decimal(share)))).token_hit for name in points}
        best = max(hits[name] for name in names)
        for name, hit in hits.items():
            points[name].append(100 * (hit - best))
    return points


def row(name: str, traces: int, points: list[float]) -> str:
    """Of the table."""
    below = sum(point < -0.5 for point in points)
    return f"| {name} | {traces} | {sum(points) / len(points):+.2f} | {min(points):+.2f} | {below} of {len(points)} |"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=2)
    kinds, traces = zip(*traffic(parser.parse_args().seed), strict=True)
    with ThreadPoolExecutor() as pool:
        compared = list(pool.map(compare, traces))
    print("| traffic | traces | mean | worst | more than 0.5 below |\n|---|---|---|---|---|")
    for kind in dict.fromkeys(kinds):
        of_kind = [points["auto"] for other, points in zip(kinds, compared, strict=True) if other == kind]
        print(row(kind, len(of_kind), list(chain(*of_kind))))
    for name in ("auto", *(name + end for name in CLASSICS for end in ("", "-leaf"))):
        print(row(f"all, `{name}`", len(traces), list(chain(*(points[name] for points in compared)))))


if __name__ == "__main__":
    main()
