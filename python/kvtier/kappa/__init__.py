"""The κ cost model: what a KV cache hit is worth, on which machine.

Sizes and operations from a model's configuration, κ, the time to the first token, and the decision to load or to compute
again. NumPy only; ``docs/KAPPA.md`` explains it from zero.

>>> from kvtier.kappa import HardwareSpec, LinkSpec, ModelSpec, kappa_crit
>>> model, gpu, link = ModelSpec.named("Llama-3.1-70B"), HardwareSpec.named("H100-SXM"), LinkSpec.named("PCIe5 x16")
>>> round(kappa_crit(model, gpu, link, 32), 1)
27.5
"""

from kvtier.kappa.catalog import Catalog, catalog
from kvtier.kappa.cost import Flops, depth_slope, experts_touched, flops, kv_bytes, pairs, weight_bytes
from kvtier.kappa.decide import Decision, Request, Residency, decide
from kvtier.kappa.hardware import HardwareSpec, LinkSpec
from kvtier.kappa.kvformat import KVFormat
from kvtier.kappa.measured import Measured, MeasuredTier
from kvtier.kappa.model import Experts, Latent, ModelSpec
from kvtier.kappa.parallel import Parallel, shard, tensor_parallel
from kvtier.kappa.passes import Passes
from kvtier.kappa.ratio import kappa_crit, kappa_hw, kappa_m, kappa_ratio, kappa_turn, t_star
from kvtier.kappa.ttft import (
    Compute,
    Load,
    Part,
    Split,
    Ttft,
    WriteBack,
    compute,
    layer_times,
    load,
    pipelined,
    recurrence,
    serial,
    split,
    split_at,
    write_back,
)

__all__ = [
    "Catalog",
    "Compute",
    "Decision",
    "Experts",
    "Flops",
    "HardwareSpec",
    "KVFormat",
    "Latent",
    "LinkSpec",
    "Load",
    "Measured",
    "MeasuredTier",
    "ModelSpec",
    "Parallel",
    "Part",
    "Passes",
    "Request",
    "Residency",
    "Split",
    "Ttft",
    "WriteBack",
    "catalog",
    "compute",
    "decide",
    "depth_slope",
    "experts_touched",
    "flops",
    "kappa_crit",
    "kappa_hw",
    "kappa_m",
    "kappa_ratio",
    "kappa_turn",
    "kv_bytes",
    "layer_times",
    "load",
    "pairs",
    "pipelined",
    "recurrence",
    "serial",
    "shard",
    "split",
    "split_at",
    "t_star",
    "tensor_parallel",
    "weight_bytes",
    "write_back",
]
