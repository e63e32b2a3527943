"""kvtier: a tiered store for the KV cache of LLM inference.

>>> from kvtier import Dram, Nvme, Store
>>> store = Store(Dram("4GiB"), Nvme("/data/kv", "100GiB"))  # doctest: +SKIP
"""

from kvtier._kvtier import Region, __version__
from kvtier.config import Cxl, Dram, Hbm, Nvme, StoreConfig
from kvtier.errors import (
    ClosedError,
    ConfigError,
    CorruptError,
    DeadlineError,
    FullError,
    InvalidBlockError,
    KvtierError,
    LockedError,
    StorageError,
    UnsupportedError,
)
from kvtier.identity import Identity
from kvtier.job import Job
from kvtier.layout import KVLayout
from kvtier.lease import Lease
from kvtier.namespace import Namespace
from kvtier.quota import Quota
from kvtier.results import Match, PutResult, Result
from kvtier.store import Store

__all__ = [
    "ClosedError",
    "ConfigError",
    "CorruptError",
    "Cxl",
    "DeadlineError",
    "Dram",
    "FullError",
    "Hbm",
    "Identity",
    "InvalidBlockError",
    "Job",
    "KVLayout",
    "KvtierError",
    "Lease",
    "LockedError",
    "Match",
    "Namespace",
    "Nvme",
    "PutResult",
    "Quota",
    "Region",
    "Result",
    "StorageError",
    "Store",
    "StoreConfig",
    "UnsupportedError",
    "__version__",
]
