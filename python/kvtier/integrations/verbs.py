"""The verbs of a namespace that an integration needs, as protocols: `kvtier.Namespace` has them, and so does the
reference.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier.layout import KVLayout
from kvtier.tiers.backend import DeviceBackend

__all__ = ["BlockNamespace", "MatchLike", "PutResultLike", "ResultLike", "Transfer"]


class MatchLike(Protocol):
    """How long a prefix of the keys is resident, and where."""

    @property
    def blocks(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def tiers(self) -> Sequence[str]: ...
    @property
    def bytes(self) -> Mapping[str, int]: ...


class PutResultLike(Protocol):
    """What became of one block that was put."""

    @property
    def stored(self) -> bool: ...
    @property
    def present(self) -> bool: ...


class ResultLike(Protocol):
    """What became of one block that was read."""

    @property
    def hit(self) -> bool: ...
    @property
    def tier(self) -> str | None: ...
    @property
    def reason(self) -> str | None: ...


class Transfer(Protocol):
    """A running prefetch."""

    def cancel(self) -> object: ...


class BlockNamespace(Protocol):
    """A namespace, as far as an integration uses it; see :class:`kvtier.Namespace` for what each verb does."""

    @property
    def layout(self) -> KVLayout: ...

    @property
    def emulated(self) -> Collection[str]: ...

    @property
    def device(self) -> DeviceBackend | None: ...

    def chain(self, token_ids: Sequence[int], extras: None = None) -> list[bytes]: ...

    def beside(self, name: str) -> BlockNamespace: ...

    def match(self, keys: Sequence[bytes]) -> MatchLike: ...

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]: ...

    def set_importance(self, keys: Sequence[bytes], scores: Sequence[float]) -> Sequence[bool]: ...

    def prefetch(
        self, keys: Sequence[bytes], *, to: str = "dram", deadline: float | None = None, priority: int = 0
    ) -> Transfer: ...

    def get_into(
        self,
        keys: Sequence[bytes],
        outs: Sequence[Any],
        *,
        layers: tuple[int, int] | None = None,
        tokens: tuple[int, int] | NDArray[np.bool_] | None = None,
        timeout: float | None = None,
    ) -> Sequence[ResultLike]: ...

    def remove(self, keys: Sequence[bytes]) -> Sequence[bool]: ...

    def put_many(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[NDArray[np.uint8]],
        *,
        parents: Sequence[bytes | None] | None = None,
        timeout: float | None = None,
    ) -> Sequence[PutResultLike]: ...
