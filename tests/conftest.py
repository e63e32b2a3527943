"""Tests run offline and in one process, whatever the machine, and twice the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from kvtier import Dram, Nvme, Store

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

hypothesis.settings.register_profile("kvtier", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("kvtier")


@pytest.fixture
def store() -> Iterator[Store]:
    """A store of 16 MiB of memory."""
    with Store(Dram("16MiB")) as store:
        yield store


@pytest.fixture
def tiers(tmp_path: Path) -> tuple[Dram, Nvme]:
    """16 MiB of memory over 64 MiB of disk; a store opened with them again finds what it left."""
    return Dram("16MiB"), Nvme(tmp_path / "kv", "64MiB")
