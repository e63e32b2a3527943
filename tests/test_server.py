"""`examples/server.py`, as a client sees it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import transformers
import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from test_prefill import build, llama

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from load import converse, summary
from server import Chat, Server, create_app

SCRIPT = Path(__file__).parent.parent / "examples" / "server.py"


class Letters:
    """A tokenizer of bytes."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return bytes(tokens).decode(errors="replace")


@pytest.fixture(scope="module")
def model() -> Any:
    model = build(llama(max_position_embeddings=1024))
    model.generation_config.eos_token_id = None
    return model


@contextmanager
def serving(model: Any, place: Path) -> Iterator[httpx.Client]:
    """A running server, over what the last one in this place left."""
    app = create_app(model, Letters(), place, "8MiB", "64MiB", chunk_tokens=32)
    ready = threading.Event()

    class Ready(Server):
        async def startup(self, *args: Any, **kwargs: Any) -> None:
            await super().startup(*args, **kwargs)
            ready.set()

    server = Ready(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    assert ready.wait(60)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(60)


def say(client: httpx.Client, name: str, message: str, most: int = 24) -> tuple[str, dict[str, Any]]:
    """The streamed text, and the last line."""
    text, last = "", {}
    body = {"conversation": name, "message": message, "max_tokens": most}
    with client.stream("POST", "/chat", json=body) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            last = json.loads(line)
            text += last.get("text", "")
    return text, last


def metrics(client: httpx.Client) -> dict[str, float]:
    text = client.get("/metrics").text
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in text.splitlines())}


def test_conversations_outlive_a_restart_and_so_does_their_kv(model: Any, tmp_path: Path) -> None:
    with serving(model, tmp_path / "one") as client:
        first = [say(client, "a", f"turn {i} " + "x" * 60) for i in range(4)]
    assert first[0][1]["tokens_reused"] == 0
    assert all(last["done"] and last["generated"] == 24 for _, last in first)
    # The same turns, with a restart in the middle.
    with serving(model, tmp_path / "two") as client:
        second = [say(client, "a", f"turn {i} " + "x" * 60) for i in range(2)]
        history = client.get("/conversations/a").json()
    with serving(model, tmp_path / "two") as client:
        assert client.get("/conversations/a").json() == history
        assert [message["role"] for message in history] == ["user", "assistant"] * 2
        second += [say(client, "a", f"turn {i} " + "x" * 60) for i in range(2, 4)]
        after = second[2][1]
        assert after["tokens_reused"] + after["tokens_front"] >= 192
        assert set(after["bytes"]) <= {"nvme"}
        figures = metrics(client)
    assert [text for text, _ in first] == [text for text, _ in second]
    assert figures["chat_requests_total"] == 2
    assert figures["chat_reused_tokens_total"] >= after["tokens_reused"]
    assert figures["chat_generated_tokens_total"] == 48
    assert figures['kvtier_tier_size_bytes{tier="nvme"}'] == 64 << 20
    assert figures["kvtier_blocks"] > 0


