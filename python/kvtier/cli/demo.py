"""``kvtier demo``: a real model answers over a long document, cold, from DRAM, and from NVMe after a restart."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvtier.cli import model as models
from kvtier.cli import prompt as prompts
from kvtier.cli.options import cache_option
from kvtier.cli.output import Failure, console, emit, json_option, seconds, size
from kvtier.config import Dram, Nvme
from kvtier.errors import ConfigError
from kvtier.scratch import home, scratch
from kvtier.store import Store

if TYPE_CHECKING:
    import torch

    from kvtier.integrations.transformers import Prefill

__all__ = ["demo", "demo_restart"]

ANSWER_TOKENS = 40
_DTYPE = click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
_CHUNK = click.option(
    "--chunk-tokens", type=click.IntRange(16), default=256, show_default=True, help="Grid of the prefill."
)


@dataclass(frozen=True)
class Row:
    """One run of the same prompt."""

    run: str
    ttft_s: float
    tokens: int
    tokens_reused: int
    bytes: Mapping[str, int]
    load_s: float

    @property
    def load_gbs(self) -> float | None:
        """GB/s from where the blocks were found into the model's own tensors; ``None`` where nothing was loaded."""
        return sum(self.bytes.values()) / self.load_s / 1e9 if self.load_s else None


@click.command()
@click.option(
    "--model",
    "directory",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A Hugging Face model of your own.",
)
@click.option(
    "--text", "text_file", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="A text of your own."
)
@click.option("--question", help="What to ask about the text.")
@click.option(
    "--tokens", type=click.IntRange(64), default=4096, show_default=True, help="Length of the text in tokens."
)
@_DTYPE
@_CHUNK
@cache_option
@json_option
def demo(
    directory: Path | None,
    text_file: Path | None,
    question: str | None,
    tokens: int,
    dtype: str,
    chunk_tokens: int,
    cache: Path,
    as_json: bool,
) -> None:
    """Answer a question over a long text: cold, warm from DRAM, and warm from NVMe in a new process.

    Every answer's logits must be bit-identical to the reference, which computes on the same grid and keeps its KV in
    a Python dict.
    """
    say: Callable[[str], None] = (lambda line: click.echo(line, err=True)) if as_json else console.print
    needs_torch()
    home(cache)
    directory = directory or models.fetch(cache, say)
    text = prompts.read_text(text_file) if text_file else prompts.python_topics()
    question = question or (
        "What is this text about?" if text_file else "In one sentence, what is an assert statement for?"
    )
    model, tokenizer = models.load(directory, dtype)
    prompt = prompts.build(tokenizer, text, question, tokens)
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit and len(prompt) + ANSWER_TOKENS > limit:
        raise ConfigError(
            f"the prompt has {len(prompt)} tokens and the answer {ANSWER_TOKENS}; the model allows {limit}: give fewer --tokens"
        )
    say(f"{directory.name}, {dtype}: a prompt of {len(prompt)} tokens ending in: {question}")
    with scratch(cache, "demo-") as work:
        demonstration = Demonstration(directory, model, prompt, chunk_tokens, dtype, work)
        with _progress(model, 3 * len(prompt), say, bar=console.is_terminal and not as_json) as step:
            demonstration.run(step)
    answer = tokenizer.decode(demonstration.answer, skip_special_tokens=True).strip()
    (_print_json if as_json else _print_table)(demonstration, answer)
    problems = demonstration.problems()
    if problems:
        raise click.ClickException("; ".join(problems))


