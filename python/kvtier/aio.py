"""Asynchronous verbs: no thread a call, and buffers that outlive a cancelled await.

Each event loop watches one eventfd. The extension posts the token of every operation that has finished; the operation
keeps the caller's memory until then, whatever became of the await, the future or the loop.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from typing import Any

from kvtier import _kvtier

__all__ = ["announced", "operation"]

_tokens = itertools.count()


class _Inbox:
    """What one event loop waits for."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.completions = _kvtier.Completions()
        self.pending: dict[int, tuple[asyncio.Future[None], object]] = {}
        loop.add_reader(self.completions.fileno(), self.deliver)

    def deliver(self) -> None:
        for token in self.completions.drain():
            future, _ = self.pending.pop(token, (None, None))
            if future is not None and not future.done() and not future.get_loop().is_closed():
                future.set_result(None)


_inboxes: dict[asyncio.AbstractEventLoop, _Inbox] = {}
_lock = threading.Lock()


def _inbox() -> _Inbox:
    loop = asyncio.get_running_loop()
    with _lock:
        inbox = _inboxes.get(loop)
        if inbox is None:
            # Loops that closed are let go of, with the memory of their operations, once those have finished.
            for closed in [other for other in _inboxes if other.is_closed()]:
                _inboxes[closed].deliver()
                if not _inboxes[closed].pending:
                    del _inboxes[closed]
            inbox = _inboxes[loop] = _Inbox(loop)
        return inbox


async def operation(start: Callable[[_kvtier.Completions, int], _kvtier.Operation]) -> Any:
    """Start an operation and wait for its result without blocking the loop.

    If the await is cancelled, or the loop closes, the operation goes on and keeps its memory until it has finished.

    Raises:
        KvtierError: what the operation raised.
    """
    inbox = _inbox()
    token = next(_tokens)
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    running = start(inbox.completions, token)
    inbox.pending[token] = (future, running)
    await future
    return running.result()


async def announced(notify: Callable[[_kvtier.Completions, int], None]) -> None:
    """Wait until ``notify``'s token is posted."""
    inbox = _inbox()
    token = next(_tokens)
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    inbox.pending[token] = (future, None)
    notify(inbox.completions, token)
    await future
