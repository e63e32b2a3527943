"""Whatever a user writes into a TOML file: it is read, or refused with a ``KvtierError`` that says why.

``KVTIER_FUZZ_EXAMPLES`` sets how many files each test makes up (200).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier import KvtierError, StoreConfig
from kvtier.kappa import Measured

EXAMPLES = int(os.environ.get("KVTIER_FUZZ_EXAMPLES", "200"))
many = settings(
    max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

STORE = """
[store]
policy = "lru-leaf"
verify = true
watermarks = [0.98, 0.95]
write_budget = "500GB"
[[tier]]
kind = "dram"
size = "64MiB"
[[tier]]
kind = "nvme"
path = "kv"
size = "1GiB"
engine = "threads"
"""
WORDS = {"store", "tier", "kind", "size", "policy", "verify", "watermarks", "write_budget", "path", "paths", "device"}
WORDS |= {"engine", "numa_node", "huge_pages", "prefault", "emulate_gbs", "codec"}
VALUES = ["dram", "cxl", "nvme", "hbm", "lru-leaf", "threads", "4GiB", "-1GiB", "1e400GiB", "", "\x00", "NaN", "\ud800"]

leaves = (
    st.sampled_from(VALUES)
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.dates()
    | st.lists(st.integers() | st.sampled_from(VALUES), max_size=3)
)
tables = st.dictionaries(st.sampled_from(sorted(WORDS)), leaves, max_size=6)
documents = st.fixed_dictionaries(
    {}, optional={"store": tables | leaves, "tier": st.lists(tables, max_size=3) | leaves}
)


def refused_or_read(read: Any, path: Path) -> None:
    try:
        read(path)
    except KvtierError as error:
        assert str(path) in str(error), "it says which file"  # noqa: PT017


def toml(value: object) -> str:
    match value:
        case list():
            return "[" + ", ".join(map(toml, value)) + "]"
        case dict():
            return "{" + ", ".join(f"{json.dumps(key)} = {toml(item)}" for key, item in value.items()) + "}"
        case str():
            return json.dumps(value)
        case bool():
            return str(value).lower()
        case _:
            return str(value)


READERS = [StoreConfig.from_toml, Measured.from_toml]


@pytest.mark.parametrize("read", READERS)
@many
@given(data=st.binary(max_size=200))
def test_any_bytes(read: Any, data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "any.toml"
    path.write_bytes(data)
    refused_or_read(read, path)


@pytest.mark.parametrize("read", READERS)
@many
@given(document=documents)
def test_any_document(read: Any, document: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "any.toml"
    path.write_text("".join(f"{key} = {toml(value)}\n" for key, value in document.items()))
    refused_or_read(read, path)


@many
@given(at=st.integers(0, len(STORE) - 1), count=st.integers(0, 20), other=st.text(max_size=6))
def test_a_file_with_a_mistake(at: int, count: int, other: str, tmp_path: Path) -> None:
    path = tmp_path / "any.toml"
    path.write_text(STORE[:at] + other + STORE[at + count :])
    refused_or_read(StoreConfig.from_toml, path)
