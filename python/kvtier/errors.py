"""What can go wrong, as one tree of exceptions.

Every class also derives from the builtin that a Python user would catch. A miss is a value, not an error: nothing
here is raised because a block is absent. Every message says what was given, what is allowed, and what to do.
"""

from __future__ import annotations

__all__ = [
    "ClosedError",
    "ConfigError",
    "CorruptError",
    "DeadlineError",
    "FullError",
    "InvalidBlockError",
    "KvtierError",
    "LockedError",
    "StorageError",
    "UnsupportedError",
]


class KvtierError(Exception):
    """The base of every error that kvtier raises on purpose."""


class ConfigError(KvtierError, ValueError):
    """A setting, layout or identity that cannot be used as given."""


class InvalidBlockError(KvtierError, ValueError):
    """A key or a buffer of the wrong size, dtype, shape or contiguity."""


class ClosedError(KvtierError, RuntimeError):
    """The store was closed, or this process is a fork of the one that opened it."""


class LockedError(KvtierError, BlockingIOError):
    """Another process holds the directory; the message names its process id."""


class FullError(KvtierError, OSError):
    """No room within the configured capacity, because pins or writes in flight hold it."""


class DeadlineError(KvtierError, TimeoutError):
    """A wait reached its ``timeout`` before it was over."""


class StorageError(KvtierError, OSError):
    """A device or file failed to read, write or allocate."""


class CorruptError(KvtierError, OSError):
    """A directory whose superblocks or journal cannot be trusted as they are."""


class UnsupportedError(KvtierError, NotImplementedError):
    """Something that this version, this build or this machine cannot do."""
