"""A deployment advisor: which GPU, link, KV dtype and tier sizes serve given traffic in time, and what they cost.

It compares service times, without queueing and without decoding: what a prefill takes on an instance, and how many
instances the arrivals fill.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.config import parse_size
from kvtier.errors import ConfigError
from kvtier.kappa.catalog import Catalog, catalog, load_toml
from kvtier.kappa.cost import kv_bytes
from kvtier.kappa.hardware import HardwareSpec, LinkSpec
from kvtier.kappa.model import ModelSpec
from kvtier.kappa.number import positive, whole
from kvtier.kappa.parallel import tensor_parallel
from kvtier.kappa.workload import Workload, read_trace

__all__ = ["Advice", "Gpus", "Option", "Plan", "TierChoice", "Upgrade", "advise"]

_SLICES = 16  # of a class's working set, to spread its reuse distances evenly


@dataclass(frozen=True)
class TierChoice:
    """A tier that could be bought, for one instance.

    Args:
        kind: its name.
        rate: bytes/s towards the GPU; the link caps it.
        sizes: capacities to try, in bytes; 0 is none.
        price: for one byte and hour.
    """

    kind: str
    rate: float
    sizes: tuple[int, ...]
    price: float


@dataclass(frozen=True)
class Gpus:
    """The GPUs of one instance.

    Args:
        spec: one of them.
        count: how many, tensor-parallel.
        price: of one, an hour.
        fabric: bytes/s between them; None (default) leaves the all-reduces out.
        links: names of the links they can have; None (default) for all of the plan.
    """

    spec: HardwareSpec
    count: int
    price: float
    fabric: float | None = None
    links: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Plan:
    """What is asked. Prices are in one currency, for an hour."""

    model: ModelSpec
    """With bf16 KV."""
    workload: Workload
    """The traffic's mix."""
    requests_per_s: float
    """Its rate."""
    ttft_s: float
    """The TTFT to reach."""
    percentile: float
    """By which share of requests, 0 to 1."""
    utilisation: float
    """Share of its time that a GPU may be busy with prefills, above 0 to 1."""
    kv: tuple[str, ...]
    """KV dtypes to try."""
    hardware: tuple[Gpus, ...]
    """GPUs to try."""
    links: tuple[tuple[LinkSpec, float], ...]
    """``(link of each GPU, price of one)``."""
    tiers: tuple[TierChoice, ...]
    """Fastest first."""

    @classmethod
    def from_toml(cls, path: str | Path) -> Plan:
        """Read a plan.

        Args:
            path: a TOML file. ``[model]`` ``name`` (of the catalog) or ``config`` (a path), ``kv`` (a list of dtypes,
                default bf16). ``[traffic]`` ``requests_per_s`` and ``trace`` (with ``block_tokens``), or a
                ``[[traffic.class]]`` for each kind of request: ``share, cached, new, generated, working_set_tokens``
                (tokens that all its cached prefixes come to). ``[target]`` ``ttft_s, percentile`` (0.95),
                ``utilisation``. A ``[[hardware]]`` for each GPU: ``name, gpus`` (1), ``mfu, price_hour, fabric_gbs``
                and ``links``, those it can have (default all); a ``[[link]]``: ``name, price_hour`` (0); a ``[[tier]]``, fastest first: ``kind``, ``link`` (a name in the
                catalog) or ``gbs``, ``sizes`` an instance (such as ``["256GB"]``; 0 to try without),
                ``price_gb_hour``. ``specs`` names a TOML with the user's own hardware and links. Paths are relative to
                the file.

        Raises:
            ConfigError: where the file cannot be read, or for a missing or unknown key or a bad value.
        """
        path = Path(path)
        document = load_toml(path, {"model", "traffic", "target", "hardware", "link", "tier", "specs"})
        try:
            return _read(document, path.parent)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error


