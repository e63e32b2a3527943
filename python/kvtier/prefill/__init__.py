"""Prefills that overlap, split or decline the loading of their stored KV, each by what is measured.

>>> from kvtier.prefill import PrefillEngine, namespace  # doctest: +SKIP
>>> engine = PrefillEngine(model, namespace(store, model))  # doctest: +SKIP
>>> logits, cache, report = engine.run(input_ids)  # doctest: +SKIP
"""

from kvtier.prefill.engine import PrefillEngine
from kvtier.prefill.model import forward, layout_of, logits_of, namespace
from kvtier.prefill.report import PrefillReport
from kvtier.prefill.request import Prefill
from kvtier.prefill.storing import WriteBack
from kvtier.prefill.timeline import Event

__all__ = [
    "Event",
    "Prefill",
    "PrefillEngine",
    "PrefillReport",
    "WriteBack",
    "forward",
    "layout_of",
    "logits_of",
    "namespace",
]