def test_it_says_where_it_listens(model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(model, tmp_path) as client:
        assert f"listening on {str(client.base_url).rstrip('/')}\n" in capsys.readouterr().out


def test_a_server_that_ends_keeps_what_was_said_and_begins_nothing(model: Any, tmp_path: Path) -> None:
    class Ends(Letters):
        def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
            if len(tokens) == 5:
                chat.stop()
            return super().decode(tokens, skip_special_tokens)

    chat = Chat(model, Ends(), tmp_path, "8MiB", "64MiB", chunk_tokens=32)
    last = json.loads(list(chat.answer("a", "hello", 500))[-1])
    assert (last["done"], last["generated"]) == (True, 5)
    assert [message["role"] for message in chat.load("a")["messages"]] == ["user", "assistant"]
    with pytest.raises(CancelledError):
        list(chat.answer("a", "more", 5))
    chat.close()


def test_several_clients_at_once(model: Any, tmp_path: Path) -> None:
    with serving(model, tmp_path / "alone") as client:
        expected = {name: say(client, name, f"I am {name}", 16)[0] for name in "abcd"}
    with serving(model, tmp_path / "together") as client, ThreadPoolExecutor(4) as pool:
        jobs = {name: pool.submit(say, client, name, f"I am {name}", 16) for name in "abcd"}
        assert {name: job.result(60)[0] for name, job in jobs.items()} == expected
        seen = converse(str(client.base_url), "load", turns=3, words=40, most=4)  # the load script's client
    assert [row["generated"] for row in seen] == [4, 4, 4]
    assert seen[2]["tokens_matched"] > seen[1]["tokens_matched"] > 0
    short = {**seen[0], "tokens_reused": 0, "why": "less than a chunk"}
    assert summary(1, [short]).endswith("(less than a chunk)")
    assert "chunk" not in summary(2, [{**short, "tokens_reused": 5}])


def test_a_client_that_leaves_finds_the_answer_later(model: Any, tmp_path: Path) -> None:
    with serving(model, tmp_path) as client:
        body = {"conversation": "a", "message": "hello " * 20, "max_tokens": 60}
        with client.stream("POST", "/chat", json=body) as answer:
            next(answer.iter_lines())
        _, last = say(client, "a", "still there?")  # waits for the turn that was left
        assert last["done"]
        history = client.get("/conversations/a").json()
    assert [message["role"] for message in history] == ["user", "assistant"] * 2
    assert len(history[1]["content"]) > 0


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"{}",
        b'{"conversation": "../a", "message": "x"}',
        b'{"conversation": "a", "message": 5}',
        b'{"conversation": "a", "message": "\\ud800"}',
        b'{"conversation": "a", "message": "x", "max_tokens": Infinity}',
    ],
)
def test_bad_requests_are_refused(model: Any, tmp_path: Path, body: bytes) -> None:
    with serving(model, tmp_path) as client:
        answer = client.post("/chat", content=body)
        assert answer.status_code == 400
        assert "error" in answer.json()


def test_a_turn_that_fails_says_so(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(model, tmp_path) as client:
        with monkeypatch.context() as broken:
            broken.setattr(Letters, "encode", lambda *_: 1 / 0)
            _, last = say(client, "a", "hello")
        assert "division" in last["error"]
        _, last = say(client, "a", "hello")
        assert last["done"]


def test_a_full_conversation_says_so(model: Any, tmp_path: Path) -> None:
    with serving(model, tmp_path) as client:
        _, last = say(client, "a", "y" * 1000)
        assert "full" in last["error"]


@contextmanager
def process(model: Path, place: Path) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """The script itself, as it is started in a shell."""
    options = {"model": model, "directory": place, "port": 0, "dram": "16MiB", "nvme": "64MiB"}
    command = [sys.executable, SCRIPT, *(f"--{name}={value}" for name, value in options.items())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = next((line.split()[-1] for line in server.stdout if line.startswith("listening on ")), None)
        try:
            assert url is not None, "it ended before it listened"
            with httpx.Client(base_url=url, timeout=60) as client:
                yield server, client
        finally:
            server.kill()


def test_the_script_ends_when_it_is_told_to_and_outlives_being_killed(model: Any, tmp_path: Path) -> None:
    saved, place = tmp_path / "model", tmp_path / "chat"
    model.save_pretrained(saved)
    letters = Tokenizer(
        models.BPE({letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(saved)
    with process(saved, place) as (server, client):
        _, first = say(client, "a", "x" * 300)
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) in (0, -signal.SIGTERM)
    assert first["tokens_reused"] == 0
    with process(saved, place) as (server, client):
        _, second = say(client, "a", "more")
        body = {"conversation": "a", "message": "and on", "max_tokens": 500}
        with client.stream("POST", "/chat", json=body) as answer:
            next(answer.iter_lines())
            server.kill()  # in the middle of an answer
            server.wait(60)
    assert second["tokens_matched"] >= 256
    assert second["tokens_reused"] + second["tokens_front"] == 256
    with process(saved, place) as (_, client):
        history = client.get("/conversations/a").json()
        assert [message["content"] for message in history[::2]] == ["x" * 300, "more"]
        _, third = say(client, "a", "again")
        assert third["tokens_matched"] >= 256
        assert metrics(client)["chat_requests_total"] == 1
