"""What a decision costs: ``pytest benches/`` prints the microseconds a call beside the aim of 20."""

from __future__ import annotations

import math
import time

import pytest

from kvtier.kappa import Measured, MeasuredTier, ModelSpec, Passes, Request, Residency, decide, kv_bytes

RUNS, CALLS = 60, 20


PASSES = Passes((0, 4096, 65_536), (1, 64, 256), ((0.02, 0.03, 0.06), (0.021, 0.035, 0.08), (0.03, 0.06, 0.2)))


@pytest.mark.parametrize("passes", [None, PASSES], ids=["rates", "passes"])
@pytest.mark.parametrize("name", ["Llama-3.1-70B", "DeepSeek-V3", "gpt-oss-120b"])
def test_a_decision(name: str, passes: Passes | None, capsys: pytest.CaptureFixture[str]) -> None:
    model = ModelSpec.named(name)
    machine = Measured(
        model=model,
        flops_per_s=400e12,
        memory_bytes_per_s=3e12,
        tiers=(MeasuredTier("dram", 50e9), MeasuredTier("nvme", 6e9)),
        date="2026-01-31",
        passes=passes,
    )
    size = float(kv_bytes(model, 65_536))
    request, residency = Request(65_536, 32), Residency({"dram": size * 0.7, "nvme": size * 0.3})
    best = math.inf
    for _ in range(RUNS):
        start = time.perf_counter()
        for _ in range(CALLS):
            decision = decide(request, residency, machine, granularity=16)
        best = min(best, (time.perf_counter() - start) / CALLS)
    assert decision.action in ("load", "recompute", "split")
    with capsys.disabled():
        print(f"\ndecide, {name}, {'passes' if passes else 'rates'}: {best * 1e6:.1f} µs a call (aim 20)")