@dataclass(frozen=True)
class Option:
    """One deployment. Times in seconds, prices an hour."""

    hardware: str
    """The GPU's name."""
    gpus: int
    """GPUs an instance."""
    link: str
    """The link's name."""
    kv: str
    """The KV dtype."""
    tiers: Mapping[str, int]
    """Bytes of each tier an instance."""
    fits: bool
    """Whether weights and the longest request's KV fit into the GPUs' memory."""
    meets: bool
    """Whether the target is met."""
    ttft_s: float
    """At the plan's percentile; infinite where it does not fit."""
    mean_ttft_s: float
    """Over all requests."""
    instances: int
    """How many the traffic needs."""
    price: float
    """Of all of them."""
    hits: Mapping[str, float]
    """Share of prompt tokens that each tier serves."""
    binds: str
    """What takes most of the time of the slowest requests within the percentile: ``products``, ``weights`` (streaming
    them), ``link``, a tier's name, ``misses`` (computing again what no tier had room for), ``memory`` (does not fit)."""

    @property
    def label(self) -> str:
        """One line for people."""
        sizes = ", ".join(f"{kind} {size / 1e9:.0f} GB" for kind, size in self.tiers.items())
        return f"{self.gpus} x {self.hardware}, {self.link}, {self.kv} KV, {sizes or 'no tier'}"


@dataclass(frozen=True)
class Upgrade:
    """A change of one thing, and what it brings."""

    change: str
    """What changes."""
    option: Option
    """Where it leads."""
    extra: float
    """What it costs more, an hour; negative if it saves."""
    gain_s: float
    """What it takes off the TTFT at the percentile."""

    @property
    def gain_per_unit(self) -> float:
        """Seconds a unit of money and hour; infinite where it costs nothing more."""
        return self.gain_s / self.extra if self.extra > 0 else math.inf


@dataclass(frozen=True)
class Advice:
    """The answer to a plan."""

    ranked: tuple[Option, ...]
    """Those that meet the target by price, then the others by TTFT, then what does not fit."""
    upgrades: tuple[Upgrade, ...]
    """Changes of one thing in the best that shorten the TTFT, the one that gains most for the money first."""

    @property
    def best(self) -> Option:
        """The first."""
        return self.ranked[0]


def advise(plan: Plan) -> Advice:
    """Rank every combination of hardware, link, KV dtype and tier sizes.

    Args:
        plan: what is asked.

    Returns:
        The ranking and the upgrades of its first. Placement is by reuse distance: a prefix whose distance fits into the
        first tier is there, else in the second (whose capacity adds to it), and so on; beyond the last it is computed
        again. TTFTs are serial; each request loads or recomputes, whichever is faster. Every instance is taken to see the whole
        mix, so routing that keeps a conversation on one instance can only do better.
    """
    sizes = [[(tier.kind, size) for size in tier.sizes] for tier in plan.tiers]
    options = {}
    for gpu, link, kv in itertools.product(range(len(plan.hardware)), range(len(plan.links)), plan.kv):
        allowed = plan.hardware[gpu].links
        if allowed is not None and plan.links[link][0].name not in allowed:
            continue
        for chosen in itertools.product(*sizes):
            options[gpu, link, kv, chosen] = _evaluate(plan, gpu, link, kv, dict(chosen))
    if not options:
        raise ConfigError("no hardware of the plan can have any of its links: give one that fits, or leave links out")
    ranked = sorted(
        options.items(),
        key=lambda item: (
            not item[1].fits,
            not item[1].meets,
            item[1].price if item[1].meets else item[1].ttft_s,
            item[1].mean_ttft_s,
        ),
    )
    place, best = ranked[0]
    upgrades = []
    for other, option in options.items():
        changed = [i for i in range(3) if other[i] != place[i]]
        swapped = [(old, new) for old, new in zip(place[3], other[3], strict=True) if old != new]
        if len(changed) + len(swapped) != 1 or not option.ttft_s < best.ttft_s:
            continue
        if swapped:
            kind, size = swapped[0][1]
            change = f"{kind} of {size / 1e9:.0f} GB instead of {swapped[0][0][1] / 1e9:.0f} GB"
        else:
            change = (f"{option.gpus} x {option.hardware}", option.link, f"{option.kv} KV")[changed[0]]
        upgrades.append(Upgrade(change, option, option.price - best.price, best.ttft_s - option.ttft_s))
    upgrades.sort(key=lambda upgrade: (-upgrade.gain_per_unit, -upgrade.gain_s))
    return Advice(tuple(option for _, option in ranked), tuple(upgrades))


