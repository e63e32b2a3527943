from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from kvtier import _kvtier, codecs
from kvtier.bench import FULL, QUICK, Plan, Row, codec_suite, figures, memory, store_suite, suite
from kvtier.bench.plan import label
from kvtier.cli import main
from kvtier.errors import ConfigError, StorageError

MIB = 1 << 20
TINY = Plan(
    pairs=2,
    region=16 * MIB,
    file=64 * MIB,
    front=16 * MIB,
    lap=8 * MIB,
    batch=2 * MIB,
    restart_blocks=1500,
    index_blocks=1000,
    spin_s=0.01,
    idle_s=0.05,
)
CONTRACT = {"name", "value", "unit", "bound", "bound_name", "ratio", "spread"}


def bench(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvtier.cli", "bench", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


# The statistics


def test_spread_is_the_interquartile_range_over_the_median() -> None:
    assert figures.spread([1, 2, 3, 4, 5]) == pytest.approx(2 / 3)
    assert figures.spread([7, 7, 7]) == 0
    assert figures.spread([1.0]) is None
    assert figures.spread([]) is None
    assert figures.spread([0, 0, 0]) is None


def test_samples_alternate_and_neither_side_always_goes_first() -> None:
    calls: list[str] = []

    def say(who: str, value: float) -> float:
        calls.append(who)
        return value

    pairs = figures.alternate(4, lambda: say("bound", 2.0), lambda: say("value", 1.0))
    assert pairs == [(2.0, 1.0)] * 4
    assert calls == ["bound", "value", "value", "bound"] * 2


def test_a_machine_that_changes_its_speed_does_not_change_the_ratio() -> None:
    pairs = [(speed, 0.9 * speed) for speed in (10.0, 5.0, 20.0, 10.0, 1.0)]
    row = figures.compared("a", "GB/s", pairs, "b")
    assert row.ratio == pytest.approx(0.9)
    assert row.spread == pytest.approx(0, abs=1e-12)
    assert (row.value, row.bound, row.samples) == (9.0, 10.0, 5)


def test_rows_without_a_measured_bound() -> None:
    row = figures.measured("lease_1000", "s", [2e-3, 4e-3, 3e-3], aim=1e-3)
    assert (row.value, row.bound, row.bound_name, row.ratio) == (3e-3, 1e-3, "aim", pytest.approx(3))
    idle = figures.measured("idle_cpu_share", "1", [0.0, 0.0], aim=0.0)
    assert (idle.value, idle.bound, idle.ratio, idle.spread) == (0.0, 0.0, None, None)
    assert figures.measured("x", "B", [1.0]).bound_name is None


def test_a_row_has_the_fields_that_programs_rely_on() -> None:
    assert {field.name for field in fields(Row)} >= CONTRACT
    assert json.loads(json.dumps(asdict(Row("a", None, "", note="not measured: no disk"))))["value"] is None


# The plan, and the caller's memory


def test_a_quick_run_stays_within_its_disk() -> None:
    assert QUICK.disk_bytes < 4 << 30
    assert QUICK.pairs >= 9
    assert FULL.restart_blocks == 1_000_000
    assert FULL.pairs >= 9


def test_a_plan_must_fit_together() -> None:
    with pytest.raises(ConfigError, match="does not fit together"):
        replace(TINY, front=TINY.file)


def test_names_of_sizes() -> None:
    assert [label(size) for size in (64 << 10, 256 << 10, MIB, 4 * MIB)] == ["64k", "256k", "1m", "4m"]


def test_buffers_are_aligned_and_differ_from_part_to_part() -> None:
    buffer = memory.random_buffer(4 * MIB)
    assert buffer.ctypes.data % (2 * MIB) == 0
    parts = memory.split(buffer, MIB)
    assert len(parts) == 4
    assert len({part.tobytes() for part in parts}) == 4
    assert memory.split(buffer[: MIB + 1], MIB)[0].size == MIB
    assert [(at.start, at.stop) for at in memory.chunks(5, 2)] == [(0, 2), (2, 4), (4, 5)]


def test_keys_are_never_the_same_twice() -> None:
    keys = memory.Keys()
    taken = keys.take(5) + keys.take(5)
    assert len(set(taken)) == 10
    assert {len(key) for key in taken} == {32}


# The bounds


def test_memcpy_copies_every_byte_and_refuses_what_cannot_be() -> None:
    source, target = memory.random_buffer(3 * MIB + 5), memory.huge_buffer(3 * MIB + 5)
    assert _kvtier.bound_memcpy(target, source, 64 << 10) > 0
    assert np.array_equal(source, target)
    for other, block in ((source[:-1], 4096), (source, 0), (target, 4096)):
        with pytest.raises(ValueError, match="no overlap"):
            _kvtier.bound_memcpy(target, other, block)


def test_the_bare_loop_moves_bytes_and_says_what_it_cannot_do(tmp_path: Path) -> None:
    disk = _kvtier.BareDisk(tmp_path / "bare", 8 * MIB)
    assert disk.prepare_s > 0
    assert (tmp_path / "bare").stat().st_size == 8 * MIB
    for write in (True, False):
        seconds, cpu, registered = disk.run(write, 64 << 10, 8, 7 * MIB, 64, write)
        assert seconds > 0
        assert cpu >= 0
        assert isinstance(registered, bool)
    assert len(disk.latencies(64 << 10, 0, 10)) == 10
    with pytest.raises(StorageError, match="whole pages"):
        disk.run(False, 1000, 1, 0, 1, False)
    with pytest.raises(StorageError):
        _kvtier.BareDisk(tmp_path / "nowhere" / "bare", MIB)


# The suite


def test_a_tiny_run_gives_every_row_and_leaves_nothing_behind(tmp_path: Path) -> None:
    said: list[str] = []
    rows = {row.name: row for row in store_suite(TINY, tmp_path, said.append)}
    missing = [row for row in rows.values() if row.value is None]
    assert not missing
    wanted = {f"dram_{verb}_{size}" for verb in ("get", "put") for size in ("64k", "1m", "64k_single")}
    wanted |= {f"nvme_{verb}_{size}" for verb in ("read", "write") for size in ("64k", "256k", "1m")}
    wanted |= {"nvme_read_64k_single", "nvme_read_1m_cpu_s_per_gib", "lease_1000", "match_4096", "victim_share"}
    wanted |= {"nvme_read_1m_beside_writes", "nvme_read_1m_behind_writes", "asyncio_tick"}
    wanted |= {
        "index_bytes_per_block",
        "index_bytes_per_block_default",
        "index_bytes_per_block_126",
        "restart_s_per_million",
        "idle_cpu_share",
    }
    assert wanted <= rows.keys()
    assert all(row.value is not None and math.isfinite(row.value) and row.value >= 0 for row in rows.values())
    assert "extrapolated" in rows["restart_s_per_million"].note
    assert 50 < (rows["index_bytes_per_block"].value or 0) < 2000
    assert len(said) == 8
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_measured_says_so_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> Iterator[Row]:
        raise StorageError("io_uring is forbidden")
        yield

    def nothing(*_: object) -> Iterator[Row]:
        yield Row("x", 1.0, "1")

    for name in ("memory_rows", "lookups", "index_size", "restart", "victim", "event_loop", "idle"):
        monkeypatch.setattr(suite, name, nothing)
    monkeypatch.setattr(suite, "disk_rows", refused)
    rows = list(store_suite(TINY, tmp_path))
    assert [row.name for row in rows] == ["x", "nvme", "x", "x", "x", "x", "x", "x"]
    assert rows[1].value is None
    assert rows[1].note == "not measured: io_uring is forbidden"


def test_too_small_a_drive_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="bytes free"):
        next(store_suite(replace(TINY, file=1 << 60), tmp_path))
    assert list(tmp_path.iterdir()) == []


