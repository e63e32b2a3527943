"""Memory of devices: pools of bytes that blocks are copied into and out of, in batches, beside the computation."""

from kvtier.tiers.backend import Copy, Copying, Delivery, DeviceBackend, open_backend
from kvtier.tiers.host import HostArray, HostBackend

__all__ = ["Copy", "Copying", "Delivery", "DeviceBackend", "HostArray", "HostBackend", "open_backend"]
