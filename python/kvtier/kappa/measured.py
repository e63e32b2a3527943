"""What was measured on a machine: how fast its tiers deliver, how fast a model computes there, what a hit costs."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError
from kvtier.kappa.catalog import load_toml
from kvtier.kappa.cost import pair_flops, up_flops
from kvtier.kappa.hardware import HardwareSpec
from kvtier.kappa.model import ModelSpec
from kvtier.kappa.number import positive
from kvtier.kappa.passes import Passes

__all__ = ["Measured", "MeasuredTier", "Prefill"]

TIERS = ("hbm", "dram", "cxl", "nvme", "remote")


@dataclass(frozen=True)
class MeasuredTier:
    """One tier as the store sees it.

    Args:
        kind: ``"hbm"``, ``"dram"``, ``"cxl"``, ``"nvme"`` or ``"remote"``.
        read_bytes_per_s: towards the prefill.
        write_bytes_per_s: away from it; None (default) where it was not measured.
        latency_s: from the request to the first byte. Default 0.
        spread: (highest - lowest) / median of the runs behind ``read_bytes_per_s``. Default 0.
        emulated: whether a rate limit was in force. Default False.

    Raises:
        ConfigError: for an unknown kind or a value out of range.
    """

    kind: str
    read_bytes_per_s: float
    write_bytes_per_s: float | None = None
    latency_s: float = 0.0
    spread: float = 0.0
    emulated: bool = False

    def __post_init__(self) -> None:
        if self.kind not in TIERS:
            raise ConfigError(f"kind={self.kind!r} is not known; allowed are {', '.join(TIERS)}")
        positive("read_bytes_per_s", self.read_bytes_per_s)
        if self.write_bytes_per_s is not None:
            positive("write_bytes_per_s", self.write_bytes_per_s)
        positive("latency_s", self.latency_s, zero=True)
        positive("spread", self.spread, zero=True)
        if not isinstance(self.emulated, bool):
            raise ConfigError(f"emulated={self.emulated!r} is not a switch; allowed are true and false")


@dataclass(frozen=True)
class Measured:
    """Everything that :func:`kvtier.kappa.decide` needs to know about a machine and a model on it.

    Args:
        model: the model that was measured.
        flops_per_s: what its prefill sustains, C.
        memory_bytes_per_s: what streams its weights, the bandwidth of HBM (on a CPU, of DRAM).
        tiers: each at most once.
        date: ISO date of the measurement.
        pass_s: fixed seconds of one prefill pass, whatever its length. Default 0.
        hit_s: fixed seconds of a hit, whatever its size. Default 0.
        concurrent: whether the tiers deliver at the same time. Default False, one after the other.
        shared_bytes_per_s: a way that all tiers share; None (default) where there is none.
        copy_bytes_per_s: the copy of what a tier delivered into the model's own tensors, where that is a step of its own
            that follows; None (default) where tiers deliver there.
        passes: what passes of the prefill were measured to take. Where it is given, it is used instead of the two rates.
            Default None.
        peak_flops_per_s: what large matrix products reach on the same machine; None (default) where not measured.
        flops_spread: (highest - lowest) / median of the runs behind ``flops_per_s``. Default 0.
        machine: for people.

    Raises:
        ConfigError: for a tier twice, no tier, or a value out of range.
    """

    model: ModelSpec
    flops_per_s: float
    memory_bytes_per_s: float
    tiers: tuple[MeasuredTier, ...]
    date: str
    pass_s: float = 0.0
    hit_s: float = 0.0
    concurrent: bool = False
    shared_bytes_per_s: float | None = None
    copy_bytes_per_s: float | None = None
    passes: Passes | None = None
    peak_flops_per_s: float | None = None
    flops_spread: float = 0.0
    machine: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name in ("flops_per_s", "memory_bytes_per_s"):
            positive(name, getattr(self, name))
        for name in ("pass_s", "hit_s", "flops_spread"):
            positive(name, getattr(self, name), zero=True)
        for name in ("shared_bytes_per_s", "copy_bytes_per_s", "peak_flops_per_s"):
            if getattr(self, name) is not None:
                positive(name, getattr(self, name))
        if not isinstance(self.concurrent, bool):
            raise ConfigError(f"concurrent={self.concurrent!r} is not a switch; allowed are true and false")
        try:
            datetime.date.fromisoformat(str(self.date)[:10])
        except ValueError:
            raise ConfigError(f"date={self.date!r} is not a date; allowed is YYYY-MM-DD") from None
        object.__setattr__(self, "date", str(self.date))
        object.__setattr__(self, "tiers", tuple(self.tiers))
        kinds = [tier.kind for tier in self.tiers]
        if not kinds or len(set(kinds)) != len(kinds):
            raise ConfigError(
                f"the tiers are {', '.join(kinds) or 'none'}; allowed is at least one, and each kind once"
            )

    @classmethod
    def from_toml(cls, path: str | Path) -> Measured:
        """Read a measurement.

        Args:
            path: a TOML file with ``[measured]`` ``date, machine``; ``[model]`` ``catalog`` (a name), or ``config`` (a
                directory or ``config.json``, relative to the file), each with ``kv`` and ``weight_bytes`` where they are
                not bf16, or the fields of :class:`ModelSpec`; ``[compute]`` ``flops_per_s, memory_bytes_per_s, pass_s,
                spread, peak_flops_per_s``; ``[passes]`` with the fields of :class:`Passes`; ``[hit]`` ``seconds``;
                ``[load]`` ``concurrent, shared_bytes_per_s, copy_bytes_per_s``; and a ``[[tier]]`` with the fields of
                :class:`MeasuredTier` for each.

        Raises:
            ConfigError: where the file cannot be read, or for a missing or unknown key or a bad value.
        """
        document = load_toml(path, {"measured", "model", "compute", "passes", "hit", "load", "tier"})
        try:
            about = _table(document, "measured", {"date", "machine"}, {"date"})
            rates = _table(
                document,
                "compute",
                {"flops_per_s", "memory_bytes_per_s", "pass_s", "spread", "peak_flops_per_s"},
                {"flops_per_s", "memory_bytes_per_s"},
            )
            hit = _table(document, "hit", {"seconds"})
            loads = _table(document, "load", {"concurrent", "shared_bytes_per_s", "copy_bytes_per_s"})
            columns = {"cached", "new", "seconds"}
            passes = _table(document, "passes", columns, columns) if "passes" in document else None
            tiers = document.get("tier", [])
            if not isinstance(tiers, list) or not all(isinstance(tier, Mapping) for tier in tiers):
                raise ConfigError("tier is not a list of tables: write [[tier]], with two brackets, once a tier")
            allowed = set(MeasuredTier.__dataclass_fields__)
            for tier in tiers:
                _keys("[[tier]]", tier, allowed, {"kind", "read_bytes_per_s"})
            return cls(
                model=_model(document, Path(path).parent),
                flops_per_s=rates["flops_per_s"],
                memory_bytes_per_s=rates["memory_bytes_per_s"],
                tiers=tuple(MeasuredTier(**tier) for tier in tiers),
                date=str(about["date"]),
                machine=str(about.get("machine", "")),
                pass_s=rates.get("pass_s", 0.0),
                flops_spread=rates.get("spread", 0.0),
                hit_s=hit.get("seconds", 0.0),
                passes=None if passes is None else Passes(**passes),
                peak_flops_per_s=rates.get("peak_flops_per_s"),
                **loads,
            )
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def to_toml(self) -> str:
        """The measurement as TOML, which :meth:`from_toml` reads back to an equal one."""
        plain = self.model.describe()
        inner = {name: plain.pop(name) for name in ("latent", "experts", "kv") if name in plain}
        sections: list[tuple[str, dict[str, Any]]] = [
            ("[measured]", {"date": self.date, "machine": self.machine}),
            ("[model]", plain),
            *((f"[model.{name}]", table) for name, table in inner.items()),
            (
                "[compute]",
                {
                    "flops_per_s": self.flops_per_s,
                    "memory_bytes_per_s": self.memory_bytes_per_s,
                    "pass_s": self.pass_s,
                    "spread": self.flops_spread,
                    "peak_flops_per_s": self.peak_flops_per_s,
                },
            ),
            *(
                [("[passes]", {name: getattr(self.passes, name) for name in ("cached", "new", "seconds")})]
                if self.passes
                else []
            ),
            ("[hit]", {"seconds": self.hit_s}),
            (
                "[load]",
                {name: getattr(self, name) for name in ("concurrent", "shared_bytes_per_s", "copy_bytes_per_s")},
            ),
            *(("[[tier]]", vars(tier)) for tier in self.tiers),
        ]
        lines = []
        for title, table in sections:
            lines += [title, *(f"{key} = {json.dumps(value)}" for key, value in table.items() if value is not None), ""]
        return "\n".join(lines)

    @property
    def emulated(self) -> bool:
        """Whether any tier ran under a rate limit; whatever is derived from it must say so."""
        return any(tier.emulated for tier in self.tiers)

    def emulating(self, kind: str, gbs: float) -> Measured:
        """The same machine with one tier limited to a rate, as a store's ``emulate_gbs`` limits it.

        Args:
            kind: the tier's.
            gbs: 1e9 bytes/s, above 0.

        Raises:
            ConfigError: for a tier that was not measured, or a rate that is not above 0.
        """
        if kind not in self.rates:
            raise ConfigError(f"the tier {kind!r} was not measured; there are {', '.join(self.rates)}")
        rate = positive("gbs", gbs) * 1e9
        return replace(
            self,
            tiers=tuple(
                replace(tier, read_bytes_per_s=min(tier.read_bytes_per_s, rate), emulated=True)
                if tier.kind == kind
                else tier
                for tier in self.tiers
            ),
        )

    @property
    def mfu(self) -> float | None:
        """What the prefill sustains, as a share of large matrix products on the same machine; None where not measured."""
        return None if self.peak_flops_per_s is None else self.flops_per_s / self.peak_flops_per_s

    @property
    def hardware(self) -> HardwareSpec:
        """The machine as hardware whose peak is what was sustained."""
        return HardwareSpec(self.machine or "measured", self.flops_per_s, self.memory_bytes_per_s)

    @cached_property
    def rates(self) -> Mapping[str, tuple[float, float]]:
        """``(seconds a byte, latency)`` of each tier: the slower of it and the shared way where tiers follow each other,
        and the copy behind it.
        """
        cap = math.inf if self.concurrent or self.shared_bytes_per_s is None else self.shared_bytes_per_s
        copy = 1 / self.copy_bytes_per_s if self.copy_bytes_per_s else 0.0
        return {tier.kind: (1 / min(tier.read_bytes_per_s, cap) + copy, tier.latency_s) for tier in self.tiers}

    @cached_property
    def prefill(self) -> Prefill | Passes:
        """The model's computation, ready to be asked often."""
        return self.passes or Prefill(self)

    @cached_property
    def mark(self) -> str:
        """What an output that is derived from this adds: ``" (emulated)"``, or nothing."""
        return " (emulated)" if self.emulated else ""