def _evaluate(plan: Plan, gpu: int, link: int, kv: str, sizes: dict[str, int]) -> Option:
    chosen, (way, link_price) = plan.hardware[gpu], plan.links[link]
    hardware, gpus, fabric = chosen.spec, chosen.count, chosen.fabric
    model, work = plan.model.with_kv(kv), plan.workload
    k, t = work.cached, work.new
    common: dict[str, Any] = {"hardware": hardware.name, "gpus": gpus, "link": way.name, "kv": kv, "tiers": sizes}
    again = tensor_parallel(model, hardware, way, gpus, np.zeros_like(k), k + t, fabric=fabric)
    after = tensor_parallel(model, hardware, way, gpus, k, t, fabric=fabric)
    longest = int((k + t + work.generated).max())
    # With replicated heads or latents each GPU holds more than its share of the KV.
    needed = after.rank.n_total * model.weight_bytes + longest * after.rank.kv_bytes_per_token
    if hardware.hbm_bytes is None:
        raise ConfigError(f"{hardware.name} has no hbm_bytes, which a plan needs to see what fits: add it")
    if needed > hardware.hbm_bytes:
        return Option(
            **common,
            fits=False,
            meets=False,
            ttft_s=math.inf,
            mean_ttft_s=math.inf,
            instances=0,
            price=math.inf,
            hits={},
            binds="memory",
        )

    # Where each prefix lies: the first tier whose capacity, with those above it, holds its reuse distance.
    where = np.full(k.shape, len(plan.tiers))
    reach = np.cumsum([sizes[tier.kind] for tier in plan.tiers]) / max(1, model.kv_bytes_per_token)
    for index in reversed(range(len(plan.tiers))):
        where = np.where(work.distance <= reach[index], index, where)
    where = np.where(k > 0, where, -1)
    # One host tier feeds all links of an instance, each link its own GPU.
    load = np.full(k.shape, np.inf)
    bottleneck = np.full(k.shape, "misses", dtype=object)
    for index, tier in enumerate(plan.tiers):
        here = where == index
        by_tier = np.asarray(kv_bytes(model, k)) / tier.rate
        by_link = np.asarray(after.load_s)
        load = np.where(here, np.maximum(by_tier, by_link), load)
        bottleneck = np.where(here, np.where(by_tier > by_link, tier.kind, "link"), bottleneck)
    load = np.where(k > 0, load, 0.0)
    behind, whole_prompt = np.asarray(after.compute_s), np.asarray(again.compute_s)
    loaded = load + behind
    loads = (k > 0) & (loaded < whole_prompt)
    ttft = np.where(loads, loaded, whole_prompt)

    weight = work.weight / work.weight.sum()
    order = np.argsort(ttft, kind="stable")
    reached = np.searchsorted(np.cumsum(weight[order]), plan.percentile * (1 - 1e-12))
    at = float(ttft[order[min(int(reached), len(order) - 1)]])
    slowest = (ttft <= at) & (ttft >= 0.9 * at)
    streaming = np.where(loads, after.compute.streaming, again.compute.streaming)
    terms = _terms(load, behind, whole_prompt, loads, streaming, bottleneck, where == len(plan.tiers))
    binds = max(terms, key=lambda name: float((terms[name] * weight * slowest).sum()))

    mean = float((ttft * weight).sum())
    instances = max(1, math.ceil(plan.requests_per_s * mean / plan.utilisation))
    tier_price = sum(tier.price * sizes[tier.kind] for tier in plan.tiers)
    price = instances * (gpus * (chosen.price + link_price) + tier_price)
    tokens = float((weight * (k + t)).sum())
    hits = {
        tier.kind: float((weight * k * (loads & (where == index))).sum()) / tokens
        for index, tier in enumerate(plan.tiers)
    }
    return Option(
        **common,
        fits=True,
        meets=at <= plan.ttft_s,
        ttft_s=at,
        mean_ttft_s=mean,
        instances=instances,
        price=price,
        hits=hits,
        binds=binds,
    )


