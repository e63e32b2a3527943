"""Keys and bytes for tests: what a block should hold follows from its number."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier import Dram, Namespace, Nvme, Store

KIB = 1 << 10
MIB = 1 << 20


def key(*what: object) -> bytes:
    """A 32-byte key."""
    return hashlib.blake2b(repr(what).encode(), digest_size=32).digest()


def keys(count: int, *what: object) -> list[bytes]:
    return [key(*what, i) for i in range(count)]


def payload(of: bytes, size: int, version: int = 0) -> bytes:
    """The bytes of the block with this key."""
    seed = int.from_bytes(of[:8], "little") + version
    return np.random.Generator(np.random.PCG64(seed)).bytes(size)


def fill(store: Namespace, count: int, size: int = MIB, *what: object) -> list[bytes]:
    """Puts so many blocks, and returns their keys."""
    names = keys(count, "fill", *what)
    for name in names:
        assert store.put(name, payload(name, size)).stored
    return names


def slow_store(dram: Dram, nvme: Nvme, count: int) -> tuple[Store, list[bytes]]:
    """A store of so many blocks of 64 KiB that lie on a disk which is busy for the next second."""
    names = keys(count + 1, "slow")
    with Store(dram, nvme) as store:
        for i, name in enumerate(names):
            assert store.put(name, payload(name, 64 * KIB if i < count else MIB)).stored
    store = Store(dram, Nvme(nvme.path, nvme.size, emulate_gbs=0.001))
    assert store.prefetch(names[count:]).result()[0].hit
    return store, names[:count]


def verbs_of(store: Store) -> list[Callable[[], Any]]:
    """A call of each verb that a store refuses once it is closed; its figures can still be read then."""
    name = key("a")
    return [
        lambda: store.put(name, b"a"),
        lambda: store.put_many([name], [b"a"]),
        lambda: store.contains([name]),
        lambda: store.match([name]),
        lambda: store.get(name),
        lambda: store.get_into([name], [bytearray(1)]),
        lambda: store.lease([name]),
        lambda: store.pin([name]),
        lambda: store.unpin([name]),
        lambda: store.remove([name]),
        lambda: store.prefetch([name]),
        lambda: store.set_importance([name], [1]),
        lambda: store.clear(),
        lambda: store.flush(),
        lambda: store.prefaulted(),
        lambda: store.register_region(bytearray(4096)),
        lambda: asyncio.run(store.aget(name)),
        lambda: asyncio.run(store.aput(name, b"a")),
        lambda: asyncio.run(store.alease([name])),
        lambda: asyncio.run(store.aflush()),
    ]


def host(array: Any) -> NDArray[Any]:
    """A device's array as the host has it."""
    return np.asarray(array.get() if hasattr(array, "get") else array)