class Prefill:
    """Seconds of a prefill by plain arithmetic on numbers: the formulas of :mod:`kvtier.kappa.cost`, summed up beforehand.

    Args:
        measured: the machine and the model.
    """

    def __init__(self, measured: Measured) -> None:
        model = measured.model
        with_experts = sum(model.expert_layers)
        self.pass_s = measured.pass_s
        self.per_flop = 1 / measured.flops_per_s
        per_byte = model.weight_bytes / measured.memory_bytes_per_s
        self.linear = 2.0 * model.n_active
        self.head = 2.0 * model.head_params
        pair = pair_flops(model)
        growing = sum(window is None for window in model.windows)
        self.pair = float(pair.get("heads", 0) * growing)
        self.windows = [
            (float(pair["heads"] * count), kind.window) for kind, count in model.counted if kind.window is not None
        ]
        self.latent = model.latent is not None
        if self.latent:
            self.absorbed = float(pair["absorbed"] * model.layers)
            self.pair = float(pair["decompressed"] * model.layers)
            self.up = float(up_flops(model) * model.layers)
        experts = model.experts
        per_expert = 3 * model.hidden * experts.width if experts else 0
        self.fixed_s = per_byte * sum(
            model.attention_params + model.ffn_params(flag, 0) for flag in model.expert_layers
        )
        self.experts_s = per_byte * with_experts * per_expert * (experts.count if experts else 0)
        self.untouched = 1 - experts.per_token / experts.count if experts else 0.0
        self.head_s = per_byte * model.head_params
        self.row_s = per_byte * model.hidden
        self.vocab = model.vocab
        self.tied = model.tied

    @cached_property
    def parabolas(self) -> list[tuple[float, float, float, float]]:
        """``(p, q, c, upto)``: FLOPs of a prefix of s tokens are p·s(s+1)/2 + q·s + c, for s from the last ``upto`` to this one."""
        pair = min(self.pair, self.absorbed) if self.latent else self.pair + sum(each for each, _ in self.windows)
        linear, constant, pieces = self.linear, 0.0, []
        for each, window in sorted(self.windows, key=lambda pair: pair[1]):
            pieces.append((pair, linear, constant, float(window)))
            pair, linear, constant = pair - each, linear + each * window, constant - each * window * (window - 1) / 2
        return [*pieces, (pair, linear, constant, math.inf)]

    def operations(self, cached: int, new: int) -> float:
        """FLOPs of ``new`` tokens behind ``cached``, without the head."""
        pairs = new * cached + new * (new + 1) * 0.5
        if self.latent:
            return self.linear * new + min(self.absorbed * pairs, self.pair * pairs + self.up * cached)
        total = self.linear * new + self.pair * pairs
        for each, window in self.windows:
            free = min(max(window - cached, 0), new)
            total += each * (free * cached + free * (free + 1) * 0.5 + (new - free) * window)
        return total

    def streaming(self, new: float) -> float:
        """Seconds to stream the weights that ``new`` tokens touch, without the head."""
        touched: float = 1 - self.untouched**new
        return self.fixed_s + self.experts_s * touched + self.row_s * min(new, self.vocab)

    def prefix(self, tokens: int) -> float:
        """Seconds to compute the first ``tokens`` of a prompt, without logits; 0 for none."""
        if not tokens:
            return 0.0
        return self.pass_s + max(self.operations(0, tokens) * self.per_flop, self.streaming(tokens))

    def last(self, cached: int, new: int) -> float:
        """Seconds to compute ``new`` tokens behind ``cached``, with the last one's logits."""
        streamed = self.streaming(new) + self.head_s - (self.row_s * min(new, self.vocab) if self.tied else 0.0)
        return self.pass_s + max((self.operations(cached, new) + self.head) * self.per_flop, streamed)


