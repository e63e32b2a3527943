"""A load for ``server.py``: several clients, each with a conversation of its own, and what they saw.

python examples/load.py --clients 4 --turns 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx


def converse(url: str, name: str, turns: int, words: int, most: int) -> list[dict[str, Any]]:
    """One client; what each of its turns did, with ``first_s``, the seconds until the first piece of text."""
    seen = []
    with httpx.Client(base_url=url, timeout=600) as client:
        for turn in range(turns):
            body = {"conversation": name, "message": f"{turn} " + "lorem ipsum " * (words // 2), "max_tokens": most}
            begun, first = time.perf_counter(), None
            with client.stream("POST", "/chat", json=body) as answer:
                answer.raise_for_status()
                for line in answer.iter_lines():
                    value = json.loads(line)
                    if "error" in value:
                        raise RuntimeError(f"the server answered: {value['error']}")
                    if first is None:
                        first = time.perf_counter() - begun
                    if value.get("done"):
                        seen.append({"first_s": first, **value})
    return seen


def summary(turn: int, rows: list[dict[str, Any]]) -> str:
    """A line about one turn of all clients, with the server's reason where nothing was reused."""
    reused = sum(row["tokens_reused"] for row in rows) / sum(row["tokens"] for row in rows)
    first = statistics.median(row["first_s"] for row in rows)
    ttft = statistics.median(row["ttft_s"] for row in rows)
    line = f"turn {turn}: {reused:.0%} of prompt tokens reused, prefill {ttft:.3f} s, first text after {first:.3f} s"
    return line if reused else f"{line} ({rows[0]['why']})"


def main() -> None:
    """Run it, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--words", type=int, default=200, help="of each message")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer, at most")
    parser.add_argument("--name", default=f"load-{int(time.time())}", help="of the conversations")
    given = parser.parse_args()
    with ThreadPoolExecutor(given.clients) as pool:
        jobs = [
            pool.submit(converse, given.url, f"{given.name}-{i}", given.turns, given.words, given.tokens)
            for i in range(given.clients)
        ]
        try:
            seen = [job.result() for job in jobs]
        except (RuntimeError, httpx.HTTPError) as error:
            sys.exit(f"{given.url}: {error}")
    for turn in range(given.turns):
        print(summary(turn + 1, [client[turn] for client in seen if len(client) > turn]))


if __name__ == "__main__":
    main()
