"""Which parts of memtrace run compiled. Each has a plain twin that gives the same answer, used where it is missing.

``MEMTRACE_PLAIN=1`` uses the plain parts alone.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

SWITCH = "MEMTRACE_PLAIN"
PARTS = {
    "decoder": "memtrace.snapshot.decoder._reader",
    "allocator": "memtrace.allocator._compiled",
}


def part(name: str) -> Any:
    """The compiled module of a part, or None."""
    if os.environ.get(SWITCH):
        return None
    try:
        found: ModuleType = import_module(PARTS[name])
    except ImportError:
        return None
    return found


def described() -> str:
    """One line for people: which parts are compiled."""
    if os.environ.get(SWITCH):
        return f"plain Python ({SWITCH} is set)"
    missing = [name for name, module in PARTS.items() if find_spec(module) is None]  # loading them takes numpy
    if not missing:
        return "compiled"
    return "plain Python (no compiled part was installed)" if len(missing) == len(PARTS) else f"plain: {missing}"
