"""memtrace: why did the GPU run out of memory?

The public names below are imported on first use, so that ``import memtrace`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from memtrace._version import __version__

_PUBLIC = {
    "load": "memtrace.snapshot.load",
    "Snapshot": "memtrace.snapshot.model",
    "MemtraceError": "memtrace.errors",
    "record": "memtrace.capture.api",
    "MemtraceCallback": "memtrace.capture.callback",
}

__all__ = ["MemtraceCallback", "MemtraceError", "Snapshot", "__version__", "load", "record"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'memtrace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
