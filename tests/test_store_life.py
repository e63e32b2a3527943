"""A store from its opening to its close: namespaces, settings, statistics, and what is refused when."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

import kvtier
from blocks import KIB, MIB, fill, key, keys, payload, slow_store, verbs_of
from kvtier import (
    ClosedError,
    ConfigError,
    Cxl,
    Dram,
    FullError,
    Identity,
    InvalidBlockError,
    KVLayout,
    Nvme,
    StorageError,
    Store,
    machine,
)
from kvtier.config import Policy

LAYOUT = KVLayout(4, "gqa", kv_heads=2, head_dim=16, dtype="fp16", block_tokens=8)
BLOCK = LAYOUT.block_bytes


def test_namespaces_do_not_share(store: Store) -> None:
    first = store.namespace(b"model", LAYOUT)
    again = store.namespace(b"model", LAYOUT)
    others = [
        store,
        store.namespace(b"another", LAYOUT),
        store.namespace(b"model"),
        store.namespace(Identity(b"model"), LAYOUT),
        store.namespace(b"model", KVLayout(4, "gqa", kv_heads=2, head_dim=16, dtype="fp16", block_tokens=16)),
    ]
    first.put(key("a"), bytes(BLOCK))
    assert again.contains([key("a")]) == [True]
    assert again.digest == first.digest
    assert [other.contains([key("a")]) for other in others] == [[False]] * 5
    assert len({other.digest for other in [first, *others]}) == 6


def test_what_is_no_namespace_is_refused(store: Store) -> None:
    for bad in (b"", "model", None):
        with pytest.raises(ConfigError, match="as the identity; allowed are an Identity, such as"):
            store.namespace(bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a str was given as the layout; allowed is a KVLayout"):
        store.namespace(b"model", "fp16")  # type: ignore[arg-type]


def test_a_plain_store_takes_a_quarter_of_what_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.config.usable_memory", lambda: 64 * MIB)
    with Store() as store:
        assert store.config.tiers == (Dram("16MiB"),)
        assert store.stats()["tiers"]["dram"]["size_bytes"] == 16 * MIB
        assert store.prefaulted(timeout=30)
    monkeypatch.undo()
    assert kvtier.StoreConfig().tiers[0].size_bytes <= machine.usable_memory() // 4 + MIB


def test_prefault_reports_its_progress() -> None:
    seen: list[tuple[int, int]] = []
    with Store(Dram("64MiB")) as store:
        assert store.prefaulted(lambda done, total: seen.append((done, total)))
        assert store.stats()["tiers"]["dram"]["prefaulted_bytes"] > 60 * MIB
    assert seen[-1] == (64 * MIB, 64 * MIB)
    assert seen == sorted(seen)
    with Store(Dram("16MiB", prefault=False)) as store:
        assert store.prefaulted(timeout=0)


def test_from_toml(tmp_path: Path) -> None:
    (tmp_path / "store.toml").write_text(
        '[store]\npolicy = "s3-fifo"\n[[tier]]\nkind = "dram"\nsize = "16MiB"\n'
        '[[tier]]\nkind = "nvme"\nsize = "32MiB"\npath = "kv"\nengine = "threads"\n'
    )
    with Store.from_toml(tmp_path / "store.toml") as store:
        fill(store, 2)
        assert store.stats()["engine"] == "threads"
        assert store.config.policy == "s3-fifo"
    with Store.from_toml(tmp_path / "store.toml") as store:
        assert store.contains(keys(2, "fill")) == [True, True]
    assert (tmp_path / "kv").is_dir()


@pytest.mark.parametrize("policy", get_args(Policy))
def test_every_policy_evicts(policy: Any) -> None:
    with Store(Dram("16MiB"), policy=policy) as store:
        names = fill(store, 40)
        assert 0 < sum(store.contains(names)) < 16
        assert store.stats()["tiers"]["dram"]["evictions"] >= 24


def test_three_tiers(tmp_path: Path) -> None:
    with Store(Dram("4MiB"), Cxl("4MiB", path=tmp_path / "memory"), Nvme(tmp_path / "kv", "32MiB")) as store:
        names = fill(store, 8, 256 * KIB)
        assert all(store.get(name).tobytes() == payload(name, 256 * KIB) for name in names)  # type: ignore[union-attr]
        assert list(store.stats()["tiers"]) == ["dram", "cxl", "nvme"]


def test_a_write_budget_is_kept(tmp_path: Path) -> None:
    # An hour's share is what may be saved up: 24 MiB a day are one MiB.
    store = Store(Dram("16MiB"), Nvme(tmp_path, "64MiB"), write_budget="24MiB")
    names = fill(store, 8, 256 * KIB)
    with pytest.raises(FullError, match="stay in memory only: the write budget is spent"):
        store.flush()
    store.close()
    with Store(Dram("16MiB"), Nvme(tmp_path, "64MiB")) as store:
        assert 1 <= sum(store.contains(names)) <= 4


def test_what_the_machine_refuses(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises((StorageError, ConfigError)):
        Store(Dram("16MiB"), Nvme(tmp_path / "file" / "kv", "32MiB"))
    with pytest.raises((StorageError, ConfigError)):
        Store(Dram("16MiB"), Cxl("16MiB", numa_node=4000))


@pytest.mark.parametrize("bad", [-1, -0.001, float("nan")])
def test_a_timeout_is_a_time(store: Store, bad: float) -> None:
    name = key("a")
    calls: list[Callable[[], Any]] = [
        lambda: store.put(name, b"a", timeout=bad),
        lambda: store.put_many([name], [b"a"], timeout=bad),
        lambda: store.get_into([name], [bytearray(1)], timeout=bad),
        lambda: store.lease([name], timeout=bad),
        lambda: store.pin([name], timeout=bad),
        lambda: store.prefetch([name], deadline=bad),
        lambda: store.prefetch([]).wait(bad),
        lambda: store.flush(bad),
        lambda: store.prefaulted(timeout=bad),
        lambda: store.close(bad),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="seconds from 0 on"):
            call()
    assert store.contains([name]) == [False]
    assert store.put(name, b"a", timeout=float("inf")).stored


@pytest.mark.parametrize("bad", [b"", b"short" * 3, bytes(65)])
def test_a_key_of_a_wrong_length_is_refused(store: Store, bad: bytes) -> None:
    good = key("a")
    calls: list[Callable[[], Any]] = [
        lambda: store.put(bad, b"a"),
        lambda: store.put(good, b"a", parent=bad),
        lambda: store.put_many([good, bad], [b"a", b"a"]),
        lambda: store.contains([bad]),
        lambda: store.match([bad]),
        lambda: store.get(bad),
        lambda: store.get_into([bad], [bytearray(1)]),
        lambda: store.lease([bad]),
        lambda: store.pin([bad]),
        lambda: store.unpin([bad]),
        lambda: store.remove([bad]),
        lambda: store.prefetch([bad]),
        lambda: store.set_importance([bad], [1]),
    ]
    for call in calls:
        with pytest.raises(InvalidBlockError, match="a key has 16 to 64 bytes"):
            call()
    assert store.stats()["blocks"] == 0


def test_a_bad_argument_changes_nothing(store: Store) -> None:
    names = keys(2)
    with pytest.raises(InvalidBlockError):
        store.put(names[0], b"a", replaces=b"short")
    with pytest.raises(InvalidBlockError):
        store.put_many(names, [b"a", b"b"], parents=[None, b"short"])
    with pytest.raises(InvalidBlockError):
        store.put_many(names, [b"a", b"b"], importance=[1, -1])
    with pytest.raises(InvalidBlockError):
        store.put_many(names, [b"a", b""])
    with pytest.raises(InvalidBlockError):
        store.put_many(names, [b"a", [1, 2]])
    for count in ({"parents": [None]}, {"importance": [1.0]}):
        with pytest.raises(InvalidBlockError, match="one a key is needed"):
            store.put_many(names, [b"a", b"b"], **count)  # type: ignore[arg-type]
    with pytest.raises(InvalidBlockError, match="1 blocks were given for 2 keys"):
        store.put_many(names, [b"a"])
    assert store.contains(names) == [False, False]


def test_a_key_must_be_bytes(store: Store) -> None:
    for bad in ("text" * 8, 3, None):
        with pytest.raises(InvalidBlockError, match="was given as a key"):
            store.put(bad, b"a")  # type: ignore[arg-type]
    with pytest.raises(InvalidBlockError, match="a list of keys"):
        store.contains(key("not in a list"))  # type: ignore[arg-type]


def test_a_closed_store(tiers: tuple[Dram, Nvme]) -> None:
    name = key("a")
    with Store(*tiers) as store:
        store.put(name, b"a")
        cache = store.namespace(b"model", LAYOUT)
        job = store.prefetch([name])
        job.result()
    calls = [*verbs_of(store), cache.clear, lambda: cache.put(name, bytes(BLOCK)), store.stats, cache.stats]
    calls += [lambda: store.namespace(b"model", LAYOUT), lambda: cache.beside("other"), lambda: store.emulated]
    for call in calls:
        with pytest.raises(ClosedError, match="the store is closed"):
            call()
    store.close()
    store.close(timeout=0)
    assert job.result()[0].hit
    assert len(cache.chain(range(16))) == 2


def test_close_ends_a_prefetch(tiers: tuple[Dram, Nvme]) -> None:
    store, names = slow_store(*tiers, count=4)
    job = store.prefetch(names)
    store.close()
    assert job.wait(0)
    assert {r.reason for r in job.result()} <= {None, "cancelled"}


def test_a_store_that_nobody_closed_is_closed(tiers: tuple[Dram, Nvme]) -> None:
    store = Store(*tiers)
    names = fill(store, 2)
    gone = weakref.ref(store)
    del store
    assert gone() is None
    with Store(*tiers) as store:
        assert all(store.contains(names))


def test_an_error_in_the_with_statement_closes_too(tiers: tuple[Dram, Nvme]) -> None:
    def fail() -> None:
        with Store(*tiers) as store:
            fill(store, 1)
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail()
    with Store(*tiers) as store:
        assert store.contains(keys(1, "fill")) == [True]


def test_the_statistics_add_up(tiers: tuple[Dram, Nvme]) -> None:
    with Store(*tiers) as store:
        names = fill(store, 4)
        store.flush()
        for name in names:
            store.get(name)
        stats = store.stats()
        dram, nvme = stats["tiers"]["dram"], stats["tiers"]["nvme"]
        assert (stats["blocks"], stats["puts"], stats["put_bytes"]) == (4, 4, 4 * MIB)
        assert (dram["hits"], dram["hit_bytes"]) == (4, 4 * MIB)
        assert dram["used_bytes"] == nvme["used_bytes"] == 4 * MIB
        assert nvme["writes"] >= 4
        assert stats["put"]["count"] == dram["get"]["count"] == 4
        assert 0 < stats["put"]["mean_s"] < 30
        assert stats["engine"] in ("io_uring", "threads")