def _model(document: Mapping[str, Any], base: Path) -> ModelSpec:
    table = dict(document.get("model") or {})
    given = [key for key in ("catalog", "config") if key in table]
    if not given:
        return ModelSpec.from_fields(table, "[model]")
    _keys("[model]", table, {given[0], "kv", "weight_bytes"}, set())
    plain = (
        ModelSpec.named(table["catalog"]) if given == ["catalog"] else ModelSpec.from_config(base / table["config"])
    ).describe()
    if "kv" in table:
        plain["kv"] = table["kv"]
    if "weight_bytes" in table:
        plain["weight_bytes"] = table["weight_bytes"]
    return ModelSpec.from_fields(plain, "[model]")


def _table(document: Mapping[str, Any], name: str, allowed: set[str], needed: Set[str] = frozenset()) -> dict[str, Any]:
    table = document.get(name, {})
    if not isinstance(table, Mapping):
        raise ConfigError(f"{name} = {table!r} is not a table: write [{name}]")
    _keys(f"[{name}]", table, allowed, needed)
    return dict(table)


def _keys(where: str, table: Mapping[str, Any], allowed: Set[str], needed: Set[str]) -> None:
    if unknown := sorted(set(table) - allowed):
        raise ConfigError(f"{where} has the unknown key {', '.join(unknown)}; allowed are {', '.join(sorted(allowed))}")
    if missing := sorted(needed - set(table)):
        raise ConfigError(f"{where} has no {', '.join(missing)}: add {'it' if len(missing) == 1 else 'them'}")
