"""Traces of requests: read from files, or generated, to be replayed by ``kvtier replay``."""

from kvtier.traces.read import read
from kvtier.traces.synthetic import GENERATORS, agent, chat, docqa
from kvtier.traces.trace import Outcome, Trace

__all__ = ["GENERATORS", "Outcome", "Trace", "agent", "chat", "docqa", "read"]