def _terms(
    load: NDArray[np.float64],
    behind: NDArray[np.float64],
    again: NDArray[np.float64],
    loads: NDArray[np.bool_],
    streaming: NDArray[np.bool_],
    bottleneck: NDArray[Any],
    missed: NDArray[np.bool_],
) -> dict[str, NDArray[np.float64]]:
    """Seconds of each request by what takes them."""
    moving = np.where(loads, load, 0.0)
    computing = np.where(loads | missed, behind, again)
    terms = {
        "products": np.where(streaming, 0.0, computing),
        "weights": np.where(streaming, computing, 0.0),
        "misses": np.where(missed & ~loads, again - behind, 0.0),
    }
    for name in set(bottleneck.tolist()) - {"misses"}:
        terms[name] = np.where(bottleneck == name, moving, 0.0)
    return terms


def _read(document: Mapping[str, Any], base: Path) -> Plan:
    known = catalog()
    if "specs" in document:
        known = known.extended(base / str(document["specs"]))
    about = _table(document, "model", {"name", "config", "kv"}, set())
    if ("name" in about) == ("config" in about):
        raise ConfigError("[model] takes either name or config: give one of them")
    model = known.model(about["name"]) if "name" in about else ModelSpec.from_config(base / str(about["config"]))
    kv = about.get("kv", ["bf16"])
    if not isinstance(kv, list) or not kv:
        raise ConfigError(f'kv = {kv!r} in [model] is not a list of dtypes: write kv = ["bf16", "fp8_e4m3"]')
    target = _table(document, "target", {"ttft_s", "percentile", "utilisation"}, {"ttft_s", "utilisation"})
    percentile, busy = (
        positive("percentile", target.get("percentile", 0.95)),
        positive("utilisation", target["utilisation"]),
    )
    if percentile > 1 or busy > 1:
        raise ConfigError(f"percentile={percentile} and utilisation={busy} are shares; allowed is above 0 to 1")
    traffic = _table(document, "traffic", {"requests_per_s", "trace", "block_tokens", "class"}, {"requests_per_s"})
    return Plan(
        model=model,
        workload=_workload(traffic, base),
        requests_per_s=positive("requests_per_s", traffic["requests_per_s"]),
        ttft_s=positive("ttft_s", target["ttft_s"]),
        percentile=percentile,
        utilisation=busy,
        kv=tuple(map(str, kv)),
        hardware=tuple(
            _gpus(table, known)
            for table in _tables(
                document,
                "hardware",
                {"name", "gpus", "mfu", "price_hour", "fabric_gbs", "links"},
                {"name", "price_hour"},
            )
        ),
        links=tuple(
            (_link(table["name"], known), positive("price_hour", table.get("price_hour", 0), zero=True))
            for table in _tables(document, "link", {"name", "price_hour"}, {"name"})
        ),
        tiers=tuple(
            _tier(table, known)
            for table in _tables(
                document, "tier", {"kind", "link", "gbs", "sizes", "price_gb_hour"}, {"kind", "sizes", "price_gb_hour"}
            )
        ),
    )


