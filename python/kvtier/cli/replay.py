"""``kvtier replay``: what a tier of some size would have served of a trace, under each policy."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvtier import kappa
from kvtier.cli.options import NewFile
from kvtier.cli.output import console, emit, json_option, write
from kvtier.config import check_policy
from kvtier.errors import ConfigError
from kvtier.traces import GENERATORS, Trace, read
from kvtier.traces.plot import Point, draw
from kvtier.traces.trace import OFFLINE, POLICIES, Outcome

__all__ = ["replay"]

_SYNTHETIC = "synthetic:"


@click.command()
@click.argument("traces", nargs=-1, required=True, metavar="TRACE...")
@click.option("--policy", default="lru-leaf,s3-fifo-leaf,arc-leaf,min-bypass", show_default=True, help="Names, or all.")
@click.option(
    "--capacity",
    default="0.01,0.02,0.05,0.1,0.2,0.5",
    show_default=True,
    help="Shares of the unique blocks, or blocks (>1).",
)
@click.option(
    "--touch",
    default="rev",
    show_default=True,
    help="A request uses its chain from the tail (rev), the head (fwd), or both in turn (fwd,rev).",
)
@click.option(
    "--block-tokens", type=click.IntRange(min=1), help="Tokens in a block; default: as the file's name says, else 512."
)
@click.option("--part", default="0:1", show_default=True, help="Replay the requests between two shares of each trace.")
@click.option("--skip-bad", is_flag=True, help="Leave out lines that cannot be read, and count them.")
@click.option("--below", help="Capacities of further tiers below, fastest first: shares or blocks, as for --capacity.")
@click.option(
    "--write-budget", type=click.FloatRange(min=0), help="Blocks a day that may be written to the last tier below."
)
@click.option("--plot", type=NewFile(), help="Write an SVG: capacity against token hit ratio.")
@click.option(
    "--price",
    metavar="A[,B]|MODEL,HARDWARE,LINK",
    help="Add seconds_saved: a found prefix of n tokens saves A·n + B·n² seconds of computing (B: attention); or, with "
    "names of kvtier.kappa, what loading it layer by layer over the link saves of the time to the first token.",
)
@json_option
def replay(
    traces: tuple[str, ...],
    policy: str,
    capacity: str,
    touch: str,
    block_tokens: int | None,
    part: str,
    skip_bad: bool,
    below: str | None,
    write_budget: float | None,
    plot: Path | None,
    price: str | None,
    as_json: bool,
) -> None:
    """Replay each TRACE against the store's own policies, without bytes.

    A TRACE is a file (JSON Lines with hash_ids or runs, or a CSV of lengths; gzipped or not), or synthetic:chat,
    synthetic:docqa or synthetic:agent. min and min-bypass know the future: the ceiling.
    """
    names = list(POLICIES) if policy == "all" else [name.strip().lower() for name in policy.split(",")]
    for name in names:
        check_policy("--policy", name, OFFLINE)
    touches = _names("--touch", touch, ("fwd", "rev"))
    shares = [_decimal("--capacity", text) for text in capacity.split(",")]
    lower = [_decimal("--below", text) for text in below.split(",")] if below else []
    begin, _, end = part.partition(":")
    bounds = _decimal("--part", begin), _decimal("--part", end)
    saved = None if price is None else _price(price)
    points: list[Point] = []
    seconds: list[float] = []
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=as_json or not sys.stderr.isatty()) as progress:
        for source in traces:
            trace = _load(source, block_tokens, skip_bad)
            if trace.skipped:
                errors.print(f"{source}: {trace.skipped} bad lines skipped")
            if part != "0:1":
                trace = trace.part(*bounds)
            todo = [(name, way, share) for name in names for way in touches for share in shares]
            task = progress.add_task(trace.name, total=trace.references * len(todo))
            for at, (name, way, share) in enumerate(todo):
                blocks = trace.capacity(share)
                base = at * trace.references
                outcome = trace.replay(
                    name,
                    [blocks, *(trace.capacity(share) for share in lower)],
                    way,
                    lambda done, task=task, base=base: progress.update(task, completed=base + done),  # type: ignore[misc]
                    write_budget=write_budget,
                )
                record: dict[str, object] = {
                    "trace": trace.name,
                    "policy": name,
                    "touch": way,
                    "block_tokens": trace.block_tokens,
                    "capacity_blocks": blocks,
                    "capacity_fraction": float(share) if share <= 1 else blocks / max(1, trace.unique),
                    "plain_block_hit": outcome.plain_block_hit,
                    "prefix_block_hit": outcome.prefix_block_hit,
                    "token_hit": outcome.token_hit,
                    "references_per_second": outcome.references_per_second,
                    "skipped_lines": trace.skipped,
                }
                points.append(
                    Point(trace.name, f"{name} {way}" if len(touches) > 1 else name, blocks, outcome.token_hit)
                )
                if lower:
                    record["tier_block_hit"] = [hits / max(1, outcome.references) for hits in outcome.tier_hits]
                    record["demoted_blocks"] = list(outcome.demoted)
                if saved is not None:
                    seconds.append(saved(trace, outcome))
                    record["seconds_saved"] = seconds[-1]
                if as_json:
                    emit(record)
    if not as_json:
        tables = _tables("token hit ratio", ".4f", points, [point.token_hit for point in points])
        if saved is not None:
            tables += _tables("seconds saved", ",.4g", points, seconds)
        for table in tables:
            console.print(table)
    if plot is not None:
        write(plot, draw(points))


def _load(source: str, block_tokens: int | None, skip_bad: bool) -> Trace:
    if not source.startswith(_SYNTHETIC):
        return read(source, block_tokens=block_tokens, skip_bad=skip_bad)
    name = source.removeprefix(_SYNTHETIC)
    if name not in GENERATORS:
        raise ConfigError(f"{source} was given; allowed are {', '.join(_SYNTHETIC + known for known in GENERATORS)}")
    return GENERATORS[name]()


def _names(option: str, text: str, allowed: tuple[str, ...]) -> list[str]:
    names = [name.strip().lower() for name in text.split(",")]
    for name in names:
        if name not in allowed:
            raise ConfigError(f"{option} {name!r} was given; allowed are {', '.join(allowed)}")
    return names


def _decimal(option: str, text: str) -> Decimal:
    try:
        return Decimal(text.strip())
    except InvalidOperation:
        raise ConfigError(f"{option} {text!r} was given; a number is needed, such as 0.05") from None


def _price(text: str) -> Callable[[Trace, Outcome], float]:
    """What a replay saved, in seconds."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) == 3:
        return _kappa_price(*parts)
    try:
        linear, square = [float(part) for part in parts] + [0.0] * (len(parts) == 1)
    except ValueError:
        linear = square = -1.0
    if not (0 <= linear < math.inf and 0 <= square < math.inf):
        raise ConfigError(
            f"--price {text!r} was given; allowed are one or two numbers of at least 0, such as 2e-5,1e-10, or a model, "
            "hardware and a link that kvtier.kappa knows, such as llama-3.1-8b,h100,pcie5"
        )
    return lambda _, outcome: outcome.saved_s(lambda n: linear * n + square * n * n)


