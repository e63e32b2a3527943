"""What a model is, for the cost of its prefill: sizes of its layers, and nothing that has no cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.errors import ConfigError
from kvtier.kappa.kvformat import KVFormat
from kvtier.kappa.number import positive, whole

__all__ = ["Experts", "Latent", "LayerKind", "ModelSpec"]


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek's MLA): one latent a token instead of keys and values.

    Args:
        kv_rank: elements of the latent, r.
        nope_dim: elements of a head's key without position, d_n.
        rope_dim: elements of the rotary key that all heads share, d_r.
        v_dim: elements of a head's value, d_v.
        q_rank: rank of the queries' own compression; None (default) projects them in one step.

    Raises:
        ConfigError: for a size that is not a whole number of at least 1.
    """

    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    q_rank: int | None = None

    def __post_init__(self) -> None:
        for name in ("kv_rank", "nope_dim", "rope_dim", "v_dim"):
            whole(name, getattr(self, name))
        if self.q_rank is not None:
            whole("q_rank", self.q_rank)


@dataclass(frozen=True)
class Experts:
    """The mixture of experts in a layer.

    Args:
        count: routed experts, E.
        per_token: of them, how many a token takes, k.
        width: inner width of one, f.
        shared_width: inner width of all shared experts together, which every token takes. Default 0, none.

    Raises:
        ConfigError: for a size out of range, or more experts a token than there are.
    """

    count: int
    per_token: int
    width: int
    shared_width: int = 0

    def __post_init__(self) -> None:
        for name in ("count", "per_token", "width"):
            whole(name, getattr(self, name))
        whole("shared_width", self.shared_width, 0)
        if self.per_token > self.count:
            raise ConfigError(
                f"per_token={self.per_token} of count={self.count} experts: allowed are 1 to all of them for each token"
            )


class LayerKind(NamedTuple):
    """What two layers must have in common to cost the same."""

    window: int | None
    """Tokens that a query sees, itself included; None for all."""
    experts: bool
    """Whether the feed-forward part is a mixture of experts."""


