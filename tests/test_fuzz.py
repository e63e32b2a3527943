"""Whatever is in a TOML file or a trace: it is read, or refused with a ``KvtierError`` that says why.

``KVTIER_FUZZ_EXAMPLES`` sets how many files each test makes up (200, and 1,800 in CI).
"""

from __future__ import annotations

import gzip
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier import KvtierError, StoreConfig
from kvtier.kappa import Measured
from kvtier.traces import read as read_trace

EXAMPLES = int(os.environ.get("KVTIER_FUZZ_EXAMPLES", "1800" if os.environ.get("CI") == "true" else "200"))
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


LINES = {
    "jsonl": '{"timestamp": 1, "input_length": 1024, "hash_ids": [1, "a"]}\n'
    '{"timestamp": 2.5, "input_length": 9, "runs": [3, 2, 9, 1]}\n',
    "csv": "TIMESTAMP,ContextTokens\n2023-11-16 18:17:03.9799600,4808\n1.5,600\n",
}
# Numbers as they may stand in a file; none makes a trace that is right and large.
NUMBERS = ["0", "-1", "7", "1e3", "1e30", "1e999", "NaN", "18446744073709551616", "9" * 5000, "true", "null", "[", '"']


def read_or_refuse_trace(path: Path, data: bytes) -> None:
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    for skip_bad in (False, True):
        refused_or_read(partial(read_trace, skip_bad=skip_bad), path)


@pytest.mark.parametrize("name", ["any.jsonl", "any.csv", "any.csv.gz"])
@many
@given(data=st.binary(max_size=200))
def test_any_bytes_as_a_trace(name: str, data: bytes, tmp_path: Path) -> None:
    read_or_refuse_trace(tmp_path / name, data)


@pytest.mark.parametrize("kind", LINES)
@many
@given(data=st.data())
def test_a_trace_with_a_mistake(kind: str, data: st.DataObject, tmp_path: Path) -> None:
    text = LINES[kind]
    at, count = data.draw(st.integers(0, len(text) - 1)), data.draw(st.integers(0, 12))
    other = data.draw(st.sampled_from(NUMBERS) | st.text(max_size=6))
    read_or_refuse_trace(
        tmp_path / f"any.{kind}", (text[:at] + other + text[at + count :]).encode(errors="surrogatepass")
    )


@many
@given(at=st.integers(0, 100), other=st.binary(max_size=8))
def test_a_damaged_gzip(at: int, other: bytes, tmp_path: Path) -> None:
    whole = gzip.compress(LINES["jsonl"].encode())
    path = tmp_path / "any.jsonl.gz"
    path.write_bytes(whole[:at] + other + whole[at + len(other) :])
    refused_or_read(read_trace, path)


HEADER = "timestamp,input_length\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deep.jsonl", "[" * 100_000),
        ("long.jsonl", '{"timestamp": 1, "input_length": 1e30, "hash_ids": [1]}'),
        ("never.jsonl", '{"timestamp": NaN, "input_length": 5, "hash_ids": [1]}'),
        ("runs.jsonl", '{"timestamp": 1, "input_length": 5, "runs": [' + ", ".join(["0, 16777216"] * 1000) + "]}"),
        ("field.csv", HEADER + "1," + "5" * 200_000),
        ("long.csv", HEADER + "1,4294967296000"),
        ("blocks_b1.csv", HEADER + "1,4294967296"),
        ("name_b0.csv", HEADER + "1,5"),
        ("name_b99999999999999999999.jsonl", LINES["jsonl"]),
    ],
)
def test_a_trace_beyond_all_bounds_is_refused(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(KvtierError, match=name):
        read_trace(path)
