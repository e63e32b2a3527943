"""``kvtier kappa``: what a hit is worth on a machine, from a model's sizes and the machine's rates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np
from rich.padding import Padding
from rich.table import Table

from kvtier import kappa as model_of_kappa
from kvtier.cli.calibrate import calibrate
from kvtier.cli.options import NewFile
from kvtier.cli.output import console, emit, json_option, pairs, size, time, write
from kvtier.errors import ConfigError
from kvtier.kappa import HardwareSpec, LinkSpec, ModelSpec
from kvtier.kappa.article import cells, example
from kvtier.kappa.catalog import Catalog, catalog
from kvtier.kappa.chart import crit_chart, share_chart
from kvtier.kappa.hardware import Convention
from kvtier.kappa.plan import Option, Plan, advise
from kvtier.kappa.workload import read_trace, report

__all__ = ["kappa"]

_Command = TypeVar("_Command", bound=Callable[..., object])


@click.group()
def kappa() -> None:
    """Predict the time to the first token: load a cached prefix, compute it again, or both at once."""


kappa.add_command(calibrate)


@dataclass(frozen=True)
class _Setting:
    """A model on a machine."""

    model: ModelSpec
    hardware: HardwareSpec
    link: LinkSpec
    convention: Convention


def _setting(command: _Command) -> _Command:
    """The options that name a machine and a model's form."""
    for option in reversed(
        [
            click.option("--hw", "hardware", default="H100-SXM", show_default=True, help="The GPU."),
            click.option("--link", default="PCIe5 x16", show_default=True, help='The link to it, or a rate: "55GB/s".'),
            click.option("--kv", default="bf16", show_default=True, help="The KV dtype: bf16, fp8, int8."),
            click.option(
                "--weight-bytes", default=2.0, show_default=True, help="Bytes of one parameter as streamed by the GPU."
            ),
            click.option(
                "--mfu", default=1.0, show_default=True, help="Share of the dense peak that a prefill reaches."
            ),
            click.option(
                "--convention",
                type=click.Choice(["dense", "paper"]),
                default="dense",
                show_default=True,
                help="What FLOP/s are: the dense peak, or the 2:4-sparse one as in the paper.",
            ),
            click.option(
                "--specs",
                type=click.Path(path_type=Path, dir_okay=False),
                help="A TOML file with models, hardware and links of your own.",
            ),
        ]
    ):
        command = option(command)
    return command


def _resolve(
    model: str,
    hardware: str,
    link: str,
    kv: str,
    weight_bytes: float,
    mfu: float,
    convention: Convention,
    specs: Path | None,
) -> _Setting:
    known: Catalog = catalog() if specs is None else catalog().extended(specs)
    if model.startswith(("/", "./", "../")) and not Path(model).exists():
        raise ConfigError(
            f"{model}: no such directory; give one with config.json, or the name of a model in the catalog"
        )
    found = ModelSpec.from_config(Path(model)) if Path(model).exists() else known.model(model)
    found = replace(found.with_kv(kv), weight_bytes=weight_bytes)
    rate = link.lower().endswith("b/s")
    return _Setting(
        found,
        known.hardware(hardware).with_mfu(mfu),
        LinkSpec.named(link) if rate else known.link(link),
        convention,
    )


def _request(command: _Command) -> _Command:
    for option in (
        click.option("--new", default=128, show_default=True, help="New tokens, T."),
        click.option("--cached", default=65536, show_default=True, help="Cached tokens, K."),
    ):
        command = option(command)
    return command


def _drawing(command: _Command) -> _Command:
    return click.option("--plot", type=NewFile(), help="Draw it into this SVG file.")(command)


def _draw(path: Path, svg: str) -> None:
    if path.suffix.lower() != ".svg":
        raise ConfigError(f"{path} is not an SVG file; allowed are names that end in .svg")
    write(path, svg)


