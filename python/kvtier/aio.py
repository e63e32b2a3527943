"""Asynchronous verbs: no thread a call, and buffers that outlive a cancelled await.

Each event loop watches one eventfd. The extension posts the token of every operation that has finished; the operation
keeps the caller's memory until then, whatever became of the await, the future or the loop.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Callable
from typing import Any

from kvtier import _kvtier

__all__ = ["announced", "operation", "sweep"]

_tokens = itertools.count()


class _Inbox:
    """What one event loop waits for."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.completions = _kvtier.Completions()
        self.pending: dict[int, tuple[asyncio.Future[None], _kvtier.Operation | None]] = {}
        loop.add_reader(self.completions.fileno(), self.deliver)

    def deliver(self) -> None:
        for token in self.completions.drain():
            future, running = self.pending.pop(token, (None, None))
            if future is not None and not future.done() and not future.get_loop().is_closed():
                future.set_result(None)
            elif running is not None:
                running.discard()  # nobody waits, but a traceback may well hold on to it


_inboxes: dict[asyncio.AbstractEventLoop, _Inbox] = {}
_abandoned: list[object] = []
_lock = threading.Lock()


def _forget() -> None:
    """In a fork: the parent's loops, operations and eventfds are not ours to touch, and its lock may be held."""
    global _inboxes, _lock
    _abandoned.append(_inboxes)
    _inboxes, _lock = {}, threading.Lock()


os.register_at_fork(after_in_child=_forget)


def _inbox() -> _Inbox:
    loop = asyncio.get_running_loop()
    inbox = _inboxes.get(loop)
    if inbox is None:
        sweep()
        inbox = _Inbox(loop)
        with _lock:
            _inboxes[loop] = inbox
    return inbox


def sweep() -> None:
    """Let go of loops that were closed, with the memory of their operations, once those have finished."""
    with _lock:
        closed = [(loop, inbox) for loop, inbox in _inboxes.items() if loop.is_closed()]
        for loop, inbox in closed:
            inbox.deliver()
            if not inbox.pending:
                del _inboxes[loop]


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