def _kappa_price(model: str, hardware: str, link: str) -> Callable[[Trace, Outcome], float]:
    """Seconds of TTFT by the κ model: all computed, less the found prefix loaded layer by layer beside the computation of
    the rest; nothing where computing it again is as fast. At least a prompt's last token is computed.
    """
    names = kappa.catalog()
    spec, gpu, way = names.model(model), names.hardware(hardware), names.link(link)

    def saved(trace: Trace, outcome: Outcome) -> float:
        prompts = np.asarray(trace.tokens, np.int64)
        found = np.minimum(np.asarray(outcome.hit_tokens, np.int64), np.maximum(prompts - 1, 0))
        prompts, found = prompts[found > 0], found[found > 0]
        if not len(found):
            return 0.0
        again = kappa.compute(spec, gpu, 0, prompts).total
        rest = kappa.compute(spec, gpu, found, prompts - found).total
        loaded = kappa.pipelined(kappa.kv_bytes(spec, found) / way.read, rest, spec.layers).total
        return float(np.maximum(again - loaded, 0).sum())

    return saved


def _tables(what: str, form: str, points: list[Point], values: list[float]) -> list[Table]:
    """A value of each replay: a table a trace, a row a policy, a column a capacity."""
    tables = []
    for trace in dict.fromkeys(point.trace for point in points):
        mine = [point for point in points if point.trace == trace]
        capacities = list(dict.fromkeys(point.blocks for point in mine))
        table = Table(what, *(f"{blocks:,} blocks" for blocks in capacities), title=trace, box=None)
        for column in table.columns[1:]:
            column.justify = "right"
        for name in dict.fromkeys(point.name for point in mine):
            found = {
                point.blocks: value
                for point, value in zip(points, values, strict=True)
                if (point.trace, point.name) == (trace, name)
            }
            table.add_row(name, *(format(found[blocks], form) for blocks in capacities))
        tables.append(table)
    return tables
