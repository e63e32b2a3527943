"""What lies where in a block: the shape of one model shard's KV cache.

A block is layer-major. With grouped-query attention (``gqa``) it is ``[layer][k|v][token][head][dim]``, with latent
attention (``mla``) ``[layer][token][rank + rope]``; a layer is one contiguous *segment*, and layers may differ in
size. An ``opaque`` block is an engine's own bytes, kept as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvtier import canonical
from kvtier.errors import ConfigError, InvalidBlockError, UnsupportedError

__all__ = ["DTYPES", "KVLayout", "Picks", "Segment", "Span", "dtype_name", "span_of", "tokens_of"]

Kind = Literal["gqa", "mla", "opaque"]

Span: TypeAlias = range | slice | tuple[int, int] | None
"""A range of layers or tokens: ``range(2, 5)``, ``slice(2, 5)`` or ``(2, 5)``; ``None`` is all of them."""

Picks: TypeAlias = Span | NDArray[np.bool_]
"""Which tokens of blocks: the same span of each, or ``bool[blocks, block_tokens]``."""

DTYPES: Mapping[str, int] = {
    "fp32": 4,
    "fp16": 2,
    "bf16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""The names of the KV dtypes, and the bytes of one element of each."""

_ALIASES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e4m3": "fp8_e4m3",
    "fp8": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}

MAX_BLOCK = 256 << 20


class Segment(NamedTuple):
    """One layer's share of a block: ``planes`` runs of ``block_tokens`` tokens, each token ``token_bytes`` long."""

    planes: int
    """2 for ``gqa`` (keys, then values), 1 otherwise."""
    token_bytes: int
    """Bytes of one token in one plane."""


def dtype_name(dtype: object) -> str:
    """The kvtier name of a dtype.

    Args:
        dtype: a name (``"bf16"``, ``"bfloat16"``, ``"torch.bfloat16"``), a torch dtype, or a NumPy dtype or scalar
            type.

    Returns:
        One of :data:`DTYPES`. Does not block.

    Raises:
        ConfigError: for a dtype that no KV cache is kept in.
    """
    if isinstance(dtype, str):
        text = dtype
    elif isinstance(dtype, type):
        text = dtype.__name__
    else:
        text = str(dtype)
    name = text.removeprefix("torch.").removeprefix("numpy.").lower()
    name = _ALIASES.get(name, name)
    if name not in DTYPES:
        raise ConfigError(
            f"the KV dtype {text!r} is not known; allowed are {', '.join(DTYPES)}: name the one that your engine keeps"
        )
    return name


