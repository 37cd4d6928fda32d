"""Which device of a snapshot a question is about, and what people call it."""

from __future__ import annotations

import numpy as np

from memtrace.errors import UsageError
from memtrace.snapshot.model import Action, Device, Snapshot
from memtrace.snapshot.version import other_backend


def choose_device(snapshot: Snapshot, wanted: int | None) -> tuple[Device, str | None]:
    """(device, a line that says how it was chosen or None if there was no choice).

    The only device with data, else the one that ran out of memory, else the one with the most reserved at the end or
    ever. Raises UsageError if ``wanted`` has no data.
    """
    devices = snapshot.devices
    if wanted is not None:
        for device in devices:
            if device.device == wanted:
                return device, None
        known = ", ".join(str(device.device) for device in devices)
        raise UsageError(f"device {wanted} has no data in this snapshot (devices with data: {known})")
    if len(devices) == 1:
        return devices[0], None
    for device in devices:
        if (device.trace.action == Action.OOM).any():
            return (
                device,
                f"device {device.device} of {len(devices)}: the one that ran out of memory (--device N for another)",
            )
    best = max(devices, key=_highest_reserved)
    return best, f"device {best.device} of {len(devices)}: the one with the highest peak (--device N for another)"


def device_name(snapshot: Snapshot, number: int, is_npu: bool = False) -> str:
    """``GPU 0``, or ``NPU 0``, ``XPU 0`` … by the back end that wrote the file. ``is_npu``: its block sizes say so."""
    backend = "npu" if is_npu else other_backend(snapshot)
    return f"{'GPU' if backend is None else backend.upper()} {number}"


def _highest_reserved(device: Device) -> int:
    """Peak reserved bytes from segment events alone, cheap enough to compare devices by."""
    trace = device.trace
    grows = (trace.action == Action.SEGMENT_ALLOC) | (trace.action == Action.SEGMENT_MAP)
    shrinks = (trace.action == Action.SEGMENT_FREE) | (trace.action == Action.SEGMENT_UNMAP)
    curve = np.cumsum(np.where(grows, trace.size, np.where(shrinks, -trace.size, 0)))
    end = int(device.segments.total_size.sum())
    return end if not len(curve) else max(end, end - int(curve[-1]) + int(curve.max()))
