"""How one element of the KV cache is kept, with the scales that quantisation adds."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.errors import ConfigError
from kvtier.kappa.number import whole
from kvtier.layout import DTYPES, dtype_name

__all__ = ["KVFormat"]

_QUANTISED = ("int8", "fp8_e4m3", "fp8_e5m2")


@dataclass(frozen=True)
class KVFormat:
    """The stored form of keys and values.

    Args:
        dtype: of the elements, see :func:`kvtier.layout.dtype_name`. Default bf16.
        group: how many elements of one head (MLA: of the latent) share a scale; a last smaller group has one too.
            0 (default) keeps no scales with the tokens.
        scale_bytes: bytes of one scale. Default 0; needs ``group``.
        rope_dtype: MLA only: the dtype of the rotary key, where it differs. Default None, the same as ``dtype``.

    Raises:
        ConfigError: for an unknown dtype, a group without scale bytes, or the reverse.

    Sources: DeepSeek's packed fp8 layout is 512 fp8 elements, one fp32 scale for 128 of them, and 64 rotary elements in
    bf16: 656 bytes a token and layer, where bf16 takes 1,152.
    """

    dtype: str = "bf16"
    group: int = 0
    scale_bytes: int = 0
    rope_dtype: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        if self.rope_dtype is not None:
            object.__setattr__(self, "rope_dtype", dtype_name(self.rope_dtype))
        whole("group", self.group, 0)
        whole("scale_bytes", self.scale_bytes, 0)
        if (self.group == 0) != (self.scale_bytes == 0):
            raise ConfigError(
                f"group={self.group} and scale_bytes={self.scale_bytes} do not fit: give both, or neither for no scales"
            )

    @classmethod
    def named(cls, name: str, *, latent: bool, head_dim: int) -> KVFormat:
        """The usual format of a dtype.

        Args:
            name: a dtype. ``bf16``, ``fp16`` and ``fp32`` have no scales. ``fp8`` has, with heads, one scale a tensor
                that is kept with the weights (none a token); ``int8`` has, with heads, one fp32 scale a token and
                head for the keys and one for the values. With latents (MLA) both are packed: one fp32 scale for 128
                elements, the rotary key in bf16.
            latent: whether the model keeps latents.
            head_dim: elements of one head; unused with latents.

        Raises:
            ConfigError: for an unknown dtype.
        """
        dtype = dtype_name(name)
        if dtype not in _QUANTISED:
            return cls(dtype)
        if latent:
            return cls(dtype, group=128, scale_bytes=4, rope_dtype="bf16")
        return cls(dtype, group=head_dim, scale_bytes=4) if dtype == "int8" else cls(dtype)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype]

    @property
    def rope_itemsize(self) -> int:
        """Bytes of one element of the rotary key."""
        return DTYPES[self.rope_dtype or self.dtype]

    def vector_bytes(self, elements: int) -> int:
        """Bytes of one vector of ``elements`` with its scales (a head's key or value, or the latent of a token)."""
        scales = -(-elements // self.group) * self.scale_bytes if self.group else 0
        return elements * self.itemsize + scales
