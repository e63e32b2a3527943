"""`kvtier.config` and `kvtier.machine`: tiers, options, the store's TOML, and the memory that a plain store takes."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import _kvtier, machine
from kvtier.config import Cxl, Dram, Nvme, Policy, StoreConfig, default_dram, parse_size
from kvtier.errors import ConfigError, KvtierError, UnsupportedError


@pytest.mark.parametrize(
    ("given_size", "expected"),
    [
        ("4GiB", 4 << 30),
        ("4 gib", 4 << 30),
        ("1.5GiB", 3 << 29),
        ("100GB", 100 * 10**9),
        ("2TiB", 2 << 40),
        ("1048576", 1 << 20),
        ("1048576B", 1 << 20),
        (1 << 20, 1 << 20),
    ],
)
def test_sizes(given_size: str | int, expected: int) -> None:
    assert parse_size(given_size) == expected


@pytest.mark.parametrize("bad", ["", "GiB", "4 GiBs", "-4GiB", "4,5GiB", "1e9", "4G", None, 4.0, True, "nan"])
def test_what_is_no_size_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match="allowed are whole bytes, or text with a unit"):
        parse_size(bad)


@pytest.mark.parametrize("small", [0, -1, 4096, "1023KiB"])
def test_a_tier_too_small_is_refused(small: int | str) -> None:
    with pytest.raises(ConfigError, match="is too small; allowed are 1 MiB to"):
        Dram(small)


def test_a_size_without_its_last_letter_says_which_two_it_may_be() -> None:
    for bad, good in (
        ("4G", '"4GiB" .* or "4GB"'),
        ("1.5 ti", '"1.5TiB" .* or "1.5TB"'),
        ("4 gigs", '"4GiB" .* or "4GB"'),
    ):
        with pytest.raises(ConfigError, match=good):
            Dram(bad)
    with pytest.raises(ConfigError, match="is too large"):
        Dram(1 << 63)


@given(st.integers(1 << 20, 1 << 50))
def test_a_size_in_bytes_is_taken_as_it_is(size: int) -> None:
    assert parse_size(size) == parse_size(str(size)) == parse_size(f"{size} B") == size


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dram("1GiB", huge_pages="big"), "transparent, hugetlb, off"),  # type: ignore[arg-type]
        (lambda: Dram("1GiB", prefault=1), "true and false"),  # type: ignore[arg-type]
        (lambda: Cxl("1GiB"), "either numa_node or path"),
        (lambda: Cxl("1GiB", numa_node=0, path="/dev/dax0.0"), "either numa_node or path"),
        (lambda: Cxl("1GiB", numa_node=-1), "numa_node=-1"),
        (lambda: Cxl("1GiB", numa_node=True), "numa_node=True"),
        (lambda: Nvme((), "1GiB"), "at least one path"),
        (lambda: Nvme("", "1GiB"), "not a path"),
        (lambda: Nvme(("a", "b", "a"), "1GiB"), "twice"),
        (lambda: Nvme("a", "1GiB", engine="aio"), "auto, io_uring, threads"),  # type: ignore[arg-type]
        (lambda: Nvme("a", "1GiB", emulate_gbs=0), "emulate_gbs=0"),
        (lambda: Nvme("a", "1GiB", emulate_gbs=float("inf")), "emulate_gbs=inf"),
        (lambda: StoreConfig((Dram("1GiB"), Dram("1GiB"))), "at most one of each"),
        (lambda: StoreConfig((Nvme("a", "1GiB"), Dram("1GiB"))), "in the order Hbm, Dram, Cxl, Nvme"),
        (lambda: StoreConfig(("4GiB",)), "not a tier"),  # type: ignore[arg-type]
        (lambda: StoreConfig(policy="mru"), "auto, .*, lru, .*, gdsf-leaf"),
        (lambda: StoreConfig(policy="importance:-1"), "importance:SLOPE with a number of at least 0"),
        (lambda: StoreConfig(policy="importance:"), "policy='importance:'"),
        (lambda: StoreConfig(policy="lru:1"), "policy='lru:1'"),
        (lambda: StoreConfig(verify="yes"), "verify='yes'"),  # type: ignore[arg-type]
        (lambda: StoreConfig(watermarks=(0.8, 0.9)), "out of order"),
        (lambda: StoreConfig(watermarks=(1.1, 0.9)), "out of order"),
        (lambda: StoreConfig(watermarks=(0.9,)), "not a pair"),  # type: ignore[arg-type]
    ],
)
def test_bad_values_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_policies_of_the_type_are_those_of_the_core() -> None:
    assert list(get_args(Policy)) == _kvtier.POLICIES


def test_paths_of_every_kind() -> None:
    assert Nvme("a", "1GiB").paths == (Path("a"),)
    assert Nvme(Path("a"), "1GiB").paths == (Path("a"),)
    assert Nvme(("a", Path("b")), "1GiB").paths == (Path("a"), Path("b"))
    assert Nvme(["a"], "1GiB").paths == (Path("a"),)  # type: ignore[arg-type]


def test_tiers_are_equal_by_what_they_mean() -> None:
    assert Dram("1GiB") == Dram(1 << 30)
    assert Nvme("a", "1GiB") == Nvme((Path("a"),), 1 << 30) != Nvme("b", "1GiB")
    assert Cxl("1GiB", path="a") == Cxl("1GiB", path=Path("a")) != Cxl("1GiB", numa_node=0)


def test_a_config_without_tiers_takes_memory() -> None:
    (tier,) = StoreConfig().tiers
    assert isinstance(tier, Dram)
    assert tier.size_bytes <= 8 << 30


def write(folder: Path, text: str) -> Path:
    path = folder / "store.toml"
    path.write_text(text)
    return path


def test_a_whole_toml(tmp_path: Path) -> None:
    config = StoreConfig.from_toml(
        write(
            tmp_path,
            """
            [store]
            policy = "s3-fifo-leaf"
            verify = false
            watermarks = [0.9, 0.8]

            [[tier]]
            kind = "dram"
            size = "4GiB"
            huge_pages = "hugetlb"

            [[tier]]
            kind = "cxl"
            size = "16GiB"
            numa_node = 1

            [[tier]]
            kind = "nvme"
            size = "100GiB"
            paths = ["one", "/two"]
            engine = "threads"
            emulate_gbs = 2.5
            """,
        )
    )
    assert config == StoreConfig(
        (
            Dram("4GiB", huge_pages="hugetlb"),
            Cxl("16GiB", numa_node=1),
            Nvme((tmp_path / "one", Path("/two")), "100GiB", engine="threads", emulate_gbs=2.5),
        ),
        policy="s3-fifo-leaf",
        verify=False,
        watermarks=(0.9, 0.8),
    )


def test_an_empty_toml_is_a_plain_store(tmp_path: Path) -> None:
    config = StoreConfig.from_toml(write(tmp_path, ""))
    assert [type(tier) for tier in config.tiers] == [Dram]
    assert (config.policy, config.verify, config.watermarks) == ("auto", True, (0.98, 0.95))


@pytest.mark.parametrize("key", ["path", "device"])
def test_a_single_path(tmp_path: Path, key: str) -> None:
    text = f'[[tier]]\nkind = "nvme"\nsize = "1GiB"\n{key} = "/drive"'
    assert StoreConfig.from_toml(write(tmp_path, text)).tiers == (Nvme("/drive", "1GiB"),)
    text = f'[[tier]]\nkind = "cxl"\nsize = "1GiB"\n{key} = "/dev/dax0.0"'
    assert StoreConfig.from_toml(write(tmp_path, text)).tiers == (Cxl("1GiB", path="/dev/dax0.0"),)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("[store", ConfigError, "not TOML"),
        ("[cache]", ConfigError, "unknown key cache; allowed are store, tier"),
        ("store = 3", ConfigError, r"write \[store\]"),
        ("[tier]\nkind = 'dram'", ConfigError, r"write \[\[tier\]\]"),
        ("[store]\npolcy = 'lru'", ConfigError, "unknown key polcy; allowed are policy, verify, watermarks"),
        ("[store]\npolicy = 'mru'", ConfigError, "policy='mru'"),
        ("[store]\nwatermarks = 0.9", ConfigError, "not a pair"),
        ("[[tier]]\nsize = '1GiB'", ConfigError, "kind = None; allowed are hbm, dram, cxl, nvme"),
        ("[[tier]]\nkind = 'tape'\nsize = '1GiB'", ConfigError, "kind = 'tape'"),
        ("[[tier]]\nkind = ['dram']\nsize = '1GiB'", ConfigError, "allowed are hbm"),
        ("[[tier]]\nkind = 'hbm'\nsize = '1GiB'\npath = 'a'", ConfigError, "unknown key path"),
        ("[[tier]]\nkind = 'dram'\nsize = '1GiB'\ncodec = 'zstd'", UnsupportedError, "codec = 'zstd'"),
        ("[[tier]]\nkind = 'nvme'\nsize = '1GiB'\npath = 'a'\ncodec = 'int8'", ConfigError, "codec='int8'"),
        ("[[tier]]\nkind = 'dram'\nsize = '1GiB'\nnuma_node = 0", ConfigError, "unknown key numa_node"),
        ("[[tier]]\nkind = 'dram'\nsize = '1GiB'\nnuma_node = 1", ConfigError, "unknown key numa_node"),
        ("[[tier]]\nkind = 'dram'", ConfigError, "has no size"),
        ("[[tier]]\nkind = 'nvme'\nsize = '1GiB'", ConfigError, "at least one path"),
        ("[[tier]]\nkind = 'nvme'\nsize = '1GiB'\npath = 'a'\npaths = ['b']", ConfigError, "path and paths"),
        ("[[tier]]\nkind = 'nvme'\nsize = '1GiB'\npaths = [3]", ConfigError, "path=3"),
        ("[[tier]]\nkind = 'nvme'\nsize = 'big'\npath = 'a'", ConfigError, "size='big'"),
        ("[[tier]]\nkind = 'cxl'\nsize = '1GiB'", ConfigError, "either numa_node or path"),
    ],
)
def test_bad_toml_is_refused_with_its_path(tmp_path: Path, text: str, error: type[KvtierError], message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(error, match=message) as caught:
        StoreConfig.from_toml(path)
    assert str(path) in str(caught.value)


def test_a_toml_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        StoreConfig.from_toml(tmp_path / "none.toml")


def host(root: Path, files: dict[str, str]) -> Path:
    for name, text in ({"proc/meminfo": "MemTotal: 65536000 kB\nMemAvailable:   32768000 kB\n"} | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


GIB = 1 << 30


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 32768000 * 1024),
        ({"proc/meminfo": "MemTotal: 1048576 kB\n"}, GIB),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": f"{2 * GIB}\n",
                "sys/fs/cgroup/a/memory.max": "max\n",
            },
            2 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": f"{2 * GIB}",
                "sys/fs/cgroup/a/memory.max": f"{GIB}",
            },
            GIB,
        ),
        ({"proc/self/cgroup": "0::/../../x\n", "sys/fs/cgroup/memory.max": f"{3 * GIB}\n"}, 3 * GIB),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/a\n0::/\n",
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{GIB}\n",
                "sys/fs/cgroup/cpu/a/memory.limit_in_bytes": "1",
            },
            GIB,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/a\n",
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712\n",
            },
            32768000 * 1024,
        ),
    ],
    ids=["none", "old-kernel", "v2", "v2-parent", "v2-container", "v1", "v1-unlimited"],
)
def test_usable_memory_respects_cgroups(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert machine.usable_memory(host(tmp_path, files)) == expected


def test_usable_memory_respects_the_process_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_AS: (5 * GIB, 6 * GIB), resource.RLIMIT_DATA: (resource.RLIM_INFINITY,) * 2}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    assert machine.usable_memory(host(tmp_path, {})) == 5 * GIB


@pytest.mark.parametrize(("usable", "expected"), [(4 * GIB, GIB), (1000 * GIB, 8 * GIB), (1 << 20, 1 << 20)])
def test_a_plain_store_takes_a_quarter(monkeypatch: pytest.MonkeyPatch, usable: int, expected: int) -> None:
    monkeypatch.setattr("kvtier.config.usable_memory", lambda: usable)
    assert default_dram() == expected


def test_this_machine() -> None:
    assert 0 < machine.usable_memory() < 1 << 60
    assert machine.huge_pages().transparent in ("always", "madvise", "never", "absent")
    assert all(node.number >= 0 for node in machine.numa_nodes())


def test_another_machine(tmp_path: Path) -> None:
    nodes = "sys/devices/system/node"
    root = host(
        tmp_path,
        {
            "sys/kernel/mm/transparent_hugepage/enabled": "always [never] madvise\n",
            "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "8\n",
            "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "3\n",
            f"{nodes}/node0/meminfo": "Node 0 MemTotal: 1048576 kB\nNode 0 MemFree: 1 kB\n",
            f"{nodes}/node0/cpulist": "0-3\n",
            f"{nodes}/node10/meminfo": "Node 10 MemTotal: 2097152 kB\n",
            f"{nodes}/node10/cpulist": "\n",
            "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA H200\nIRQ: 3\n",
        },
    )
    assert machine.huge_pages(root) == machine.HugePageSupport("never", 8, 3)
    assert machine.numa_nodes(root) == [machine.NumaNode(0, GIB, True), machine.NumaNode(10, 2 * GIB, False)]
    assert machine.gpus(root) == ["NVIDIA H200"]
    bare = host(tmp_path / "bare", {})
    assert machine.huge_pages(bare) == machine.HugePageSupport("absent", 0, 0)
    assert (machine.numa_nodes(bare), machine.gpus(bare)) == ([], [])
