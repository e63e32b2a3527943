"""What a GPU and the link to it can do."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Literal

from kvtier.errors import ConfigError
from kvtier.kappa.number import positive

__all__ = ["Convention", "HardwareSpec", "LinkSpec"]

Convention = Literal["dense", "paper"]
"""``"dense"``: the dense peak times the MFU, which a prefill can reach. ``"paper"``: the 2:4-sparse peak, as in arXiv
2601.19910, so that its figures can be seen beside the others."""

_RATE = re.compile(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmgt]?)b/s\s*", re.IGNORECASE)


@dataclass(frozen=True)
class HardwareSpec:
    """One GPU (or one CPU socket).

    Args:
        name: for people.
        dense_flops: peak FLOP/s of dense bf16 matrix products.
        hbm_bandwidth: bytes/s of its own memory.
        hbm_bytes: capacity of that memory, in bytes; None (default) where it does not matter.
        sparse_flops: peak FLOP/s with 2:4 sparsity; only the paper's convention uses it. Default None.
        mfu: the share of ``dense_flops`` that a prefill reaches, above 0 to 1. Default 1: measure it.
        tdp_w: watts. Default None.
        sources: where each field's figure comes from.
        note: what is disputed about the figures.

    Raises:
        ConfigError: for a value out of range.
    """

    name: str
    dense_flops: float
    hbm_bandwidth: float
    hbm_bytes: float | None = None
    sparse_flops: float | None = None
    mfu: float = 1.0
    tdp_w: float | None = None
    sources: dict[str, str] = field(default_factory=dict, compare=False)
    note: str = ""

    def __post_init__(self) -> None:
        positive("dense_flops", self.dense_flops)
        positive("hbm_bandwidth", self.hbm_bandwidth)
        for name in ("hbm_bytes", "sparse_flops", "tdp_w"):
            if getattr(self, name) is not None:
                positive(name, getattr(self, name))
        if positive("mfu", self.mfu) > 1:
            raise ConfigError(f"mfu={self.mfu!r} is more than the peak; allowed is above 0 to 1")

    @classmethod
    def named(cls, name: str) -> HardwareSpec:
        """Hardware of the package's catalog; see :meth:`ModelSpec.named` for what fits.

        Raises:
            ConfigError: for none or several; the message lists them.
        """
        from kvtier.kappa.catalog import catalog

        return catalog().hardware(name)

    def flops(self, convention: Convention = "dense") -> float:
        """Sustained FLOP/s, C: dense peak times MFU, or by the paper's convention the sparse peak.

        Raises:
            ConfigError: for the paper's convention where no sparse peak is known.
        """
        if convention == "dense":
            return self.dense_flops * self.mfu
        if self.sparse_flops is None:
            raise ConfigError(f"{self.name} has no sparse_flops, which the paper's convention divides by: add it")
        return self.sparse_flops

    def with_mfu(self, mfu: float) -> HardwareSpec:
        """The same hardware at another MFU.

        Raises:
            ConfigError: for less than or equal to 0, or more than 1.
        """
        return replace(self, mfu=mfu)


@dataclass(frozen=True)
class LinkSpec:
    """The way from where KV is kept to the GPU. All rates are bytes/s **one way**.

    Args:
        name: for people.
        read: towards the GPU.
        write: away from it; default None, the same as ``read``.
        both: both directions together when both are busy; default None, no contention (``read + write``).
        measured: what others measured towards the GPU, each with its source.
        source: where ``read`` comes from.

    Raises:
        ConfigError: for a rate that is not above 0, or ``both`` below ``read`` or ``write`` alone or above their sum.
    """

    name: str
    read: float
    write: float | None = None
    both: float | None = None
    measured: tuple[tuple[float, str], ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        positive("read", self.read)
        if self.write is None:
            object.__setattr__(self, "write", self.read)
        positive("write", self.write)
        if self.both is not None:
            positive("both", self.both)
            if not max(self.read, self.write_rate) <= self.both <= self.read + self.write_rate:
                raise ConfigError(
                    f"both={self.both!r} does not fit read={self.read!r} and write={self.write!r}; allowed is at least the "
                    "faster alone and at most their sum"
                )

    @classmethod
    def named(cls, name: str) -> LinkSpec:
        """A link of the package's catalog, or of the rate that ``name`` states (``"55GB/s"``, powers of 1000).

        Raises:
            ConfigError: for none or several; the message lists them.
        """
        if match := _RATE.fullmatch(name):
            rate = float(match[1]) * 1000 ** " kmgt".index(match[2].lower() or " ")
            return cls(name.strip(), rate, source="given as a rate")
        from kvtier.kappa.catalog import catalog

        return catalog().link(name)

    @property
    def write_rate(self) -> float:
        """Bytes/s away from the GPU."""
        return self.read if self.write is None else self.write

    @property
    def contended(self) -> tuple[float, float]:
        """Bytes/s ``(towards, away)`` while both directions are busy: each its share of ``both``."""
        if self.both is None:
            return self.read, self.write_rate
        share = self.both / (self.read + self.write_rate)
        return self.read * share, self.write_rate * share
