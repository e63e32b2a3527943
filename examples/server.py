"""A small chat server that embeds kvtier: streamed answers, conversations that outlive a restart, and so does their KV.

    pip install 'kvtier[server]'
    python examples/server.py --model .cache/smollm2 --directory /mnt/nvme/chat
    curl -N localhost:8000/chat -d '{"conversation": "a", "message": "What is an assert statement?"}'

``POST /chat`` takes ``conversation`` (a name of letters, digits, - and _), ``message`` and ``max_tokens`` (default 128), and
answers with JSON Lines: ``{"text": ...}`` for each piece, then ``{"done": true, ...}`` with what the prefill did.
``GET /conversations/NAME`` gives the messages so far, ``GET /metrics`` the store's and the server's figures for Prometheus.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import re
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from kvtier import Dram, Nvme, Store
from kvtier.errors import KvtierError
from kvtier.prefill import PrefillEngine, namespace

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
END = "<|im_end|>\n"


class Chat:
    """Conversations over one engine. Their text and tokens are files; their KV is the store's matter."""

    def __init__(self, model: Any, tokenizer: Any, directory: Path, dram: str, nvme: str, **options: Any) -> None:
        (directory / "kv").mkdir(parents=True, exist_ok=True)
        self.tokenizer = tokenizer
        self.directory = directory
        self.store = Store(Dram(dram), Nvme(directory / "kv", nvme))
        self.engine = PrefillEngine(model, namespace(self.store, model), **options)
        ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        self.ends = {end for end in (ends if isinstance(ends, list) else [ends]) if end is not None}
        self.limit = int(model.config.max_position_embeddings)
        self.counters = dict.fromkeys(("requests", "prompt_tokens", "reused_tokens", "generated_tokens"), 0)
        self.ttft_s = 0.0
        self.locks: dict[str, threading.Lock] = {}
        self.lock = threading.Lock()
        self.turns = ThreadPoolExecutor(32, thread_name_prefix="turn")
        self.waiting: set[Future[Any]] = set()
        self.stopping = False

    def stop(self) -> None:
        """Let the answers that are being made end with the token they are at, and let no other begin. Does not block."""
        self.stopping = True
        for future in list(self.waiting):
            future.cancel()

    def close(self) -> None:
        """Stop, and write back what is on its way."""
        self.stop()
        self.turns.shutdown()
        self.engine.close()
        self.store.close()

    def load(self, name: str) -> dict[str, Any]:
        """A conversation: ``tokens`` and ``messages``."""
        path = self.directory / f"{name}.json"
        if not path.exists():
            return {"tokens": [], "messages": []}
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def save(self, name: str, conversation: Mapping[str, Any]) -> None:
        """Keep a conversation, whole or as it was."""
        part = self.directory / f"{name}.part"
        part.write_text(json.dumps(conversation), encoding="utf-8")
        part.rename(self.directory / f"{name}.json")

    def stream(self, name: str, message: str, most: int) -> AsyncIterator[str]:
        """One turn, as lines. A client that leaves will find the answer in the conversation."""
        loop, lines = asyncio.get_running_loop(), asyncio.Queue[str | None]()

        def tell(line: str | None) -> None:
            loop.call_soon_threadsafe(lines.put_nowait, line)

        def pump() -> None:
            try:
                for line in self.answer(name, message, most):
                    tell(line)
            except CancelledError:
                tell(self._line({"error": "the server ends: ask again"}))
            except Exception as error:
                tell(self._line({"error": str(error)}))
                if not isinstance(error, KvtierError):
                    logging.exception("a turn failed")
            finally:
                tell(None)

        async def told() -> AsyncIterator[str]:
            while (line := await lines.get()) is not None:
                yield line

        self.turns.submit(pump)
        return told()

    def answer(self, name: str, message: str, most: int) -> Iterator[str]:
        """One turn, as lines. Blocks while the model computes; one turn of a conversation at a time."""
        with self.lock:
            turn = self.locks.setdefault(name, threading.Lock())
        with turn:
            conversation = self.load(name)
            tokens = [*conversation["tokens"], *self.tokenizer.encode(TURN.format(message))]
            if len(tokens) + most > self.limit:
                yield self._line({"error": f"the conversation is full: {len(tokens)} tokens of {self.limit}"})
                return
            result = self._prefilled(tokens)
            report, answer, said = result.report, [], ""
            try:
                for token in self.engine.generate(tokens, most, stop=self.ends, after=result):
                    if self.stopping:
                        break
                    answer.append(token)
                    text = self.tokenizer.decode(answer, skip_special_tokens=True)
                    if text.endswith("\ufffd"):
                        continue  # the next token completes the character
                    said, piece = text, text[len(said) :]
                    yield self._line({"text": piece})
            finally:
                said = self.tokenizer.decode(answer, skip_special_tokens=True)
                conversation["tokens"] = [*tokens, *answer, *self.tokenizer.encode(END)]
                conversation["messages"] += [
                    {"role": "user", "content": message},
                    {"role": "assistant", "content": said},
                ]
                self.save(name, conversation)
                with self.lock:
                    self.counters["requests"] += 1
                    self.counters["prompt_tokens"] += report.tokens
                    self.counters["reused_tokens"] += report.tokens_reused
                    self.counters["generated_tokens"] += len(answer)
                    self.ttft_s += report.ttft_s
            yield self._line({"done": True, "generated": len(answer), **report.to_dict()})

    def _prefilled(self, tokens: list[int]) -> Any:
        """The prefill of a prompt, in its turn; what it needs is fetched ahead while others run.

        Raises:
            CancelledError: the server ends before.
        """
        future = self.engine.submit(tokens)
        self.waiting.add(future)
        try:
            if self.stopping:
                future.cancel()
            return future.result()
        finally:
            self.waiting.discard(future)

    @staticmethod
    def _line(value: Mapping[str, Any]) -> str:
        return json.dumps(value) + "\n"

    def metrics(self) -> str:
        """The figures in Prometheus' text format."""
        lines = [f"chat_{name}_total {value}" for name, value in self.counters.items()]
        lines.append(f"chat_ttft_seconds_total {self.ttft_s}")
        stats = self.store.stats()
        tiers = stats.pop("tiers")
        lines += [f"kvtier_{name} {value}" for name, value in _flat(stats)]
        for tier, figures in tiers.items():
            lines += [f'kvtier_tier_{name}{{tier="{tier}"}} {value}' for name, value in _flat(figures)]
        return "\n".join([*lines, ""])


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}_")
        elif isinstance(value, int | float):
            yield before + name, float(value)


