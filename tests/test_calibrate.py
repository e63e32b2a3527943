"""`kvtier kappa calibrate` and its rig, on a model with random weights: what is loaded is the KV, and the file is usable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from kvtier import Store
from kvtier.cli import main
from kvtier.errors import ConfigError, KvtierError
from kvtier.kappa import Measured, Request, Residency, decide
from kvtier.kappa.calibrate import calibrate
from kvtier.kappa.rig import Rig, RigTier
from test_prefill import build, llama

CHUNK, TOKENS = 32, 64


@pytest.fixture(scope="module")
def model() -> Any:
    return build(llama(num_hidden_layers=2, max_position_embeddings=256))


@pytest.fixture(scope="module")
def rig(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(model, tmp_path_factory.mktemp("rig"), TOKENS, chunk=CHUNK, cxl_node=0)


@pytest.mark.parametrize("tier", ["dram", "cxl", "nvme"])
@pytest.mark.parametrize("gbs", [None, 1.0])
def test_a_serial_run_loads_the_kv_from_that_tier(rig: Rig, tier: RigTier, gbs: float | None) -> None:
    rig.compute(0, TOKENS)
    expected = [tensor[:, :, :TOKENS].clone() for layer in rig.layers for tensor in layer.room]
    for layer in rig.layers:
        for tensor in layer.room:
            tensor.zero_()
    with rig.holding(tier, gbs) as blocks:
        assert rig.serial(blocks, TOKENS, 5, tier) > 0
        if tier == "nvme":  # now it is in memory too
            with pytest.raises(KvtierError, match="came from dram, not from nvme"):
                rig.fetch(blocks, rig.keys[:1], "nvme")
    found = [tensor[:, :, :TOKENS] for layer in rig.layers for tensor in layer.room]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_store_from_toml_says_which_tiers_are_emulated(tmp_path: Path) -> None:
    path = tmp_path / "store.toml"
    path.write_text(
        '[[tier]]\nkind = "dram"\nsize = "8MiB"\nemulate_gbs = 0.5\n[[tier]]\nkind = "nvme"\nsize = "16MiB"\npath = "."\n'
    )
    with Store.from_toml(path) as store:
        tiers = store.stats()["tiers"]
    assert (tiers["dram"]["emulated"], tiers["nvme"]["emulated"]) == (True, False)


def test_a_calibration_has_everything_that_decide_needs(model: Any, tmp_path: Path) -> None:
    steps: list[str] = []
    found = calibrate(
        model, tmp_path, tokens=TOKENS, chunk=CHUNK, runs=1, cxl_node=0, emulate_gbs={"nvme": 0.5}, say=steps.append
    )
    assert list(tmp_path.iterdir()) == []  # nothing stays behind
    assert [tier.kind for tier in found.tiers] == ["dram", "cxl", "nvme"]
    assert [tier.emulated for tier in found.tiers] == [False, False, True]
    assert all(tier.read_bytes_per_s > 0 for tier in found.tiers)
    assert all((tier.write_bytes_per_s or 0) > 0 for tier in found.tiers)
    assert found.model.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4  # fp32, as the model is
    assert found.passes is not None
    assert (found.passes.cached, found.passes.new) == ((0, 32, 64), (1, 2, 4, 8, 16, 32))
    assert found.copy_bytes_per_s
    assert found.peak_flops_per_s
    assert found.hit_s > 0
    assert len(steps) == 10
    assert any(step.endswith(" s to go") for step in steps)
    path = tmp_path / "measured.toml"
    path.write_text(found.to_toml())
    again = Measured.from_toml(path)
    assert again == found
    told = decide(Request(64, 4), Residency({"nvme": 64 * found.model.kv_bytes_per_token}), again)
    assert told.predicted_s > 0
    assert told.why.endswith("(emulated)")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 80}, "multiple of the chunk of 32"),
        ({"tokens": 256}, "no more than the model's 256"),
        ({"tokens": 32}, "at least two chunks"),
        ({"runs": 0}, "runs=0"),
        ({"emulate_gbs": {"tape": 1.0}}, "allowed are dram, nvme; cxl goes with a cxl_node"),
        ({"emulate_gbs": {"tape": 1.0}, "cxl_node": 0}, "allowed are dram, cxl, nvme"),
    ],
)
def test_what_cannot_be_measured_is_refused(model: Any, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        calibrate(model, tmp_path, **({"tokens": TOKENS, "chunk": CHUNK, "runs": 1} | changes))


def test_the_command(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "tiny")
    out = tmp_path / "here.toml"
    fixed = ["kappa", "calibrate", str(tmp_path / "tiny"), "--dir", str(tmp_path), "--out", str(out)]
    fixed += ["--tokens", "64", "--chunk-tokens", "32", "--runs", "1", "--device", "cpu"]
    done = CliRunner().invoke(main, [*fixed, "--json", "--emulate", "dram=2"])
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["emulated"]
    assert record["mfu"] == record["flops_per_s"] / record["peak_flops_per_s"]
    found = Measured.from_toml(out)
    assert [vars(tier) for tier in found.tiers] == record["tiers"]
    shown = CliRunner().invoke(main, [*fixed, "--emulate", "dram=2"])
    assert "emulated" in shown.stdout
    refused = CliRunner().invoke(main, [*fixed, "--emulate", "dram"])
    assert refused.exit_code == 2
    assert "is not a limit" in refused.output
    (tmp_path / "empty").mkdir()
    for words, message in (
        [[str(tmp_path / "empty")], "has no config.json"],
        [[fixed[2], "--dtype", "f7"], "f7 is not known"],
    ):
        refused = CliRunner().invoke(main, ["kappa", "calibrate", *words, "--dir", str(tmp_path)])
        assert refused.exit_code == 2
        assert message in " ".join(refused.output.split())
