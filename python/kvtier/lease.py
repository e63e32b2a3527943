"""Leases: blocks that stay where they are, read without a copy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from kvtier import _kvtier
from kvtier.errors import ConfigError
from kvtier.tiers.hbm import Placed

__all__ = ["Lease"]


class Lease:
    """Blocks that stay where they are, with their bytes, until this and everything made from it is gone.

    A block ends its stay with the last export (memoryview, array, DLPack tensor), from any thread, also after the store
    was closed. The views are read-only; a torch tensor made from one through DLPack is writable all the same, and what is
    scribbled there makes the block a miss later, never a wrong hit.

    Attributes:
        blocks: one producer a key of the buffer protocol and of DLPack (``uint8``, 1-D, on the CPU), ``None`` for a
            miss. Of a lease in HBM: one array of the device, ``uint8[bytes]``.
        views: the same as memoryviews; of a lease in HBM, the arrays.
        reasons: why each key is a miss; ``None`` for a hit.
    """

    def __init__(self, native: _kvtier.Lease | Placed) -> None:
        self._native = native
        self.blocks: list[Any | None] = native.blocks()
        self.views: list[Any | None] = [memoryview(b) if isinstance(b, _kvtier.BlockView) else b for b in self.blocks]
        self.reasons: Sequence[str | None] = native.reasons

    def __len__(self) -> int:
        return len(self.reasons)

    def release(self, *, after: Any = None) -> None:
        """Let go of the blocks; exports that were taken out keep theirs. Releasing twice is allowed.

        Args:
            after: hold them until this has completed, which in HBM is the only way to know that no kernel still reads them: an event or stream with ``synchronize()`` (CUDA, CuPy), something
                with ``wait()``, or a callable that returns when the copy is done. It is waited for on a thread of its
                own. Default: at once.

        Does not block.

        Raises:
            ConfigError: for an ``after`` that cannot be waited for; nothing is released.
        """
        wait: Callable[[], object] | None = None
        if after is not None:
            wait = getattr(after, "synchronize", None) or getattr(after, "wait", None) or after
            if not callable(wait):
                raise ConfigError(
                    f"after={after!r} was given; it needs synchronize() or wait(), or must be callable: pass the event "
                    "that the copy records"
                )
        held = self.blocks, self.views, self._native
        self.blocks, self.views = [], []
        if wait is None:
            self._native.release()
            return

        def hold(blocks: object = held) -> None:
            try:
                wait()
            finally:
                self._native.release()
                del blocks

        threading.Thread(target=hold, name="kvtier-release", daemon=True).start()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
