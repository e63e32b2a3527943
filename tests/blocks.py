"""Keys and bytes for tests: what a block should hold follows from its number."""

from __future__ import annotations

import hashlib

import numpy as np

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
