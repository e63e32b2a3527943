"""What ``kvtier bench`` measures: the store beside the machine's own speed.

Every figure has its bound from the same run: laps of the store and of the bound alternate, so that a machine that
changes its speed changes both. :func:`store_suite` and :func:`codec_suite` give the rows.
"""

from __future__ import annotations

from kvtier.bench.codecs import codec_suite
from kvtier.bench.figures import Row
from kvtier.bench.plan import FULL, QUICK, Plan
from kvtier.bench.suite import store_suite

__all__ = ["FULL", "QUICK", "Plan", "Row", "codec_suite", "store_suite"]