def _gpus(table: Mapping[str, Any], known: Catalog) -> Gpus:
    gpu = known.hardware(str(table["name"]))
    links = table.get("links")
    if links is not None and not isinstance(links, list):
        raise ConfigError(f"links={links!r} of {gpu.name} is not a list of names")
    return Gpus(
        gpu.with_mfu(table["mfu"]) if "mfu" in table else gpu,
        whole("gpus", table.get("gpus", 1)),
        positive("price_hour", table["price_hour"], zero=True),
        1e9 * positive("fabric_gbs", table["fabric_gbs"]) if "fabric_gbs" in table else None,
        None if links is None else tuple(_link(name, known).name for name in links),
    )


def _link(name: object, known: Catalog) -> LinkSpec:
    return LinkSpec.named(str(name)) if str(name).lower().endswith("b/s") else known.link(str(name))


def _tier(table: Mapping[str, Any], known: Catalog) -> TierChoice:
    if ("link" in table) == ("gbs" in table):
        raise ConfigError(f"the tier {table['kind']!r} takes either link or gbs: give one of them")
    rate = _link(table["link"], known).read if "link" in table else 1e9 * positive("gbs", table["gbs"])
    sizes = table["sizes"] if isinstance(table["sizes"], list) else [table["sizes"]]
    if not sizes:
        raise ConfigError(f"the tier {table['kind']!r} has no sizes: give some, or leave it out")
    return TierChoice(
        str(table["kind"]),
        rate,
        tuple(0 if size == 0 else parse_size(size) for size in sizes),
        positive("price_gb_hour", table["price_gb_hour"], zero=True) / 1e9,
    )


def _workload(traffic: Mapping[str, Any], base: Path) -> Workload:
    if ("trace" in traffic) == ("class" in traffic):
        raise ConfigError("[traffic] takes either trace or [[traffic.class]]: give one of them")
    if "trace" in traffic:
        return read_trace(base / str(traffic["trace"]), traffic.get("block_tokens", 512))
    names = {"share", "cached", "new", "generated", "working_set_tokens"}
    rows: list[tuple[int, int, int, float, float]] = []
    classes = _tables(traffic, "class", names, {"share", "cached", "new"}, "traffic.class")
    kept = sum(int(table.get("working_set_tokens", table["cached"])) for table in classes)
    for table in classes:
        cached, new = whole("cached", table["cached"], 0), whole("new", table["new"])
        share = positive("share", table["share"])
        # Reuse is spread evenly over the working sets of all classes, which share the tiers.
        for part in range(_SLICES):
            distance = max(float(cached), kept * (part + 1) / _SLICES) if cached else 0.0
            rows.append((cached, new, whole("generated", table.get("generated", 0), 0), distance, share / _SLICES))
    k, t, o, distance_, weight = (np.array(column) for column in zip(*rows, strict=True))
    return Workload("the plan's traffic", k, t, o, distance_, weight)


def _table(document: Mapping[str, Any], name: str, allowed: set[str], needed: set[str]) -> Mapping[str, Any]:
    table = document.get(name)
    if not isinstance(table, Mapping):
        raise ConfigError(f"there is no table [{name}]: add it")
    return _checked(f"[{name}]", table, allowed, needed)


def _tables(
    document: Mapping[str, Any], name: str, allowed: set[str], needed: set[str], shown: str = ""
) -> Sequence[Mapping[str, Any]]:
    tables = document.get(name, [])
    if not isinstance(tables, list) or not tables or not all(isinstance(table, Mapping) for table in tables):
        raise ConfigError(f"there is no list of tables [[{shown or name}]]: add at least one")
    return [_checked(f"[[{shown or name}]]", table, allowed, needed) for table in tables]


def _checked(where: str, table: Mapping[str, Any], allowed: set[str], needed: set[str]) -> Mapping[str, Any]:
    if unknown := sorted(set(table) - allowed):
        raise ConfigError(f"{where} has the unknown key {', '.join(unknown)}; allowed are {', '.join(sorted(allowed))}")
    if missing := sorted(needed - set(table)):
        raise ConfigError(f"{where} has no {', '.join(missing)}: add {'it' if len(missing) == 1 else 'them'}")
    return table