@dataclass(frozen=True)
class ModelSpec:
    """A decoder of equal layers, up to window and experts. Norms, biases and sinks are left out: their cost is below 0.1 %.

    Args:
        name: for people.
        layers: how many, L.
        hidden: elements of the residual stream, h.
        vocab: entries of the vocabulary, V.
        heads: query heads, n_q.
        kv_heads: KV heads, n_kv; it must divide ``heads``. With ``latent`` it has no effect.
        head_dim: elements of one head, d. With ``latent`` it has no effect.
        ffn: inner width of the (gated, three matrices) feed-forward part of layers without experts; 0 if none has it.
        latent: multi-head latent attention, if the model has it. Default None: heads with keys and values.
        experts: the mixture of experts, if the model has one. Default None.
        expert_layers: which layers have it, one flag a layer; default all if ``experts`` is given, else none.
        windows: tokens that a query sees in each layer, itself included, None for all; default all in every layer.
        tied: whether the output head is the embedding matrix. Default False.
        kv: how keys and values are kept. Default bf16.
        weight_bytes: bytes of one parameter as streamed from the GPU's memory. Default 2, for bf16.
        source: where the sizes come from.

    Raises:
        ConfigError: for sizes that are missing, out of range or do not fit each other.

    Whoever has LoRA adapters counts them as part of the base: their cost is left out.
    """

    name: str
    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int = 0
    latent: Latent | None = None
    experts: Experts | None = None
    expert_layers: tuple[bool, ...] = ()
    windows: tuple[int | None, ...] = ()
    tied: bool = False
    kv: KVFormat = field(default_factory=KVFormat)
    weight_bytes: float = 2.0
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "vocab", "heads", "kv_heads", "head_dim"):
            whole(name, getattr(self, name))
        whole("ffn", self.ffn, 0)
        positive("weight_bytes", self.weight_bytes)
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"heads={self.heads} is no multiple of kv_heads={self.kv_heads}: each KV head serves equally many query heads"
            )
        flags = self.expert_layers or (self.experts is not None,) * self.layers
        windows = self.windows or (None,) * self.layers
        for name, given in (("expert_layers", flags), ("windows", windows)):
            if len(given) != self.layers:
                raise ConfigError(f"{name} has {len(given)} entries for {self.layers} layers: give one a layer")
        for window in windows:
            if window is not None:
                whole("a window", window)
        if any(flags) and self.experts is None:
            raise ConfigError("expert_layers names layers with experts, but experts is not given")
        if not all(flags) and not self.ffn:
            raise ConfigError(
                "ffn is missing, and some layers have no experts: give the width of their feed-forward part"
            )
        if self.latent is not None and any(window is not None for window in windows):
            raise ConfigError("latent attention with sliding windows is not modelled: give one of the two")
        object.__setattr__(self, "expert_layers", tuple(flags))
        object.__setattr__(self, "windows", tuple(windows))

    @classmethod
    def named(cls, name: str) -> ModelSpec:
        """A model of the package's catalog.

        Args:
            name: its name, or a beginning or part of it that fits no other; case and punctuation do not count.

        Raises:
            ConfigError: for none or several; the message lists them.
        """
        from kvtier.kappa.catalog import catalog

        return catalog().model(name)

    @classmethod
    def from_config(cls, config: object, *, name: str = "") -> ModelSpec:
        """A model from a Hugging Face configuration.

        Args:
            config: a path of ``config.json`` or of its directory, the mapping it holds, or a ``PretrainedConfig``.
            name: for people; default the configuration's ``_name_or_path``, or the directory's name.

        Raises:
            ConfigError: for an architecture that is not known, with the fields that a description by hand needs, or
                one that is, with the fields that are missing.
        """
        from kvtier.kappa.hfconfig import read

        return read(config, name)

    @classmethod
    def find(cls, text: str) -> ModelSpec:
        """A model from a directory or ``config.json`` if ``text`` is an existing path, else from the catalog.

        Raises:
            ConfigError: as :meth:`from_config` and :meth:`named`.
        """
        return cls.from_config(Path(text)) if Path(text).exists() else cls.named(text)

    def with_kv(self, kv: str | KVFormat) -> ModelSpec:
        """The same model with its KV kept otherwise; a name means :meth:`KVFormat.named`."""
        if isinstance(kv, str):
            kv = KVFormat.named(kv, latent=self.latent is not None, head_dim=self.head_dim)
        return replace(self, kv=kv)

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer, L of them."""
        return tuple(LayerKind(*kind) for kind in zip(self.windows, self.expert_layers, strict=True))

    @cached_property
    def counted(self) -> tuple[tuple[LayerKind, int], ...]:
        """Each kind of layer once, with how many there are."""
        return tuple(Counter(self.kinds).items())

    @property
    def windowed(self) -> bool:
        """Whether any layer has a window."""
        return any(window is not None for window in self.windows)

    # Sizes of one layer, in parameters.

    @property
    def attention_params(self) -> int:
        """Parameters of one layer's attention projections.

        Heads: h·n_q·d + 2·h·n_kv·d + n_q·d·h. Latent: the queries (h·r_q + r_q·n_q·(d_n+d_r), or h·n_q·(d_n+d_r)),
        h·(r+d_r) down, r·n_q·(d_n+d_v) up, n_q·d_v·h out (DeepSeek-V2, section 2.1).
        """
        if self.latent is None:
            return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        at = self.latent
        query = self.heads * (at.nope_dim + at.rope_dim)
        queries = self.hidden * query if at.q_rank is None else at.q_rank * (self.hidden + query)
        down = self.hidden * (at.kv_rank + at.rope_dim)
        up = at.kv_rank * self.heads * (at.nope_dim + at.v_dim)
        return queries + down + up + self.heads * at.v_dim * self.hidden

    @property
    def router_params(self) -> int:
        """Parameters of one layer's router: h·E; 0 without experts."""
        return self.hidden * self.experts.count if self.experts else 0

    def ffn_params(self, experts: bool, routed: float) -> float:
        """Parameters of one layer's feed-forward part: router, ``routed`` experts of its kind, and the shared ones.

        Three matrices each: 3·h·width. Without ``experts`` the dense one.
        """
        if not experts:
            return 3 * self.hidden * self.ffn
        assert self.experts is not None
        width = routed * self.experts.width + self.experts.shared_width
        return self.router_params + 3 * self.hidden * width

    # Sizes of the whole.

    @cached_property
    def n_active(self) -> int:
        """Parameters that one token is multiplied with, without embedding and head, N_act."""
        per_token = self.experts.per_token if self.experts else 0
        return int(sum(self.attention_params + self.ffn_params(flag, per_token) for flag in self.expert_layers))

    @cached_property
    def n_total(self) -> int:
        """All parameters, with embedding and (unless tied) head."""
        count = self.experts.count if self.experts else 0
        layers = sum(self.attention_params + self.ffn_params(flag, count) for flag in self.expert_layers)
        return int(layers) + self.hidden * self.vocab * (1 if self.tied else 2)

    @property
    def head_params(self) -> int:
        """Parameters of the output head: h·V."""
        return self.hidden * self.vocab

    @cached_property
    def layer_kv_bytes(self) -> int:
        """Bytes of KV of one token in one layer, scales included.

        Heads: 2·n_kv·d·s. Latent: (r + d_r)·s.
        """
        if self.latent is None:
            return 2 * self.kv_heads * self.kv.vector_bytes(self.head_dim)
        return self.kv.vector_bytes(self.latent.kv_rank) + self.latent.rope_dim * self.kv.rope_itemsize

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV of one token in all layers, B. With windows, those of a token that all layers still keep."""
        return self.layers * self.layer_kv_bytes

    @property
    def growing_kv_bytes(self) -> int:
        """Bytes of KV a token in the layers without a window: what a long context grows by."""
        return self.layer_kv_bytes * sum(window is None for window in self.windows)

    def describe(self) -> dict[str, Any]:
        """The fields as plain values, as a ``[model]`` table takes them; fields at their default are left out."""
        plain: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("name", "layers", "hidden", "vocab", "heads", "kv_heads", "head_dim", "weight_bytes")
        }
        for name in ("ffn", "tied", "source"):
            if getattr(self, name):
                plain[name] = getattr(self, name)
        if self.latent:
            plain["latent"] = {name: value for name, value in vars(self.latent).items() if value is not None}
        if self.experts:
            plain["experts"] = dict(vars(self.experts))
            plain["expert_layers"] = list(self.expert_layers)
        if self.windowed:
            plain["windows"] = [window or 0 for window in self.windows]
        plain["kv"] = {name: value for name, value in vars(self.kv).items() if value is not None}
        return plain

    @classmethod
    def from_fields(cls, table: dict[str, Any], where: str = "the model") -> ModelSpec:
        """A model from plain values, the reverse of :meth:`describe`.

        Args:
            table: the constructor's arguments; ``latent``, ``experts`` and ``kv`` as tables of their own (``kv`` also
                as a dtype's name), a window of 0 meaning none.
            where: names the table in errors.

        Raises:
            ConfigError: for a missing or unknown key, or a bad value.
        """
        known = set(cls.__dataclass_fields__)
        needed = {"layers", "hidden", "vocab", "heads", "kv_heads", "head_dim"}
        if missing := sorted(needed - set(table)):
            raise ConfigError(f"{where} has no {', '.join(missing)}: add {'it' if len(missing) == 1 else 'them'}")
        if unknown := sorted(set(table) - known):
            raise ConfigError(
                f"{where} has the unknown key {', '.join(unknown)}; allowed are {', '.join(sorted(known))}"
            )
        fields = {"name": "unnamed", **table}
        try:
            for key, kind in (("latent", Latent), ("experts", Experts)):
                if key in fields:
                    fields[key] = kind(**fields[key])
            kv = fields.pop("kv", None)
            for key in ("expert_layers", "windows"):
                if key in fields:
                    fields[key] = tuple(fields[key])
            if "windows" in fields:
                fields["windows"] = tuple(window or None for window in fields["windows"])
            if isinstance(kv, dict):
                fields["kv"] = KVFormat(**kv)
            model = cls(**fields)
        except (TypeError, ConfigError) as error:
            raise ConfigError(f"{where}: {error}") from error
        return model.with_kv(kv) if isinstance(kv, str) else model