class Demonstration:
    """The runs over one prompt, and what they gave."""

    def __init__(self, directory: Path, model: Any, prompt: list[int], chunk: int, dtype: str, work: Path) -> None:
        self.directory, self.model, self.prompt, self.chunk, self.dtype, self.work = (
            directory,
            model,
            prompt,
            chunk,
            dtype,
            work,
        )
        self.rows: list[Row] = []
        self.logits: dict[str, torch.Tensor] = {}
        self.answer: list[int] = []
        self.same_answers = True

    def run(self, step: Callable[[str], None]) -> None:
        """Run all of them; ``step`` is told of each before it starts."""
        from kvtier.integrations.reference import DictNamespace
        from kvtier.integrations.transformers import layout_of, namespace

        warm_up(self.model)
        step("cold, unsplit")
        self._unsplit()
        layout = layout_of(self.model)
        with open_store(self.work / "store", layout.bytes_per_token * len(self.prompt)) as store:
            blocks = namespace(store, self.model)
            step("cold, storing")
            self._prefill("cold", blocks)
            step("warm, from DRAM")
            self.answer = decode(self.model, self._prefill("dram-warm", blocks))
            step("flushing to NVMe")
            store.flush()
        step("warm, from NVMe in a new process")
        self._restart()
        step("reference")
        reference = DictNamespace(layout)
        self._prefill("reference-cold", reference)
        self._prefill("reference", reference)

    def _unsplit(self) -> None:
        import torch
        from transformers import DynamicCache

        from kvtier.integrations.transformers import forward

        begun = time.perf_counter()
        logits = forward(self.model, self.prompt, DynamicCache(config=self.model.config))
        taken = time.perf_counter() - begun
        self.rows.append(Row("cold-unsplit", taken, len(self.prompt), 0, {}, 0.0))
        self.logits["cold-unsplit"] = logits.to(torch.float32)

    def _prefill(self, run: str, blocks: Any) -> Prefill:
        from kvtier.integrations.transformers import prefill

        result = prefill(self.model, blocks, self.prompt, chunk_tokens=self.chunk)
        self._add(run, result.report.to_dict(), result.logits)
        return result

    def _restart(self) -> None:
        """The same prompt again, in a new process over the same directory."""
        import safetensors.torch

        job = self.work / "job.json"
        job.write_text(
            json.dumps(
                {
                    "model": str(self.directory),
                    "store": str(self.work / "store"),
                    "prompt": self.prompt,
                    "chunk_tokens": self.chunk,
                    "dtype": self.dtype,
                    "logits": str(self.work / "logits.safetensors"),
                }
            )
        )
        done = subprocess.run(
            [sys.executable, "-m", "kvtier.cli", demo_restart.name or "", str(job)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise Failure(f"the new process ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
        answer = json.loads(done.stdout.splitlines()[-1])
        self._add(
            "nvme-warm", answer["report"], safetensors.torch.load_file(self.work / "logits.safetensors")["logits"]
        )
        self.same_answers = answer["answer"] == self.answer

    def _add(self, run: str, report: Mapping[str, Any], logits: torch.Tensor) -> None:
        self.logits[run] = logits.float()
        load_s = sum(report["load_s"].values())
        self.rows.append(Row(run, report["ttft_s"], report["tokens"], report["tokens_reused"], report["bytes"], load_s))

    def speedup(self, row: Row) -> float:
        """How much sooner than the unsplit cold run."""
        return self.rows[0].ttft_s / row.ttft_s

    def identical(self, run: str) -> bool:
        """Whether a run's logits are those of the reference, bit for bit."""
        import torch

        return torch.equal(self.logits[run], self.logits["reference"])

    def difference(self) -> float:
        """The largest difference of a logit between the reference and the unsplit run."""
        return float((self.logits["reference"] - self.logits["cold-unsplit"]).abs().max())

    def problems(self) -> list[str]:
        """What is not as it must be."""
        checked = ("cold", "dram-warm", "nvme-warm", "reference-cold")
        problems = [f"the logits of {run} differ from the reference" for run in checked if not self.identical(run)]
        tiers = {row.run: set(row.bytes) for row in self.rows}
        problems += [
            f"{run} was served from {tiers[run] or 'nothing'}"
            for run, tier in (("dram-warm", "dram"), ("nvme-warm", "nvme"))
            if tiers[run] != {tier}
        ]
        if not self.same_answers:
            problems.append("the new process gave another answer")
        return problems


@click.command("demo-restart", hidden=True)
@click.argument("job", type=click.Path(path_type=Path, exists=True))
def demo_restart(job: Path) -> None:
    """The part of the demo that runs in a new process."""
    import safetensors.torch

    from kvtier.integrations.transformers import layout_of, namespace, prefill

    task = json.loads(job.read_text())
    model, _ = models.load(Path(task["model"]), task["dtype"])
    warm_up(model)
    with open_store(Path(task["store"]), layout_of(model).bytes_per_token * len(task["prompt"])) as store:
        result = prefill(model, namespace(store, model), task["prompt"], chunk_tokens=task["chunk_tokens"])
    safetensors.torch.save_file({"logits": result.logits.contiguous()}, task["logits"])
    emit({"report": result.report.to_dict(), "answer": decode(model, result)})


def open_store(directory: Path, need: int) -> Store:
    """A store with room for twice the bytes that the prompt needs, in DRAM and in ``directory``."""
    room = 2 * need + (64 << 20)
    directory.mkdir(exist_ok=True)
    return Store(Dram(room), Nvme(directory, room))


def warm_up(model: Any) -> None:
    """Let torch do what it does only once, so that no run pays for it."""
    from transformers import DynamicCache

    from kvtier.integrations.transformers import forward

    cache = DynamicCache(config=model.config)
    forward(model, [1] * 64, cache)
    forward(model, [1] * 16, cache)


def decode(model: Any, start: Prefill) -> list[int]:
    """The tokens of the greedy answer."""
    from kvtier.integrations.transformers import forward

    ends = model.generation_config.eos_token_id
    stop = set(ends if isinstance(ends, list) else [ends])
    logits = start.logits
    tokens: list[int] = []
    while len(tokens) < ANSWER_TOKENS:
        token = int(logits.argmax())
        if token in stop:
            break
        tokens.append(token)
        logits = forward(model, [token], start.cache)
    return tokens


def needs_torch() -> None:
    """Say how to get what the demo needs, where it is missing."""
    try:
        import safetensors
        import torch
        import transformers
    except ImportError as error:
        raise ConfigError(f"the demo needs {error.name}: pip install 'kvtier[demo]'") from error
    del safetensors, torch, transformers


@contextmanager
def _progress(model: Any, tokens: int, say: Callable[[str], None], *, bar: bool) -> Iterator[Callable[[str], None]]:
    """A bar that moves with the tokens that leave each layer of ``model``, up to ``tokens`` through all of them; without
    a terminal, a line a step.
    """
    if not bar:
        begun = time.monotonic()
        yield lambda text: say(f"{time.monotonic() - begun:6.1f} s  {text}")
        return
    layers = list(getattr(model.base_model, "layers", [model]))
    columns = (TextColumn("{task.description:<34}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task("", total=tokens * len(layers))

        def advance(_module: Any, _args: Any, output: Any) -> None:
            hidden_states = output[0] if isinstance(output, tuple) else output
            shown.advance(task, hidden_states.shape[-2])

        hooks = [layer.register_forward_hook(advance) for layer in layers]
        try:
            yield lambda text: shown.update(task, description=text)
        finally:
            for hook in hooks:
                hook.remove()


_NAMES = {
    "cold-unsplit": "cold, unsplit",
    "cold": "cold, storing",
    "dram-warm": "DRAM-warm",
    "nvme-warm": "NVMe-warm, new process",
}


def _print_table(shown: Demonstration, answer: str) -> None:
    table = Table(title="time to first token (TTFT), and tokens reused", title_justify="left")
    for name in ("run", "TTFT", "reused", "from", "loaded", "rate", "speed-up"):
        table.add_column(name, justify="left" if name in ("run", "from") else "right")
    for row in shown.rows:
        if row.run in _NAMES:
            gbs = row.load_gbs
            table.add_row(
                _NAMES[row.run],
                seconds(row.ttft_s),
                f"{row.tokens_reused} of {row.tokens}",
                ", ".join(row.bytes) or "-",
                size(sum(row.bytes.values())) if row.bytes else "-",
                "-" if gbs is None else f"{gbs:.2f} GB/s",
                f"{shown.speedup(row):.1f}x",
            )
    console.print(table)
    console.print("the answer:", style="bold")
    console.print(answer, markup=False)
    if not shown.problems():
        console.print("[green]✓[/] all logits bit-identical to the reference (same chunks, KV in a plain dict)")
    console.print(f"  largest difference of a logit to the unsplit run: {shown.difference():.2g}")


def _print_json(shown: Demonstration, answer: str) -> None:
    for row in shown.rows:
        emit({**asdict(row), "load_gbs": row.load_gbs, "speedup": shown.speedup(row)})
    emit(
        {
            "run": "check",
            "answer": answer,
            "bit_identical": {
                run: shown.identical(run) for run in ("cold", "dram-warm", "nvme-warm", "reference-cold")
            },
            "same_answer": shown.same_answers,
            "max_abs_difference_to_unsplit": shown.difference(),
        }
    )
