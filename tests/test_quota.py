"""Quotas of namespaces through the Python interface: amounts, guarantees, caps, priorities, times to live, accounts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocks import MIB, key
from kvtier import ConfigError, Cxl, Dram, FullError, Hbm, Namespace, Nvme, Quota, Store

BLOCK = 64 << 10
PAGE = 4096
MEMORY = 8 * MIB


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(Dram(MEMORY), policy="lru-leaf") as store:
        yield store


def fill(cache: Namespace, numbers: range) -> None:
    for n in numbers:
        assert cache.put(key(n), bytes([n % 256]) * BLOCK).stored


def held(cache: Namespace, tier: str = "dram") -> int:
    used: int = cache.stats()["tiers"][tier]["used_bytes"]
    return used


def there(cache: Namespace, numbers: range) -> int:
    return sum(cache.contains([key(n) for n in numbers]))


def test_an_amount_holds_in_every_tier_and_a_mapping_names_tiers(tmp_path: Path) -> None:
    tiers = [Dram("8MiB"), Cxl("4MiB", numa_node=0), Nvme(tmp_path, "16MiB")]
    assert Quota(0.25, "3MiB").of(tiers) == ([2 * MIB, MIB, 4 * MIB], [3 * MIB] * 3)
    assert Quota({"dram": "1MiB", "nvme": 0.5}, {"cxl": 8192}).of(tiers) == ([MIB, 0, 8 * MIB], [None, 8192, None])
    assert Quota().of(tiers) == ([0, 0, 0], [None] * 3)
    assert Quota(0.5, {"hbm": MIB}).of([Hbm("2MiB"), *tiers[:1]]) == ([MIB, 4 * MIB], [MIB, None])
    with pytest.raises(ConfigError, match="names nvme; the tiers of this store are dram"):
        Quota({"nvme": 0.5}).of(tiers[:1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"guaranteed": 0.0}, "not a share"),
        ({"cap": 1.5}, "not a share"),
        ({"cap": float("nan")}, "not a share"),
        ({"cap": "4 parsecs"}, "not a size"),
        ({"cap": True}, "not a size"),
        (
            {"guaranteed": {"dram": 100}},
            "guaranteed=100 is too small; allowed are 4096 bytes .* A share of a tier is a float",
        ),
        ({"priority": 1.0}, "not a priority"),
        ({"priority": True}, "not a priority"),
        ({"ttl": 0}, "seconds from 1/64"),
        ({"ttl": "1h"}, "seconds from 1/64"),
    ],
)
def test_what_is_no_quota_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Quota(**arguments)


def test_guarantees_above_a_tier_are_refused_and_change_nothing(store: Store) -> None:
    store.namespace(b"a", quota=Quota(guaranteed=0.5))
    with pytest.raises(
        ConfigError,
        match=r"4 MiB .* to be guaranteed, and 4 MiB are to other namespaces; 7.2 MiB \(7549747 bytes\) can be in all",
    ):
        store.namespace(b"b", quota=Quota(guaranteed=0.5))
    with pytest.raises(ConfigError, match="a cap is at least that"):
        store.namespace(b"b", quota=Quota(guaranteed=0.25, cap=0.125))
    plain = store.namespace(b"b")
    assert plain.stats()["tiers"]["dram"] == {"blocks": 0, "used_bytes": 0, "guaranteed_bytes": 0, "cap_bytes": None}
    store.namespace(b"a", quota=Quota(guaranteed=0.25))
    store.namespace(b"b", quota=Quota(guaranteed=0.5))


def test_a_scan_leaves_what_is_guaranteed(store: Store) -> None:
    tenant, scan = store.namespace(b"tenant", quota=Quota(guaranteed="2MiB")), store.namespace(b"scan")
    fill(tenant, range(32))
    fill(scan, range(1000))
    assert there(tenant, range(32)) == 32
    assert scan.stats()["evicted"] >= 1000 - MEMORY // BLOCK
    assert tenant.stats()["evicted"] == 0
    # A namespace opened again without a quota keeps the one that it has.
    assert store.namespace(b"tenant").stats()["tiers"]["dram"]["guaranteed_bytes"] == 2 * MIB


def test_an_amount_alone_is_a_cap(store: Store) -> None:
    tenant = store.namespace(b"tenant", quota="1MiB")
    fill(tenant, range(100))
    assert held(tenant) == MIB
    assert there(tenant, range(84, 100)) == 16
    with pytest.raises(FullError, match="for its namespace"):
        tenant.put(key("large"), bytes(2 * MIB), timeout=0)


def test_lower_priorities_leave_first(store: Store) -> None:
    high = store.namespace(b"high", quota=Quota(priority=1))
    low = store.namespace(b"low", quota=Quota(priority=-1))
    fill(high, range(60))
    fill(low, range(60))
    fill(high, range(60, 100))
    assert there(high, range(100)) == 100
    assert there(low, range(60)) < 25


def test_a_block_older_than_its_time_to_live_is_a_miss(store: Store) -> None:
    brief = store.namespace(b"brief", quota=Quota(ttl=1 / 64))
    lasting = store.namespace(b"lasting", quota=Quota(ttl=86400))
    fill(brief, range(1))
    fill(lasting, range(1))
    deadline = time.monotonic() + 30
    while brief.contains([key(0)]) == [True]:
        assert time.monotonic() < deadline
    assert brief.get(key(0)) is None
    assert lasting.get(key(0)) is not None
    assert brief.stats() == {
        "hits": 0,
        "misses": 0,  # the size was asked for, and there was none
        "evicted": 0,
        "expired": 1,
        "tiers": {"dram": {"blocks": 0, "used_bytes": 0, "guaranteed_bytes": 0, "cap_bytes": None}},
    }


def test_accounts_are_kept_by_digest_and_outlast_a_restart(tmp_path: Path) -> None:
    tiers = Dram(MEMORY), Nvme(tmp_path, "32MiB")
    with Store(*tiers) as store:
        tenant = store.namespace(b"tenant", quota=Quota(cap={"nvme": "2MiB"}))
        fill(tenant, range(100))
        results = tenant.get_into([key(99), key("none")], [bytearray(BLOCK), bytearray(BLOCK)])
        assert [result.hit for result in results] == [True, False]
        stats = store.stats()
        assert list(stats["namespaces"]) == [tenant.digest.hex()[:16]]
        assert stats["namespaces"][tenant.digest.hex()[:16]] == tenant.stats()
        assert (tenant.stats()["hits"], tenant.stats()["misses"]) == (1, 1)
    with Store(*tiers) as store:
        (account,) = store.stats()["namespaces"].values()
        blocks = account["tiers"]["nvme"]["blocks"]
        assert account["tiers"]["nvme"]["used_bytes"] == blocks * BLOCK <= 2 * MIB
        assert there(store.namespace(b"tenant"), range(100)) == blocks


def test_what_lies_beside_a_namespace_counts_to_it(store: Store) -> None:
    tenant = store.namespace(b"tenant", quota=Quota(cap="1MiB"))
    beside = tenant.beside("notes")
    for n in range(300):
        assert beside.put(key(n), b"a few bytes").stored
    assert held(tenant) == held(beside) == MIB
    assert there(beside, range(300)) == MIB // PAGE
    fill(tenant, range(8))
    assert held(tenant) <= MIB
    assert there(tenant, range(8)) == 8
    assert list(store.stats()["namespaces"]) == [tenant.digest.hex()[:16]]
    assert beside.get(key(299)) is not None
    assert tenant.stats()["hits"] == 0, "it is no use of the namespace's blocks"


def test_hbm_has_quotas_as_the_others_have() -> None:
    with Store(Hbm("2MiB", backend="host"), Dram(MEMORY), policy="lru-leaf") as store:
        tenant = store.namespace(b"tenant", quota=Quota(guaranteed={"hbm": "1MiB"}))
        capped = store.namespace(b"capped", quota=Quota(cap={"hbm": 0.125}))
        scan = store.namespace(b"scan")
        for cache in (tenant, capped, scan):
            fill(cache, range(24))
            for n in range(24):
                assert cache.prefetch([key(n)], to="hbm").result()[0].hit
                assert held(capped, "hbm") <= MIB // 4
        assert [held(cache, "hbm") for cache in (tenant, capped)] == [MIB, MIB // 4]
        assert tenant.match([key(n) for n in range(8, 24)]).tiers == ["hbm"] * 16
        assert list(tenant.stats()["tiers"]) == ["hbm", "dram"]
        device: Any = store.device
        assert tenant.get_into([key(23)], [device.empty(BLOCK)])[0].tier == "hbm"
        assert tenant.stats()["hits"] == 1
        with pytest.raises(ConfigError, match="of the hbm tier were to be guaranteed"):
            store.namespace(b"scan", quota=Quota(guaranteed={"hbm": "1MiB"}))


SIZES = [PAGE, 3 * PAGE, 16 * PAGE]
CAP, GUARANTEED = MIB, {0: 2 * MIB, 1: MIB // 2}
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "put", "lift", "lift", "get", "remove", "clear"]),
        st.integers(0, 2),
        st.integers(0, 300),
        st.integers(1, 60),
    ),
    max_size=60,
)


@settings(max_examples=25)
@given(steps=STEPS)
def test_no_sequence_breaks_a_guarantee_or_a_cap_and_accounts_are_exact(
    steps: list[tuple[str, int, int, int]],
) -> None:
    """Three namespaces: with a guarantee, with a guarantee and a cap, and without a quota; of DRAM and of HBM alike."""
    with Store(Hbm(MEMORY // 2, backend="host"), Dram(MEMORY, prefault=False)) as store:
        spaces = [
            store.namespace(b"0", quota=Quota(guaranteed=GUARANTEED[0])),
            store.namespace(b"1", quota=Quota(guaranteed=GUARANTEED[1], cap=CAP)),
            store.namespace(b"2"),
        ]
        put: list[dict[int, int]] = [{}, {}, {}]
        for verb, number, first, count in steps:
            cache, before = spaces[number], [held(space) for space in spaces]
            match verb:
                case "put":
                    for n in range(first, first + count):
                        size = SIZES[n % 3]
                        assert cache.put(key(n), bytes(size)).reason is None
                        put[number][n] = size
                        assert held(spaces[1]) <= CAP
                case "lift":
                    names = [key(n) for n in range(first, first + count)]
                    above = [held(space, "hbm") for space in spaces]
                    cache.prefetch(names, to="hbm").wait()
                    assert held(spaces[1], "hbm") <= CAP
                    for other, guaranteed in GUARANTEED.items():
                        assert other == number or held(spaces[other], "hbm") >= min(above[other], guaranteed)
                case "get":
                    cache.get(key(first))
                case "remove":
                    cache.remove([key(first)])
                    put[number].pop(first, None)
                case _:
                    cache.clear()
                    put[number].clear()
            for other, guaranteed in GUARANTEED.items():
                assert other == number or held(spaces[other]) >= min(before[other], guaranteed)
            total = 0
            for space, blocks in zip(spaces, put, strict=True):
                found = space.contains([key(n) for n in blocks])
                sizes = [size for size, here in zip(blocks.values(), found, strict=True) if here]
                tier = space.stats()["tiers"]["dram"]
                assert (tier["blocks"], tier["used_bytes"]) == (len(sizes), sum(sizes))
                total += sum(sizes)
            tiers = store.stats()["tiers"]
            assert tiers["dram"]["used_bytes"] == total
            assert tiers["hbm"]["used_bytes"] == sum(held(space, "hbm") for space in spaces)