@dataclass(frozen=True)
class KVLayout:
    """The layout of one model shard's KV blocks.

    Args:
        layers: how many layers this shard holds; 0 for ``opaque``, whose blocks have any length and no layers.
        kind: ``"gqa"`` (also for multi-head and multi-query attention), ``"mla"`` or ``"opaque"``.
        kv_heads: KV heads a layer (``gqa``): one number, or a tuple with one a layer where the layers differ.
        head_dim: elements of one head (``gqa``): one number, or a tuple with one a layer.
        rank: elements of the latent a token (``mla``).
        rope_dim: elements of the rotary key a token (``mla``).
        dtype: what an element is; see :func:`dtype_name`. Default bf16; always ``uint8`` for ``opaque``.
        block_tokens: tokens a full block. Default 16.

    Raises:
        ConfigError: for a missing, extra or impossible value, or a block of more than 256 MiB.

    Everything it gives is in bytes unless named otherwise, and none of it blocks.
    """

    layers: int = 0
    kind: Kind = "gqa"
    kv_heads: int | tuple[int, ...] = 0
    head_dim: int | tuple[int, ...] = 0
    rank: int = 0
    rope_dim: int = 0
    dtype: str = "bf16"
    block_tokens: int = 16

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        needed = {"gqa": ("layers", "kv_heads", "head_dim"), "mla": ("layers", "rank", "rope_dim"), "opaque": ()}
        if self.kind not in needed:
            raise ConfigError(f"kind={self.kind!r} is not known; allowed are {', '.join(needed)}")
        _positive("block_tokens", self.block_tokens)
        for name in ("layers", "kv_heads", "head_dim", "rank", "rope_dim"):
            value = getattr(self, name)
            if name in needed[self.kind]:
                self._check_per_layer(name, value)
            elif value != 0:
                takes = " and ".join(needed[self.kind]) or "no sizes"
                raise ConfigError(
                    f"{name}={value!r} was given for kind={self.kind!r}, which takes {takes}: leave it out"
                )
        if self.kind == "opaque":
            object.__setattr__(self, "dtype", "uint8")
        if self.block_bytes > MAX_BLOCK:
            raise ConfigError(
                f"a block of {self.block_tokens} tokens would be {self.block_bytes} bytes; allowed are at most {MAX_BLOCK}: "
                "choose fewer block_tokens"
            )

    def _check_per_layer(self, name: str, value: int | tuple[int, ...]) -> None:
        if isinstance(value, list):
            value = tuple(value)
            object.__setattr__(self, name, value)
        if isinstance(value, tuple):
            if name not in ("kv_heads", "head_dim"):
                raise ConfigError(
                    f"{name}={value!r} must be one number; only kv_heads and head_dim may differ between layers"
                )
            if len(value) != self.layers:
                raise ConfigError(
                    f"{name} has {len(value)} entries for {self.layers} layers: give one a layer, or one number for all"
                )
            for item in value:
                _positive(name, item)
        else:
            _positive(name, value)

    @classmethod
    def opaque(cls, *, block_tokens: int = 16) -> KVLayout:
        """A layout for an engine's own bytes: blocks of any length up to 256 MiB, one segment each."""
        return cls(kind="opaque", block_tokens=block_tokens)

    @classmethod
    def from_config(cls, config: object, *, dtype: object = None, block_tokens: int = 16) -> KVLayout:
        """The layout of an unsharded model, from its Hugging Face configuration.

        Models with ``kv_lora_rank`` and ``qk_rope_head_dim`` (DeepSeek's MLA) give ``mla``, all others ``gqa``.

        Args:
            config: a ``PretrainedConfig``, or the mapping that ``config.json`` holds. A multimodal model's text part
                is taken.
            dtype: the KV dtype, where it is not the ``dtype`` (or ``torch_dtype``) of the configuration.
            block_tokens: tokens a full block. Default 16.

        Raises:
            ConfigError: where a field is missing; the message names it.
            UnsupportedError: for layers that keep no KV per token (linear attention), or that share it.
        """
        read = _Reader(config)
        read.refuse_unsupported()
        if dtype is None:
            dtype = read.optional("dtype", "torch_dtype")
        if dtype is None:
            raise ConfigError(
                "the configuration names no dtype (or torch_dtype): pass dtype=, the one your engine keeps KV in"
            )
        layers = read.number("num_hidden_layers", "n_layer")
        common: dict[str, Any] = {"dtype": dtype_name(dtype), "block_tokens": block_tokens}
        if read.optional("kv_lora_rank") is not None:
            return cls(
                layers, "mla", rank=read.number("kv_lora_rank"), rope_dim=read.number("qk_rope_head_dim"), **common
            )
        heads, dim = read.heads(), read.head_dim()
        value_dim = read.optional("v_head_dim")
        if value_dim is not None and value_dim != dim:
            raise UnsupportedError(
                f"head_dim={dim} but v_head_dim={value_dim}: keys and values of different sizes have no gqa layout; "
                "use KVLayout.opaque with the engine's own bytes"
            )
        kinds = read.optional("layer_types")
        wide_dim, wide_heads = read.optional("global_head_dim"), read.optional("num_global_key_value_heads")
        if kinds is None or (wide_dim is None and wide_heads is None):
            return cls(layers, "gqa", heads, dim, **common)
        full = [kind == "full_attention" for kind in kinds]
        return cls(
            layers,
            "gqa",
            tuple((wide_heads or heads) if wide else heads for wide in full),
            tuple((wide_dim or dim) if wide else dim for wide in full),
            **common,
        )

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype]

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """One :class:`Segment` a layer, in the order of the block; empty for ``opaque``."""
        if self.kind == "mla":
            return (Segment(1, (self.rank + self.rope_dim) * self.itemsize),) * self.layers
        return tuple(Segment(2, heads * dim * self.itemsize) for heads, dim in self.heads)

    @cached_property
    def heads(self) -> tuple[tuple[int, int], ...]:
        """``(kv_heads, head_dim)`` of each layer; ``gqa`` only, else empty."""
        if self.kind != "gqa":
            return ()
        return tuple(zip(_each(self.kv_heads, self.layers), _each(self.head_dim, self.layers), strict=True))

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes of one token, all layers together; 0 for ``opaque``."""
        return sum(segment.planes * segment.token_bytes for segment in self.segments)

    @property
    def block_bytes(self) -> int:
        """Bytes of a full block; 0 for ``opaque``, whose blocks have any length."""
        return self.bytes_per_token * self.block_tokens

    @property
    def uniform(self) -> bool:
        """Whether all layers have the same shape."""
        return len(set(self.heads)) <= 1

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each layer begins in a full block, and the block's end: ``layers + 1`` numbers."""
        sizes = (segment.planes * segment.token_bytes * self.block_tokens for segment in self.segments)
        return tuple(accumulate(sizes, initial=0))

    def byte_range(self, layer: int, tokens: tuple[int, int] | None = None) -> tuple[tuple[int, int], ...]:
        """Where a layer's tokens lie in a full block.

        Args:
            layer: 0 to ``layers - 1``.
            tokens: ``(start, stop)`` within the block; default all of it.

        Returns:
            ``(start, stop)`` in bytes, one pair a plane: two for ``gqa`` (keys, values), else one.

        Raises:
            ConfigError: for a layer or a range outside the block.
        """
        if not 0 <= layer < self.layers:
            raise ConfigError(f"layer {layer} is outside the block, which has {self.layers} layers, counted from 0")
        start, stop = (0, self.block_tokens) if tokens is None else tokens
        if not 0 <= start < stop <= self.block_tokens:
            raise ConfigError(
                f"tokens ({start}, {stop}) is not a range within the block; allowed is 0 <= start < stop <= {self.block_tokens}"
            )
        planes, size = self.segments[layer]
        first = self.offsets[layer]
        plane = self.block_tokens * size
        return tuple((first + p * plane + start * size, first + p * plane + stop * size) for p in range(planes))

    def shape(self, tokens: int | None = None) -> tuple[int, ...]:
        """The shape of a block of ``tokens`` tokens (default a full one).

        Returns:
            ``(layers, 2, tokens, kv_heads, head_dim)`` for ``gqa``, ``(layers, tokens, rank + rope_dim)`` for
            ``mla``, in elements of ``dtype``; ``(bytes,)`` where the layers differ.

        Raises:
            ConfigError: for fewer than 1 or more than ``block_tokens`` tokens, or an opaque layout.
        """
        count = self.block_tokens if tokens is None else tokens
        if not 1 <= count <= self.block_tokens:
            raise ConfigError(f"{count} tokens do not make a block; allowed are 1 to {self.block_tokens}")
        if self.kind == "mla":
            return (self.layers, count, self.rank + self.rope_dim)
        if self.kind == "opaque":
            raise ConfigError("an opaque block has no shape: its bytes are the engine's own")
        if not self.uniform:
            return (count * self.bytes_per_token,)
        return (self.layers, 2, count, *self.heads[0])

    def fingerprint(self) -> bytes:
        """Canonical bytes for the namespace digest: equal only for layouts that give every byte the same meaning."""
        return canonical.encode(
            {
                "layout": 1,
                "kind": self.kind,
                "dtype": self.dtype,
                "block_tokens": self.block_tokens,
                "segments": [list(segment) for segment in self.segments],
                "heads": [list(pair) for pair in self.heads],
                "rank": self.rank,
                "rope_dim": self.rope_dim,
            }
        )


