"""Traffic made up from a few statistics, for those who have no trace of their own. The same seed gives the same trace."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterator

from kvtier.traces.trace import Trace

__all__ = ["GENERATORS", "agent", "chat", "docqa"]

BLOCK_TOKENS = 512


class _Blocks:
    """Ids that were never used, and the prompt made of them."""

    def __init__(self) -> None:
        self.next = 0

    def take(self, count: int) -> list[int]:
        self.next += count
        return list(range(self.next - count, self.next))


def _lognormal(rng: random.Random, median: float, sigma: float) -> float:
    return median * math.exp(rng.gauss(0, sigma))


def _length(rng: random.Random, median: float, sigma: float) -> int:
    """So many blocks, log-normal, at least 1."""
    return max(1, round(_lognormal(rng, median, sigma)))


def _prompt(rng: random.Random, chain: list[int], blocks: _Blocks) -> tuple[int, list[int]]:
    """Tokens and blocks of a request: the chain, and a last block that is not full and that nobody will ask for."""
    tail = rng.randrange(1, BLOCK_TOKENS)
    return len(chain) * BLOCK_TOKENS + tail, chain + blocks.take(1)


def _interleave(
    name: str,
    requests: int,
    rng: random.Random,
    start: Callable[[], Iterator[tuple[float, int, list[int]]]],
    gap: float,
) -> Trace:
    """Sessions begin as a Poisson process with this mean gap; requests come out in order of time."""
    out: list[tuple[float, int, list[int]]] = []
    waiting: list[tuple[float, int, Iterator[tuple[float, int, list[int]]], int, list[int]]] = []
    arrival, count = 0.0, 0
    while len(out) < requests:
        arrival += rng.expovariate(1 / gap)
        while waiting and waiting[0][0] <= arrival:
            seconds, order, session, tokens, chain = heapq.heappop(waiting)
            out.append((seconds, tokens, chain))
            if (following := next(session, None)) is not None:
                heapq.heappush(waiting, (seconds + following[0], order, session, *following[1:]))
        session = start()
        if (first := next(session, None)) is not None:
            count += 1
            heapq.heappush(waiting, (arrival, count, session, *first[1:]))
    return Trace(name, out[:requests], BLOCK_TOKENS)


def chat(
    requests: int = 10_000,
    *,
    seed: int = 0,
    turns: float = 3.0,
    think_s: float = 60.0,
    session_gap_s: float = 0.6,
    first_blocks: float = 8.0,
    turn_blocks: float = 2.0,
    system_prompts: int = 4,
) -> Trace:
    """Conversations: each turn sends all that was said so far.

    Args:
        requests: how many.
        seed: of the random numbers.
        turns: mean of a session's turns (geometric: many have one, few have many).
        think_s: median of the time between two turns (log-normal, sigma 1), in seconds.
        session_gap_s: mean time between two sessions' starts (Poisson), in seconds.
        first_blocks: median of the first prompt (log-normal, sigma 1), in blocks of 512 tokens.
        turn_blocks: mean of what a turn and its answer add (exponential), in blocks.
        system_prompts: how many different openings of 2 blocks, the n-th with weight 1/n.
    """
    rng, blocks = random.Random(seed), _Blocks()
    openings = [blocks.take(2) for _ in range(system_prompts)]
    weights = [1 / n for n in range(1, system_prompts + 1)]

    def session() -> Iterator[tuple[float, int, list[int]]]:
        opening = rng.choices(openings, weights)[0] if openings else []
        context = opening + blocks.take(_length(rng, first_blocks, 1.0))
        while True:
            yield _lognormal(rng, think_s, 1.0), *_prompt(rng, context, blocks)
            if rng.random() < 1 / turns:
                return
            context = context + blocks.take(round(rng.expovariate(1 / turn_blocks)))

    return _interleave("chat", requests, rng, session, session_gap_s)


def docqa(
    requests: int = 10_000,
    *,
    seed: int = 0,
    documents: int = 2_000,
    zipf: float = 0.9,
    document_blocks: float = 30.0,
    questions: float = 2.0,
    think_s: float = 30.0,
    session_gap_s: float = 1.0,
) -> Trace:
    """Questions about documents, each prompt a document and then a question.

    Args:
        requests: how many.
        seed: of the random numbers.
        documents: how many there are; the n-th is asked for with weight 1/n**zipf.
        zipf: see there.
        document_blocks: median of a document's length (log-normal, sigma 0.8), in blocks of 512 tokens.
        questions: mean of the questions a reader asks about one document (geometric).
        think_s: median of the time between two questions (log-normal, sigma 1), in seconds.
        session_gap_s: mean time between two readers (Poisson), in seconds.
    """
    rng, blocks = random.Random(seed), _Blocks()
    opening = blocks.take(1)
    library = [opening + blocks.take(_length(rng, document_blocks, 0.8)) for _ in range(documents)]
    cumulative = list(itertools.accumulate(n**-zipf for n in range(1, documents + 1)))

    def session() -> Iterator[tuple[float, int, list[int]]]:
        document = rng.choices(library, cum_weights=cumulative)[0]
        while True:
            yield _lognormal(rng, think_s, 1.0), *_prompt(rng, document, blocks)
            if rng.random() < 1 / questions:
                return

    return _interleave("docqa", requests, rng, session, session_gap_s)


def agent(
    requests: int = 5_000,
    *,
    seed: int = 0,
    steps: float = 60.0,
    tool_s: float = 6.0,
    pause_s: float = 240.0,
    pause_share: float = 0.05,
    session_gap_s: float = 30.0,
    first_blocks: float = 30.0,
    step_blocks: float = 2.0,
    limit_blocks: int = 300,
) -> Trace:
    """Agents at work: many steps in quick succession over a context that grows until it is cut back.

    Args:
        requests: how many.
        seed: of the random numbers.
        steps: mean of a session's steps (geometric).
        tool_s: median of the time between two steps (log-normal, sigma 0.8), in seconds.
        pause_s: median of the time before a step that waits for a person, in seconds.
        pause_share: the share of such steps.
        session_gap_s: mean time between two sessions' starts (Poisson), in seconds.
        first_blocks: median of the first prompt (log-normal, sigma 0.5), in blocks of 512 tokens.
        step_blocks: mean of what a step adds (exponential), in blocks.
        limit_blocks: at this length the context is cut back to its first prompt and a summary.
    """
    rng, blocks = random.Random(seed), _Blocks()
    opening = blocks.take(20)

    def session() -> Iterator[tuple[float, int, list[int]]]:
        first = opening + blocks.take(_length(rng, first_blocks, 0.5))
        context = first
        while True:
            pause = rng.random() < pause_share
            gap = _lognormal(rng, pause_s, 1.0) if pause else _lognormal(rng, tool_s, 0.8)
            yield gap, *_prompt(rng, context, blocks)
            if rng.random() < 1 / steps:
                return
            context = context + blocks.take(round(rng.expovariate(1 / step_blocks)))
            if len(context) > limit_blocks:
                context = first + blocks.take(4)

    return _interleave("agent", requests, rng, session, session_gap_s)


GENERATORS: dict[str, Callable[..., Trace]] = {"chat": chat, "docqa": docqa, "agent": agent}
"""The generators by name, as ``kvtier replay synthetic:NAME`` takes them."""
