"""A prefetch under way."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from kvtier import _kvtier, aio
from kvtier.errors import DeadlineError
from kvtier.results import Result, results

__all__ = ["Job"]


class Job:
    """A running prefetch. It can be waited for, awaited, cancelled and asked for its results, from any thread."""

    def __init__(self, native: _kvtier.Job) -> None:
        self._native = native

    def wait(self, timeout: float | None = None) -> bool:
        """Block until done or for ``timeout`` seconds (default 30); whether it is done."""
        return self._native.wait(timeout)

    def done(self) -> bool:
        """Whether every key has a result. Does not block."""
        return self._native.done()

    def cancel(self) -> None:
        """Give up: keys without a result become misses with the reason ``"cancelled"``. What is in flight lands for
        others to find. Does not block; cancelling twice, or after the end, does nothing.
        """
        self._native.cancel()

    def result(self, timeout: float | None = None) -> list[Result]:
        """One result a key. Blocks until done, at most ``timeout`` seconds (default 30).

        Raises:
            DeadlineError: it was not done in time; it goes on.
        """
        if not self._native.wait(timeout):
            raise DeadlineError("the prefetch was not done in time; it goes on: wait again, or cancel() it")
        codes = self._native.results()
        assert codes is not None
        return results(codes)

    def __await__(self) -> Generator[Any, None, list[Result]]:
        yield from aio.announced(self._native.notify).__await__()
        return self.result(0)
