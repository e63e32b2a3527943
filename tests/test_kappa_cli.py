"""``kvtier kappa``: its commands, and the article's cells with their verdicts."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from kvtier.cli import main
from kvtier.kappa.article import TOLERANCE, VERDICTS, cells, example
from kvtier.kappa.catalog import published
from test_kappa_workload import PLAN

FIELDS = [
    "kv_bytes_per_token",
    "flops",
    "weight_bytes",
    "n_active",
    "kappa_m",
    "kappa_hw",
    "kappa_crit",
    "t_star",
    "t_load",
    "t_compute",
    "ttft_serial",
    "ttft_pipelined",
    "ttft_split",
    "split_at",
]


def run(*arguments: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(main, ["kappa", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.output.splitlines()]


def text(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["kappa", *arguments])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def show(*arguments: str) -> dict[str, Any]:
    (record,) = run("show", *arguments)
    return record


def test_show_has_the_agreed_fields() -> None:
    record = show("Llama-3.1-405B", "--hw", "H100-SXM", "--link", "PCIe5 x16", "--cached", "65536", "--new", "32")
    assert set(FIELDS) <= set(record)
    assert record["kv_bytes_per_token"] == 516_096
    assert record["t_load"] == pytest.approx(0.5285, rel=1e-3)
    assert record["t_compute"] == pytest.approx(0.241, rel=1e-3)
    assert record["ttft_serial"] == record["t_load"] + record["t_compute"]
    assert record["ttft_pipelined"] == pytest.approx(record["t_load"] + record["t_compute"] / 126)
    assert record["ttft_split"] <= record["ttft_serial"]
    assert record["kappa_m"] == pytest.approx(2 * record["n_active"] / 516_096)


def test_show_says_infinity_as_null() -> None:
    record = show("DeepSeek-V3", "--new", "64")
    assert record["kappa_crit"] is None
    assert record["t_star"] == pytest.approx(63.9, abs=0.05)
    assert record["n_active"] == pytest.approx(35.70e9, rel=1e-3)
    assert "∞" in text("show", "DeepSeek-V3", "--new", "64")


def test_show_with_other_settings(tmp_path: Path) -> None:
    base = show("Llama-3.1-8B")
    assert show("Llama-3.1-8B", "--kv", "fp8")["t_load"] == base["t_load"] / 2
    assert show("Llama-3.1-8B", "--mfu", "0.5")["kappa_crit"] > 2 * base["kappa_crit"]  # T* comes nearer too
    assert show("Llama-3.1-8B", "--weight-bytes", "1")["weight_bytes"] == base["weight_bytes"] / 2
    assert show("Llama-3.1-8B", "--convention", "paper")["kappa_hw"] == pytest.approx(32.3e-6, rel=2e-3)
    assert show("Llama-3.1-8B", "--link", "32GB/s")["t_load"] == base["t_load"] * 2
    own = tmp_path / "own.toml"
    own.write_text("[link.mine]\nread = 1e9\n")
    assert show("Llama-3.1-8B", "--link", "mine", "--specs", str(own))["t_load"] == 65536 * 131_072 / 1e9
    assert "paper" in text("show", "Llama-3.1-8B", "--convention", "paper")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "nope"), "not in the catalog"),
        (("show", "Llama"), "may be Llama-3.1-8B"),
        (("show", "405B", "--new", "0"), "at least the last token"),
        (("show", "405B", "--hw", "GH200", "--convention", "paper"), "no sparse_flops"),
        (("show", "405B", "--mfu", "2"), "more than the peak"),
        (("explain", "405B", "--nvme", "2"), "not a share"),
        (("plan", "none.toml"), "cannot be read"),
        (("workload", "none", "--model", "405B"), "cannot be read"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    assert message in text(*arguments, code=2)


def test_explain_adds_up() -> None:
    (record,) = run(
        *("explain", "DeepSeek-V3", "--cached", "65536", "--new", "32", "--generated", "500", "--nvme", "0.5"),
        *("--gpus", "8", "--latents", "broadcast", "--fabric", "450GB/s", "--both", "83GB/s"),
    )
    assert sum(record["flops_terms"].values()) == record["flops"]
    assert record["t_compute"] == max(record["t_products"], record["t_weights"])
    assert record["attention_form"] == "absorbed"
    assert record["load_binds"] == "nvme"
    assert record["t_load_tiers"] == max(record["load_by_tier"].values())
    assert record["ttft_tiers"] == record["t_load_tiers"] + record["t_compute"]
    front = max(record["split_prefix_compute"], record["split_load"])
    assert record["ttft_split"] == front + record["split_new_compute"]
    assert record["write_bytes"] == 532 * 70_272
    assert 0 < record["write_async_added_s"] < record["write_blocking_s"]
    assert record["gpu_ttft_serial"] == pytest.approx(record["gpu_load_s"] + record["gpu_compute_s"])
    shown = text("explain", "DeepSeek-V3", "--gpus", "8", "--nvme", "0.5")
    for word in ("attention", "weights streamed", "nvme binds", "write-back", "each of 8 GPUs loads"):
        assert word in shown


@pytest.mark.parametrize("row", published(), ids=lambda row: row["id"])
def test_each_published_cell_gets_its_verdict(row: dict[str, Any]) -> None:
    cell = next(cell for cell in cells() if cell.id == row["id"])
    # The verdict is not copied: it follows from the recomputed figures.
    assert cell.verdict == row["verdict"]
    assert cell.verdict in VERDICTS
    assert cell.reason == row["note"]


def test_the_readmes_figures_are_those_recomputed() -> None:
    by_id = {cell.id: cell for cell in cells()}

    def near(found: object, *values: float) -> bool:
        return found == pytest.approx(values[0] if len(values) == 1 else values, rel=0.006)

    assert near(by_id["kappa_hw_h100"].paper, 32.3)
    assert near(by_id["kappa_hw_h100"].recomputed, 64.7)
    assert near(by_id["kappa_crit_dense_h100"].mixed_up, 14.5)
    assert near(by_id["kappa_m_deepseek"].paper, 1.053)
    assert near(by_id["kappa_m_deepseek"].recomputed, 1.016)
    assert near(by_id["parallel_65k_32"].recomputed, 2.37)
    assert near(by_id["share_8k_128"].recomputed, 0.985)
    assert near(by_id["finqa_vram"].mixed_up, 86.2e9)
    assert near(by_id["kappa_crit_gqa_mla_int8"].paper, 7.77, 35.8, 71.6)
    assert near(by_id["c2c_gain"].recomputed, 7.03)
    assert 2 < example()["ratio"] < 2.4
    assert 0.05 <= TOLERANCE <= 0.06


def test_compare_prints_every_cell() -> None:
    records = run("compare")
    assert [record["id"] for record in records] == [row["id"] for row in published()]
    assert all(record["convention"] == "paper" for record in records)
    assert records[2]["published"] == 0.0128
    shown = text("compare")
    for row in published():
        assert row["quantity"] in shown
    for verdict in VERDICTS:
        assert verdict in shown


def test_workload(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("cached,new\n30000,20\n0,500\n")
    summary, link, disk = run("workload", str(path), "--model", "70B", "--tier", "disk=13GB/s")
    assert summary["requests"] == 2
    assert summary["kappa_p99"] == pytest.approx(1500, rel=0.02)
    assert (link["tier"], disk["tier"], disk["rate"]) == ("link", "disk", 13e9)
    assert link["mean_saved_s"] > disk["mean_saved_s"] > 0
    shown = text("workload", str(path), "--model", "70B", "--tier", "Kioxia")
    assert "beyond κ_crit(T)" in shown


def test_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    records = run("plan", str(path))
    options = [record for record in records if "rank" in record]
    assert [option["rank"] for option in options] == list(range(1, len(options) + 1))
    assert options[0]["meets"]
    assert options[-1]["price"] is None  # what does not fit has none
    assert any(record.get("gain_s", 0) > 0 for record in records)
    shown = text("plan", str(path), "--top", "2")
    assert "binds:" in shown
    assert "next:" in shown
    assert "more with --top" in shown
    path.write_text(PLAN.replace("ttft_s = 0.5", "ttft_s = 1e-6"))
    assert "nothing meets the target" in text("plan", str(path))


def test_plots_are_svg_with_what_they_show(tmp_path: Path) -> None:
    def drawn(*arguments: str) -> ElementTree.Element:
        path = tmp_path / "a.svg"
        text(*arguments, "--plot", str(path))
        return ElementTree.parse(path).getroot()

    def labels(root: ElementTree.Element) -> str:
        return " ".join(each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}text"))

    three = drawn("plot", "Llama-3.1-405B", "Llama-3.1-70B", "DeepSeek-V3")
    assert len(list(three.iter("{http://www.w3.org/2000/svg}polyline"))) == 3
    for star in ("T* 966", "T* 1,932", "T* 64"):
        assert star in labels(three)
    for line in three.iter("{http://www.w3.org/2000/svg}polyline"):
        places = [tuple(map(float, place.split(","))) for place in line.attrib["points"].split()]
        assert len(places) > 50
        assert all(64 <= x <= 720 and 0 <= y <= 400 for x, y in places)
        assert all(one[1] >= other[1] for one, other in pairwise(places))  # κ_crit rises with T
    one = drawn("show", "Mistral-7B", "--cached", "1000", "--new", "10")
    assert "K = 1,000, T = 10" in labels(one)
    assert len(list(one.iter("{http://www.w3.org/2000/svg}circle"))) == 1
    trace = tmp_path / "t.csv"
    trace.write_text("cached,new\n3200,20\n0,500\n57000,12\n")
    spread = drawn("workload", str(trace), "--model", "Llama-3.1-70B")
    assert "κ_crit(20)" in labels(spread)
    assert "not an SVG" in text("plot", "Mistral-7B", "--plot", str(tmp_path / "a.gif"), code=2)


def test_a_file_that_is_written_is_named_and_one_that_cannot_be_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"written to {tmp_path / 'kappa.svg'}" in text("plot", "Mistral-7B")
    assert f"written to {tmp_path / 'b.svg'}" in text("plot", "Mistral-7B", "--out", "b.svg")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.svg", "kappa.svg"]
    for command in (("plot", "Mistral-7B"), ("calibrate", str(tmp_path))):
        assert "is not there, or takes no files" in text(*command, "--out", str(tmp_path / "no" / "a.svg"), code=2)