def create_app(
    model: Any, tokenizer: Any, directory: Path, dram: str = "1GiB", nvme: str = "8GiB", **options: Any
) -> Starlette:
    """The application.

    Args:
        model: a loaded Hugging Face model.
        tokenizer: its tokenizer.
        directory: keeps conversations and KV.
        dram: size of the memory tier.
        nvme: size of the NVMe tier.
        options: of the :class:`kvtier.prefill.PrefillEngine`.
    """
    chat = Chat(model, tokenizer, directory, dram, nvme, **options)

    async def talk(request: Request) -> Response:
        try:
            body = await request.json()
            name, message, most = body["conversation"], body["message"], int(body.get("max_tokens", 128))
            str.encode(message)  # JSON may escape half a character, which no tokenizer takes
        except (ValueError, KeyError, TypeError, OverflowError):
            return JSONResponse({"error": "give JSON with conversation and message"}, 400)
        if not isinstance(name, str) or not NAME.fullmatch(name) or most < 1:
            return JSONResponse({"error": "conversation is 1 to 64 of A-Z a-z 0-9 _ -, message is text"}, 400)
        return StreamingResponse(chat.stream(name, message, most), media_type="application/x-ndjson")

    async def history(request: Request) -> Response:
        name = request.path_params["name"]
        if not NAME.fullmatch(name):
            return JSONResponse({"error": "no such conversation"}, 404)
        return JSONResponse(chat.load(name)["messages"])

    async def metrics(_request: Request) -> Response:
        return PlainTextResponse(chat.metrics(), media_type="text/plain; version=0.0.4")

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        chat.close()

    routes = [
        Route("/chat", talk, methods=["POST"]),
        Route("/conversations/{name}", history),
        Route("/metrics", metrics),
    ]
    app = Starlette(routes=routes, lifespan=lifespan)
    app.state.chat = chat
    return app


class Server(uvicorn.Server):
    """Says where it listens, and ends the answers that are being made when it is told to end."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        for server in self.servers:
            for each in server.sockets:
                host, port = each.getsockname()[:2]
                print(f"listening on http://{host}:{port}", flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ctrl-C, or a signal to end."""
        self.config.app.state.chat.stop()
        super().handle_exit(sig, frame)


def main() -> None:
    """Serve until stopped."""
    from kvtier.cli.model import load

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face model's directory")
    parser.add_argument(
        "--directory", type=Path, required=True, help="keeps conversations and KV: put it on a real drive"
    )
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--dram", default="1GiB")
    parser.add_argument("--nvme", default="8GiB")
    given = parser.parse_args()
    print(f"loading {given.model}", flush=True)
    model, tokenizer = load(given.model)
    app = create_app(model, tokenizer, given.directory, given.dram, given.nvme)
    with suppress(KeyboardInterrupt):  # which it passes on once it has ended
        Server(uvicorn.Config(app, host="127.0.0.1", port=given.port, log_level="warning")).run()


if __name__ == "__main__":
    main()