def _positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value!r} is not allowed; it must be a whole number of at least 1")


def _each(value: int | tuple[int, ...], layers: int) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,) * layers


class _Reader:
    """Reads fields of a Hugging Face configuration, from an object or a mapping."""

    def __init__(self, config: object) -> None:
        if isinstance(config, Mapping):
            config = config.get("text_config") or config
        elif hasattr(config, "get_text_config"):
            config = config.get_text_config()
        self._config = config

    def optional(self, *names: str) -> Any:
        for name in names:
            value = self._config.get(name) if isinstance(self._config, Mapping) else getattr(self._config, name, None)
            if value is not None:
                return value
        return None

    def number(self, *names: str) -> int:
        value = self.optional(*names)
        if value is None:
            raise ConfigError(
                f"the configuration has no {' or '.join(names)}: build the KVLayout by hand, or add the field"
            )
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(
                f"{names[0]}={value!r} in the configuration is not a whole number: build the KVLayout by hand"
            )
        return value

    def heads(self) -> int:
        return self.number("num_key_value_heads", "num_attention_heads", "n_head")

    def head_dim(self) -> int:
        given = self.optional("head_dim")
        if given is not None:
            return self.number("head_dim")
        return self.number("hidden_size", "n_embd") // self.number("num_attention_heads", "n_head")

    def refuse_unsupported(self) -> None:
        kinds = set(self.optional("layer_types") or ())
        strange = sorted(kinds - {"full_attention", "sliding_attention", "chunked_attention"})
        if strange:
            raise UnsupportedError(
                f"layers of type {', '.join(strange)} keep no keys and values per token; supported are full, sliding and chunked "
                "attention: use KVLayout.opaque with the engine's own bytes"
            )
        if self.optional("num_kv_shared_layers") or "reuse" in (self.optional("kv_sharing_modes") or ()):
            raise UnsupportedError(
                "layers that share another layer's KV have no layout here: build one for the layers that keep their own"
            )


