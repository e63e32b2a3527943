"""Memory of devices: pools of bytes that blocks are copied into and out of, in batches, beside the computation."""

from kvtier.tiers.backend import Copy, Copying, DeviceBackend, open_backend
from kvtier.tiers.host import HostBackend

__all__ = ["Copy", "Copying", "DeviceBackend", "HostBackend", "open_backend"]
