"""What a trace is, and what its replay gives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import islice

from kvtier import _kvtier
from kvtier.config import check_policy
from kvtier.errors import ConfigError

__all__ = ["OFFLINE", "POLICIES", "Outcome", "Trace"]

OFFLINE = ("min", "min-bypass")
"""Optima that know the future; for replay alone."""
POLICIES = (*_kvtier.POLICIES, *OFFLINE)
"""Everything that a trace can be replayed against."""


@dataclass(frozen=True)
class Outcome:
    """What one replay counted.

    Args:
        references: blocks asked for.
        plain_hits: of these, found when they were used, each by itself.
        prefix_hits: of these, found at the request's start with all that precede them: what a server gains.
        token_hits: tokens of the latter.
        tokens: tokens of all prompts.
        tier_hits: the prefix hits of each tier.
        demoted: blocks that came into each tier from the one above; for the last one, what is written to NVMe.
        hit_tokens: tokens found, one count a request.
        seconds: how long the replay took.
    """

    references: int
    plain_hits: int
    prefix_hits: int
    token_hits: int
    tokens: int
    tier_hits: Sequence[int]
    demoted: Sequence[int]
    hit_tokens: Sequence[int] = field(repr=False)
    seconds: float

    @property
    def plain_block_hit(self) -> float:
        """Share of the blocks that was found, each by itself."""
        return self.plain_hits / max(1, self.references)

    @property
    def prefix_block_hit(self) -> float:
        """Share of the blocks that was found with all that precede them."""
        return self.prefix_hits / max(1, self.references)

    @property
    def token_hit(self) -> float:
        """Share of the prompts' tokens that was found."""
        return self.token_hits / max(1, self.tokens)

    def saved_s(self, cost: Callable[[int], float]) -> float:
        """Seconds of time to first token saved in all, where ``cost(n)`` seconds compute a prefix of n tokens (less those
        to load it, if they are to count).
        """
        return sum(cost(found) for found in self.hit_tokens if found)

    @property
    def references_per_second(self) -> float:
        """Blocks replayed a second."""
        return self.references / max(1e-9, self.seconds)


class Trace:
    """Requests in order of arrival, each a chain of blocks.

    Args:
        name: what to call it.
        requests: for each request its time of arrival in seconds, its prompt's tokens, and the ids of its blocks from
            the head of the chain. Equal ids mean equal prefixes; ids may be anything hashable.
        block_tokens: tokens in a full block.
        skipped: how many bad lines were skipped when it was read.

    Raises:
        ConfigError: if ``block_tokens`` is less than 1.
    """

    def __init__(
        self,
        name: str,
        requests: Iterable[tuple[float, int, Iterable[Hashable]]],
        block_tokens: int = 512,
        skipped: int = 0,
    ) -> None:
        self.name, self.block_tokens, self.skipped = name, block_tokens, skipped
        numbers: dict[Hashable, int] = {}
        self._blocks: list[int] = []
        self._lengths: list[int] = []
        self._tokens: list[int] = []
        self._seconds: list[float] = []
        for seconds, tokens, ids in requests:
            before = len(self._blocks)
            self._blocks += [numbers.setdefault(block, len(numbers)) for block in ids]
            self._lengths.append(len(self._blocks) - before)
            self._tokens.append(tokens)
            self._seconds.append(seconds)
        self.unique = len(numbers)
        """Different blocks."""
        self._native = _kvtier.Trace(self._blocks, self._lengths, self._tokens, self._seconds, block_tokens)

    def __len__(self) -> int:
        """Requests."""
        return len(self._lengths)

    @property
    def references(self) -> int:
        """Blocks of all requests."""
        return len(self._blocks)

    @property
    def tokens(self) -> Sequence[int]:
        """Tokens of each request's prompt."""
        return self._tokens

    def part(self, begin: Decimal | float, end: Decimal | float) -> Trace:
        """The requests between two shares of the trace, as a trace of its own: ``part(0.5, 1)`` is the second half.

        Raises:
            ConfigError: unless ``0 <= begin < end <= 1``.
        """
        if not 0 <= begin < end <= 1:
            raise ConfigError(f"a part from {begin} to {end} was given; 0 <= from < to <= 1 is needed")
        first, last = int(begin * len(self)), int(end * len(self))
        return Trace(self.name, islice(self.requests(), first, last), self.block_tokens)

    def requests(self) -> Iterator[tuple[float, int, Sequence[int]]]:
        """What it was made of, but for the ids: the blocks are numbered in the order in which they first came."""
        at = 0
        for seconds, tokens, length in zip(self._seconds, self._tokens, self._lengths, strict=True):
            yield seconds, tokens, self._blocks[at : at + length]
            at += length

    def capacity(self, share: Decimal) -> int:
        """Blocks of a tier: this share of the different blocks, rounded down; what is more than 1 is a count itself.

        Raises:
            ConfigError: if it is not more than 0, or a count that is not whole.
        """
        if not share.is_finite() or share <= 0 or (share > 1 and share != int(share)):
            raise ConfigError(
                f"capacity {share} was given; allowed are a share of the unique blocks up to 1, or blocks"
            )
        return int(share if share > 1 else share * self.unique)

    def replay(
        self,
        policy: str,
        capacity: int | Sequence[int],
        touch: str = "rev",
        report: Callable[[int], None] | None = None,
        *,
        write_budget: float | None = None,
    ) -> Outcome:
        """Replay it against one policy in one tier, or in several. Blocks until it is done; holds the interpreter only to report.

        Args:
            policy: one of :data:`POLICIES`, or ``importance:SLOPE``.
            capacity: blocks that the tier holds; or of several tiers, the fastest first: what leaves one is offered to the
                next, and a hit brings a block up. ``min`` sees them as one.
            touch: ``"rev"``: a request uses its chain from the tail to the head, as the store does; ``"fwd"``: from the
                head to the tail. Under chain order what is new always arrives from the head.
            write_budget: blocks a day that may be written to the last of several tiers. Default no limit.
            report: told every tenth of a second how many references are done.

        Raises:
            ConfigError: for an unknown policy or touch.
        """
        check_policy("policy", policy, OFFLINE)
        if touch not in ("fwd", "rev"):
            raise ConfigError(f"touch {touch!r} was given; allowed are fwd and rev")
        capacities = [capacity] if isinstance(capacity, int) else list(capacity)
        if not capacities or min(capacities) < 1:
            raise ConfigError(f"capacity {capacity!r} was given; at least one tier of at least 1 block is needed")
        counter, done = _kvtier.Counter(), threading.Event()

        def tell() -> None:
            while report and not done.wait(0.1):
                report(counter.value)

        teller = threading.Thread(target=tell, daemon=True)
        teller.start()
        started = time.perf_counter()
        try:
            counted = self._native.replay(policy, capacities, touch == "rev", counter, write_budget)
        finally:
            seconds = time.perf_counter() - started
            done.set()
            teller.join()
        return Outcome(**counted, seconds=seconds)