def span_of(what: Literal["layers", "tokens"], span: Span) -> tuple[int, int] | None:
    """The ends of a span of ``what``.

    Raises:
        InvalidBlockError: where it is none. Whether a block has them is not looked at.
    """
    match span:
        case None:
            return None
        case range() | slice() if span.step in (None, 1):
            ends: tuple[Any, Any] = (span.start, span.stop)
        case (start, stop):
            ends = (start, stop)
        case _:
            ends = (None, None)
    try:
        first, last = map(operator.index, ends)
    except TypeError:
        first, last = -1, -1
    if not (0 <= first < 2**32 and 0 <= last < 2**32):
        raise InvalidBlockError(
            f"{what}={span!r} was given; allowed are range(start, stop) or (start, stop), from 0 on"
        )
    return first, last


def tokens_of(tokens: Picks, layout: KVLayout) -> tuple[int, int] | NDArray[np.bool_] | None:
    """The ends of a span of tokens, or flags of the tokens of each of several blocks.

    Raises:
        InvalidBlockError: where it is neither. Whether a block has them, and how many blocks there are, is not looked at.
    """
    if not isinstance(tokens, np.ndarray):
        return span_of("tokens", tokens)
    fits = tokens.dtype == np.bool_ and tokens.ndim == 2 and tokens.shape[1] == layout.block_tokens
    if not fits or layout.kind == "opaque":
        allowed = "None: an opaque block has no tokens"
        if layout.kind != "opaque":
            allowed = f"bool[keys, {layout.block_tokens}], or a range"
        raise InvalidBlockError(f"tokens={tokens.dtype}{list(tokens.shape)} was given; allowed is {allowed}")
    return np.ascontiguousarray(tokens)
