"""How much of the card lies outside PyTorch's allocator, read at a few points of the run, and what of it is whose.

CUDA tells what is free on the card; NVML, where it names this process, what the process holds. What grew
between two points came from what ran there: kernels' code, handles of cuBLAS and cuDNN, communicators.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from typing import Any

from memtrace.record.backend import CudaBackend, import_torch
from memtrace.record.phases import now_us

_MOST_PROCESSES = 128
_UNTOLD = (1 << 64) - 1


class Readings:
    """Readings by point, each point once; see :meth:`read`."""

    def __init__(self, backend: CudaBackend) -> None:
        self._backend = backend
        self._rows: dict[str, dict[str, Any]] = {}

    def read(self, point: str, device: int) -> None:
        """Read at the first ``point`` of this name; never raises."""
        if point not in self._rows:
            with contextlib.suppress(RuntimeError, AttributeError):
                self._rows[point] = self._now(point, device)

    def rows(self, device: int) -> list[dict[str, Any]]:
        """All there are, and one of now; bytes. ``process_bytes``: by NVML, ``None`` if untold."""
        with contextlib.suppress(RuntimeError, AttributeError):
            return [*self._rows.values(), self._now("snapshot", device)]
        return list(self._rows.values())

    def _now(self, point: str, device: int) -> dict[str, Any]:
        free, total = self._backend.memory_info(device)
        reserved = self._backend.levels(device)[1]
        held = by_process(device) if self._backend.device_type == "cuda" else {}
        return {
            "at": point,
            "time_us": now_us(),
            "used_bytes": total - free,
            "reserved_bytes": reserved,
            "process_bytes": held.get(os.getpid()),
        }


class _Process(ctypes.Structure):
    """``nvmlProcessInfo_t``."""

    _fields_ = (
        ("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("instance", ctypes.c_uint), ("part", ctypes.c_uint),
    )  # fmt: skip


@functools.cache
def _card(device: int) -> tuple[Any, ctypes.c_void_p] | None:
    """NVML and its handle of a CUDA device; None where there is none."""
    handle = ctypes.c_void_p()
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        name = f"GPU-{import_torch().cuda.get_device_properties(device).uuid}".encode()
        if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)):
            return None
    except (OSError, AttributeError, RuntimeError):
        return None
    return library, handle


def by_process(device: int) -> dict[int, int]:
    """Bytes that each process holds on a device, by pid as NVML sees it; empty where it does not tell."""
    card = _card(device)
    if card is None:
        return {}
    count, rows = ctypes.c_uint(_MOST_PROCESSES), (_Process * _MOST_PROCESSES)()
    ask = getattr(card[0], "nvmlDeviceGetComputeRunningProcesses_v3", None)  # drivers before 510 have none
    if ask is None or ask(card[1], ctypes.byref(count), rows):
        return {}
    return {row.pid: row.used for row in rows[: count.value] if row.used != _UNTOLD}