# The command


def test_the_codecs_are_measured_beside_memcpy_and_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {row.name: row for row in codec_suite(TINY)}
    names = ["int8", "fp8", "int4", "planes", "zstd_planes"]
    assert {f"{name}_{verb}" for name in names for verb in ("encode", "decode")} <= set(rows)
    assert all(row.ratio is not None and row.samples for name, row in rows.items() if not name.startswith("saved_"))
    assert {name.removeprefix("saved_").replace("_zstd", "+zstd") for name in rows if name.startswith("saved_")} == set(
        codecs.NAMES
    )
    monkeypatch.setenv("KVTIER_SHARED", "/nowhere")
    saved = [row for row in codec_suite(replace(TINY, region=2 * MIB)) if row.name.startswith("saved_")]
    assert all(row.value is None and "KVTIER_SHARED" in row.note for row in saved)


def test_the_command_prints_json_lines_or_a_table(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from kvtier.bench import Row\n"
        "from kvtier.cli import bench, main\n"
        "import importlib\n"
        "command = importlib.import_module('kvtier.cli.bench')\n"
        "command.store_suite = lambda *_: iter([Row('nvme_read_64k', 1.5, 'GB/s', 2.0, 'bare', 0.75, 0.1, 9)] + [Row(f'r{n}', 1.0, 's', note=f'n{n}') for n in range(12)] + [\n"
        "    Row('nvme_write_256k_cpu_s_per_gib', 0.1234, 's/GiB', 0.1111, 'bare', 1.11, 0.105, 9, 'all threads: ' + 9 * 'what it is of '),\n"
        "    Row('lease_1000', 4e-4, 's', 1e-3, 'aim', float('inf')), Row('nvme', None, '', note='not measured: why')])\n"
        "main(['bench', *sys.argv[1:]])"
    )

    def run(*words: object) -> str:
        command = [sys.executable, "-c", program, "--dir", str(tmp_path), *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    first, *_, second, third = (json.loads(line) for line in run("--quick", "--json").splitlines())
    assert first.keys() >= CONTRACT
    assert (first["name"], first["value"], first["ratio"]) == ("nvme_read_64k", 1.5, 0.75)
    assert second["ratio"] is None
    assert third["value"] is None
    table = run("--quick")
    for shown in ("nvme_read_64k", "1.5 GB/s", "0.75", "400 µs", "not measured: why"):
        assert shown in table
    assert all(len(line) <= 80 for line in table.splitlines())
    assert table.count("bare") == 2, "a note is said once, by number"
    (row,) = (line.split() for line in table.splitlines() if line.startswith("nvme_write_256k_cpu_s_per_gib"))
    assert row[1:] == ["0.123", "s/GiB", "0.111", "s/GiB", "1.11", "10%", "14"], "numbers of two digits are not cut"


def test_a_chart_of_a_suite_that_has_none_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["bench", "--chart", str(tmp_path / "a.svg")])
    assert done.exit_code == 2
    assert "give --suite prefill" in done.output