@kappa.command()
@click.argument("models", nargs=-1, required=True)
@_setting
@click.option(
    "--out",
    "--plot",
    type=NewFile(),
    default="kappa.svg",
    show_default=True,
    help="The SVG file to write; the default is in the current directory.",
)
def plot(models: tuple[str, ...], out: Path, **machine: Any) -> None:
    """Draw κ_crit against T for MODELS, with their T*, into an SVG file."""
    found = [_resolve(model, **machine) for model in models]
    if found[0].convention != "dense":
        raise ConfigError("--convention paper is not for predictions: leave it out")
    _draw(out, crit_chart([each.model for each in found], found[0].hardware, found[0].link))


@kappa.command()
@click.argument("model")
@_setting
@_request
@_drawing
@json_option
def show(model: str, cached: int, new: int, plot: Path | None, as_json: bool, **machine: Any) -> None:
    """Show the sizes, κ and the times to the first token of MODEL: a name in the catalog, or a directory with config.json."""
    at = _resolve(model, **machine)
    record = _show(at, cached, new)
    if plot is not None:
        _draw(plot, crit_chart([at.model], at.hardware, at.link, (cached, new)))
    if as_json:
        emit(record)
        return
    rows = [
        ("model", record["model"]),
        ("hardware, link", f"{record['hardware']}, {record['link']}"),
        ("KV a token", f"{record['kv_bytes_per_token']:,} B ({record['kv_dtype']})"),
        ("active parameters", f"{record['n_active'] / 1e9:.2f}e9 without embedding and head"),
        ("operations", f"{record['flops'] / 1e12:.4g} TFLOP"),
        ("weights streamed", size(record["weight_bytes"])),
        ("κ_M", f"{record['kappa_m'] / 1e6:.4g} MFLOP/B"),
        ("κ_HW", f"{record['kappa_hw'] * 1e6:.4g} B/MFLOP ({at.convention})"),
        (
            "κ_crit",
            f"{_number(record['kappa_crit'])} at T = {new}; {_number(record['kappa_turn'])} with the weights' streaming",
        ),
        ("T*", f"{record['t_star']:.0f} tokens"),
        ("κ_ratio", f"{cached / new:.4g}"),
        ("load", time(record["t_load"])),
        ("compute", f"{time(record['t_compute'])} ({record['compute_bound']} bind)"),
        ("TTFT, load then compute", time(record["ttft_serial"])),
        ("TTFT, layer by layer", time(record["ttft_pipelined"])),
        ("TTFT, best split", f"{time(record['ttft_split'])} (the first {record['split_at']:,} tokens computed)"),
        ("TTFT, all computed", time(record["ttft_recompute"])),
    ]
    console.print(pairs(rows))
    console.print(_caveat(at), style="dim")


def _show(at: _Setting, cached: int, new: int) -> dict[str, Any]:
    model, hardware, link, convention = at.model, at.hardware, at.link, at.convention
    if new < 1:
        raise ConfigError(f"--new {new} is not allowed; at least the last token of a prompt is computed")
    done = model_of_kappa.compute(model, hardware, cached, new, convention=convention)
    t_compute, t_load = float(done.total), model_of_kappa.kv_bytes(model, cached) / link.read
    best = model_of_kappa.split(model, hardware, link, cached, new, convention=convention)
    layered = model_of_kappa.recurrence(*model_of_kappa.layer_times(model, hardware, link, cached, new, convention))
    again = model_of_kappa.compute(model, hardware, 0, cached + new, convention=convention)
    return {
        "model": model.name,
        "hardware": hardware.name,
        "link": link.name,
        "kv_dtype": model.kv.dtype,
        "convention": convention,
        "mfu": hardware.mfu,
        "cached": cached,
        "new": new,
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "load_bytes": model_of_kappa.kv_bytes(model, cached),
        "flops": done.flops,
        "weight_bytes": done.weight_bytes,
        "n_active": model.n_active,
        "n_total": model.n_total,
        "kappa_m": model_of_kappa.kappa_m(model),
        "kappa_hw": model_of_kappa.kappa_hw(hardware, link, convention),
        "kappa_crit": model_of_kappa.kappa_crit(model, hardware, link, new, convention),
        "kappa_turn": model_of_kappa.kappa_turn(model, hardware, link, new, convention),
        "kappa_ratio": cached / new,
        "t_star": model_of_kappa.t_star(model, hardware, link, convention),
        "t_load": t_load,
        "t_compute": t_compute,
        "compute_bound": "weights" if done.streaming else "products",
        "ttft_serial": float(model_of_kappa.serial(t_load, t_compute).total),
        "ttft_pipelined": float(model_of_kappa.pipelined(t_load, t_compute, model.layers).total),
        "ttft_pipelined_layers": float(layered.total),
        "ttft_split": float(best.total),
        "split_at": int(best.at),
        "ttft_recompute": float(again.total),
    }


