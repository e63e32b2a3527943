"""`kvtier doctor`, on a machine without a GPU and on faked ones."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvtier import machine
from kvtier.cli import main
from kvtier.kappa import ModelSpec

GB = 1e9
module = importlib.import_module("kvtier.cli.doctor")  # the package's attribute is the command
machine_links = machine.pci_links  # the real one, which the fixture replaces


class FakeCuda:
    """An H100 that copies at these rates."""

    name, capability, free, memory = "NVIDIA H100", (9, 0), 80 * GB, 80 * GB
    up = 55e9

    def rates(self) -> tuple[float, float]:
        return self.up, 53e9


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_READ", 4 << 20)
    monkeypatch.setattr(machine, "pci_links", list)
    monkeypatch.setattr(module._Cuda, "here", lambda: None)
    monkeypatch.setattr("kvtier.tiers.cuda.missing", lambda _=0: "CuPy cannot be imported")


def run(tmp_path: Path, *arguments: str, code: int = 0) -> dict[str, dict[str, Any]]:
    done = CliRunner().invoke(main, ["doctor", *arguments, "--dir", str(tmp_path), "--json"])
    assert done.exit_code == code, done.output
    return {record["name"]: record for record in map(json.loads, done.stdout.splitlines())}


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    found = run(tmp_path, "--kv", "fp32")
    assert found["link to the GPU"]["ok"] is None
    assert found["drive"]["value"]["bytes_per_s"] > 0
    assert found["KV dtype"]["ok"]
    assert found["batch size"]["ok"] is None
    assert found["an Hbm tier"]["value"] == "host"
    assert set(found["counters to watch"]["value"]) == {"iostat -x 1", "Store.stats()"}
    assert list(tmp_path.iterdir()) == []
    shown = CliRunner().invoke(main, ["doctor", "--kv", "fp32", "--dir", str(tmp_path)]).stdout
    assert "no GPU here, so there is none to measure" in " ".join(shown.split())
    assert "no NVML" in " ".join(shown.split())


@pytest.mark.parametrize(("up", "good"), [(55e9, True), (15e9, False)])
def test_a_link_is_judged_by_its_nominal_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, up: float, good: bool
) -> None:
    gpu = FakeCuda()
    gpu.up = up
    monkeypatch.setattr(module._Cuda, "here", lambda: gpu)
    monkeypatch.setattr(machine, "pci_links", lambda: [machine.PciLink("gpu", "0000:01:00.0", 63e9, 63e9)])
    monkeypatch.setattr(module.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    found = run(tmp_path, "--kv", "fp8", code=0 if good else 1)
    link = found["link to NVIDIA H100"]
    assert (link["ok"], link["value"]["nominal_bytes_per_s"]) == (good, 63e9)
    assert found["gpu link"]["ok"]
    assert found["KV dtype"]["ok"]
    assert "nvidia-smi dmon -s put" in found["counters to watch"]["value"]


def test_what_is_slower_or_not_supported_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = FakeCuda()
    old.capability = (8, 0)
    monkeypatch.setattr(module._Cuda, "here", lambda: old)
    monkeypatch.setattr(machine, "pci_links", lambda: [machine.PciLink("nvme", "0000:02:00.0", 4e9, 8e9)])
    found = run(tmp_path, "--kv", "fp8", "--link", "1000GB/s", code=1)
    assert found["nvme link"]["ok"] is False
    assert found["drive"]["ok"] is False
    assert "bf16 or int8" in found["KV dtype"]["advice"]


def test_the_batch_is_what_fits_beside_the_weights(tmp_path: Path) -> None:
    model = ModelSpec.named("Llama-3.1-70B")
    fixed = ("Llama-3.1-70B", "--hw", "H100-SXM", "--gpus", "4", "--context", "32768")
    found = run(tmp_path, *fixed, "--batch", "15")["batch size"]
    fits = int((0.9 * found["value"]["memory_bytes"] - 2 * model.n_total) // (32768 * 327_680))
    assert found["value"]["fits"] == fits > 10
    assert run(tmp_path, *fixed, "--batch", str(fits))["batch size"]["ok"]
    assert not run(tmp_path, *fixed, "--batch", str(fits + 1), code=1)["batch size"]["ok"]
    alone = ("Llama-3.1-70B", "--hw", "H100-SXM")
    assert run(tmp_path, *alone, code=1)["batch size"]["value"]["fits"] == 0


def test_links_from_the_kernel(tmp_path: Path) -> None:
    def device(address: str, **files: str) -> None:
        folder = tmp_path / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(text + "\n")

    full = {"max_link_speed": "32.0 GT/s PCIe", "max_link_width": "16"}
    device(
        "0000:01:00.0",
        vendor="0x10de",
        **{"class": "0x030200", "current_link_speed": "16.0 GT/s PCIe"},
        current_link_width="16",
        **full,
    )
    device(
        "0000:02:00.0",
        vendor="0x144d",
        **{"class": "0x010802", "current_link_speed": "8.0 GT/s PCIe"},
        current_link_width="4",
        max_link_speed="16.0 GT/s PCIe",
        max_link_width="4",
    )
    device(
        "0000:03:00.0",
        vendor="0x144d",
        **{"class": "0x010802", "current_link_speed": "Unknown"},
        current_link_width="0",
        **full,
    )
    device("0000:04:00.0", vendor="0x8086", **{"class": "0x030000"})
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(
        "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t\t: fpu avx512_bf16\n\nprocessor : 1\n"
    )
    found = machine_links(tmp_path)
    assert [(link.kind, link.address) for link in found] == [("gpu", "0000:01:00.0"), ("nvme", "0000:02:00.0")]
    assert found[0].now == pytest.approx(31.5e9, rel=1e-3)
    assert found[0].best == pytest.approx(63.0e9, rel=1e-3)
    assert found[1].now == pytest.approx(3.94e9, rel=1e-3)
    assert machine.cpu_flags(tmp_path) == {"fpu", "avx512_bf16"}
    assert machine.cpu_flags(tmp_path / "none") == frozenset()
    assert machine.cpu_name(tmp_path) == "Some CPU @ 2 GHz"
    assert machine.cpu_name(tmp_path / "none")


def test_a_place_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["doctor", "--kv", "fp32", "--dir", str(tmp_path / "a" / "b")])
    assert done.exit_code == 2
    assert "is not there" in " ".join(done.output.split())