@kappa.command()
@click.argument("model")
@_setting
@_request
@click.option("--generated", default=0, show_default=True, help="Tokens generated, O: their KV is written back too.")
@click.option("--gpus", default=1, show_default=True, help="Tensor-parallel GPUs, each with its own link.")
@click.option(
    "--latents",
    type=click.Choice(["replicated", "broadcast"]),
    default="replicated",
    show_default=True,
    help="How several GPUs get the latents of MLA.",
)
@click.option("--fabric", default=None, help='Rate between the GPUs, one way, such as "450GB/s".')
@click.option("--both", default=None, help='What the link reaches in both directions together, such as "83GB/s".')
@click.option("--nvme", default=0.0, show_default=True, help="Share of the prefix that lies on NVMe, 0 to 1.")
@click.option("--nvme-link", default="13GB/s", show_default=True, help="The drive: a rate, or a name in the catalog.")
@json_option
def explain(
    model: str,
    cached: int,
    new: int,
    generated: int,
    gpus: int,
    latents: model_of_kappa.parallel.Latents,
    fabric: str | None,
    both: str | None,
    nvme: float,
    nvme_link: str,
    as_json: bool,
    **machine: Any,
) -> None:
    """Explain one request on MODEL: every term of its cost, and what adds up to the time to its first token."""
    at = _resolve(model, **machine)
    if not 0 <= nvme <= 1:
        raise ConfigError(f"--nvme {nvme} is not a share; allowed is 0 to 1")
    if both is not None:
        at = replace(at, link=replace(at.link, both=LinkSpec.named(both).read))
    record = _show(at, cached, new)
    operations = model_of_kappa.flops(at.model, cached, new)
    drive = LinkSpec.named(nvme_link)
    held = model_of_kappa.kv_bytes(at.model, cached)
    parts = [
        model_of_kappa.Part("dram", held * (1 - nvme), at.link.read),
        model_of_kappa.Part("nvme", held * nvme, min(drive.read, at.link.read)),
    ]
    loaded = model_of_kappa.load(parts, concurrent=True, shared_rate=at.link.read)
    together = model_of_kappa.tensor_parallel(
        at.model,
        at.hardware,
        at.link,
        gpus,
        cached,
        new,
        latents=latents,
        fabric=None if fabric is None else LinkSpec.named(fabric).read,
        convention=at.convention,
    )
    blocking = model_of_kappa.write_back(at.model, at.link, new, generated, loaded.total, blocking=True)
    beside = model_of_kappa.write_back(at.model, at.link, new, generated, loaded.total)
    best = model_of_kappa.split(at.model, at.hardware, at.link, cached, new, convention=at.convention)
    record |= {
        "flops_terms": {
            name: getattr(operations, name)
            for name in ("projections", "ffn", "experts", "router", "attention", "latent_up", "head")
        },
        "attention_form": ("absorbed" if operations.absorbed else "decompressed") if at.model.latent else "heads",
        "t_products": operations.total / at.hardware.flops(at.convention),
        "t_weights": record["weight_bytes"] / at.hardware.hbm_bandwidth,
        "load_by_tier": loaded.seconds,
        "load_binds": loaded.binds,
        "t_load_tiers": loaded.total,
        "ttft_tiers": float(model_of_kappa.serial(loaded.total, record["t_compute"]).total),
        "split_prefix_compute": best.prefix_compute,
        "split_load": best.load,
        "split_new_compute": best.new_compute,
        "write_bytes": blocking.bytes,
        "write_blocking_s": blocking.added,
        "write_async_added_s": float(beside.added),
        "write_link_busy_s": beside.seconds,
        "gpus": gpus,
        "kv_replicas": together.replicas,
        "gpu_load_bytes": together.load_bytes,
        "gpu_load_s": together.load_s,
        "gpu_exchange_s": together.exchange,
        "gpu_compute_s": float(together.compute_s),
        "gpu_reduce_s": together.reduce,
        "gpu_ttft_serial": float(together.load_s + together.compute_s),
    }
    if as_json:
        emit(record)
        return
    total = operations.total
    console.print(
        f"{record['model']} on {record['hardware']}, {record['link']}: K = {cached:,}, T = {new:,}", style="bold"
    )
    rows = [
        (f"operations: {name.replace('_', ' ')}", _work(value, total))
        for name, value in record["flops_terms"].items()
        if value
    ]
    rows += [
        ("attention runs over", record["attention_form"]),
        ("products", time(record["t_products"])),
        ("weights streamed", f"{time(record['t_weights'])} for {size(record['weight_bytes'])}"),
        ("compute: the longer of the two", time(record["t_compute"])),
        *((f"load from {name}", f"{time(seconds)}") for name, seconds in loaded.seconds.items() if seconds),
        ("load", f"{time(loaded.total)}, {loaded.binds} binds, for {size(held)}"),
        (
            "κ_ratio, κ_crit, with weights",
            " / ".join(_number(record[name]) for name in ("kappa_ratio", "kappa_crit", "kappa_turn")),
        ),
        ("TTFT, load then compute", time(record["ttft_tiers"])),
        (
            "TTFT, layer by layer",
            f"{time(record['ttft_pipelined'])} (uniform), {time(record['ttft_pipelined_layers'])} (each layer)",
        ),
        (
            "TTFT, best split",
            (
                f"{time(record['ttft_split'])}: {best.at:,} tokens computed in {time(best.prefix_compute)} beside a load of "
                f"{time(best.load)}, then {time(best.new_compute)}"
            ),
        ),
        ("TTFT, all computed", time(record["ttft_recompute"])),
        (
            "write-back",
            f"{size(blocking.bytes)}: {time(blocking.added)} if it blocks, {time(float(beside.added))} beside a load",
        ),
    ]
    if gpus > 1:
        rows += [
            (
                f"each of {gpus} GPUs loads",
                f"{size(float(together.load_bytes))} in {time(together.load_s)}, {together.replicas} hold the same",
            ),
            (
                "each computes",
                time(float(together.compute_s))
                + ("" if together.reduce is not None else " (without all-reduces: no --fabric)"),
            ),
            ("TTFT, load then compute", time(record["gpu_ttft_serial"])),
        ]
    console.print(pairs(rows))
    console.print(_caveat(at), style="dim")


@kappa.command()
@json_option
def compare(as_json: bool) -> None:
    """Compare the article's tables, cell by cell, with the same figures recomputed, and say where and why they differ."""
    found = cells()
    if as_json:
        for cell in found:
            emit({**asdict(cell), "convention": "paper"})
        return
    for cell in found:
        figures = {
            "published": cell.published,
            "the paper's way": cell.paper,
            "recomputed": cell.recomputed,
            "really": cell.mixed_up,
        }
        shown = ", ".join(f"{name} {_figures(value)}" for name, value in figures.items() if value is not None)
        console.print(f"[bold]{cell.quantity}[/]: {shown} {cell.unit}".rstrip())
        colour = {"reproduced": "green", "published, not reproduced": "yellow"}.get(cell.verdict, "red")
        reason = f": {cell.reason}" if cell.reason else ""
        console.print(Padding(f"[{colour}]{cell.verdict}[/]{reason}", (0, 0, 0, 4)))
    counts = {
        verdict: sum(cell.verdict == verdict for cell in found) for verdict in dict.fromkeys(c.verdict for c in found)
    }
    console.print("; ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    terms = example()
    console.print(
        f"65,536 cached and 32 new tokens of Llama-3.1-405B on an H100: loading takes {time(terms['t_load'])}, the products "
        f"{time(terms['t_flops'])}, streaming the weights {time(terms['t_weights'])}; so loading takes {terms['ratio']:.1f} times as long "
        "as computing",
        style="dim",
    )


@kappa.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--model", required=True, help="A name in the catalog, or a directory with config.json.")
@_setting
@click.option("--block-tokens", default=512, show_default=True, help="Tokens a block of the trace.")
@click.option(
    "--tier", "tiers", multiple=True, help='A further tier, as NAME=RATE or a name in the catalog: "nvme=13GB/s".'
)
@_drawing
@json_option
def workload(
    trace: Path,
    model: str,
    block_tokens: int,
    tiers: tuple[str, ...],
    plot: Path | None,
    as_json: bool,
    **machine: Any,
) -> None:
    """Show the κ_ratio of the requests in TRACE, the share beyond κ_crit, and what each tier would save.

    TRACE is JSON Lines with input_length and hash_ids or runs (gzipped or not), or a CSV with cached and new.
    """
    at = _resolve(model, **machine)
    if at.convention != "dense":
        raise ConfigError("--convention paper is not for predictions: leave it out")
    rates = []
    for text in tiers:
        name, _, rate = text.rpartition("=")
        rates.append((name or rate, LinkSpec.named(rate).read))
    requests = read_trace(trace, block_tokens)
    found = report(requests, at.model, at.hardware, at.link, rates)
    if plot is not None:
        ratios = model_of_kappa.kappa_ratio(requests.cached, requests.new)
        middle = max(1, round(float(np.median(requests.new))))
        crit = model_of_kappa.kappa_crit(at.model, at.hardware, at.link, middle)
        title = f"κ_ratio of {found.name}; κ_crit of {at.model.name} on {at.hardware.name}, {at.link.name}"
        _draw(plot, share_chart(title, ratios, requests.weight, [(crit, f"κ_crit({middle:,})")]))
    if as_json:
        plain = {key: value for key, value in asdict(found).items() if key not in ("quantiles", "tiers", "name")}
        emit(
            {
                "trace": found.name,
                "model": at.model.name,
                "hardware": at.hardware.name,
                "link": at.link.name,
                **plain,
                **{f"kappa_p{round(100 * q)}": value for q, value in found.quantiles.items()},
            }
        )
        for tier in found.tiers:
            emit({"trace": found.name, **asdict(tier), "saved": tier.saved})
        return
    console.print(
        f"{found.name}: {found.requests:,} requests, {found.token_hit:.1%} of their tokens cached at best", style="bold"
    )
    quantiles = ", ".join(f"p{round(100 * q)} {_number(value)}" for q, value in found.quantiles.items())
    console.print(
        pairs(
            [
                ("κ_ratio", quantiles),
                ("beyond κ_crit(T)", f"{found.beyond_crit:.1%} of the requests"),
                ("beyond it with the weights", f"{found.beyond_turn:.1%}"),
                ("TTFT, all computed", f"{time(found.tiers[0].recompute_s / found.requests)} a request"),
            ]
        )
    )
    table = Table(box=None)
    for name in ("tier", "rate", "loading is faster", "saved a request", "of the TTFT"):
        table.add_column(name, justify="left" if name == "tier" else "right")
    for tier in found.tiers:
        table.add_row(
            tier.tier, f"{size(tier.rate)}/s", f"{tier.faster:.1%}", time(tier.mean_saved_s), f"{tier.saved:.1%}"
        )
    console.print(table)
    console.print(_caveat(at), style="dim")


@kappa.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--top", default=8, show_default=True, help="Deployments to show.")
@json_option
def plan(file: Path, top: int, as_json: bool) -> None:
    """Rank hardware, links, KV dtypes and tier sizes for the model, traffic, target and prices in the TOML FILE."""
    asked = Plan.from_toml(file)
    advice = advise(asked)
    if as_json:
        for rank, option in enumerate(advice.ranked, 1):
            emit({"rank": rank, **asdict(option)})
        for upgrade in advice.upgrades:
            record = {"change": upgrade.change, "extra_price": upgrade.extra, "gain_s": upgrade.gain_s}
            emit({**record, "gain_per_unit": upgrade.gain_per_unit, "meets": upgrade.option.meets})
        return
    console.print(
        f"{asked.model.name}: {asked.requests_per_s:g} requests/s, TTFT within {time(asked.ttft_s)} for {asked.percentile:.0%}",
        style="bold",
    )
    for rank, option in enumerate(advice.ranked[:top], 1):
        mark = "[green]✓[/]" if option.meets else "[yellow]-[/]" if option.fits else "[red]✗[/]"
        console.print(f"{mark} {rank}. {option.label}")
        console.print(Padding(_figures_of(option), (0, 0, 0, 4)), style="dim")
    if len(advice.ranked) > top:
        console.print(f"{len(advice.ranked) - top} more with --top", style="dim")
    best = advice.best
    if not best.fits:
        console.print("nothing fits into the GPUs' memory: give more GPUs an instance, or a smaller KV dtype")
    elif not best.meets:
        console.print(
            f"nothing meets the target; nearest is the first, where {best.binds} bind{'' if best.binds == 'weights' else 's'}"
        )
    for upgrade in advice.upgrades[:3]:
        cost = f"{upgrade.extra:.2f} more an hour" if upgrade.extra > 0 else f"{-upgrade.extra:.2f} less an hour"
        console.print(f"next: {upgrade.change}: TTFT {time(upgrade.gain_s)} shorter for {cost}")
    console.print(
        "service times, without queueing, decoding and (unless fabric_gbs is given) all-reduces between GPUs",
        style="dim",
    )


def _figures_of(option: Option) -> str:
    if not option.fits:
        return "weights and the longest request do not fit into the GPUs' memory"
    hits = " and ".join(f"{share:.0%} of the tokens from {kind}" for kind, share in option.hits.items() if share)
    return (
        f"TTFT {time(option.ttft_s)}, mean {time(option.mean_ttft_s)}; {option.instances} instance"
        f"{'' if option.instances == 1 else 's'}, {option.price:.2f} an hour; {hits or 'nothing loaded'}; binds: {option.binds}"
    )


def _caveat(at: _Setting) -> str:
    if at.convention == "paper":
        return "FLOP/s by the paper's convention, the 2:4-sparse peak: no prefill reaches it"
    share = "the dense peak" if at.hardware.mfu == 1 else f"{at.hardware.mfu:.0%} of the dense peak"
    return f"computed from nominal rates at {share} ({at.hardware.dense_flops / 1e12:.0f} TFLOP/s); {at.link.name}: {at.link.source}"


def _number(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.4g}"


def _work(value: float, total: float) -> str:
    return f"{value / 1e12:.4g} TFLOP, {value / total:.1%}"


def _figures(value: Any) -> str:
    if value is None:
        return ""
    return ", ".join(f"{each:.4g}" for each in np.atleast_1d(value))
