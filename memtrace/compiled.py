"""Which parts of memtrace run compiled. Each has a plain twin that gives the same answer, used where it is missing.

``MEMTRACE_PLAIN=1`` uses the plain parts alone.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
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
    return None if is_outdated(found.__file__ or "") else found


def is_outdated(binary: str) -> bool:
    """Whether this is a checkout whose source has changed since it was compiled: the two may not fit each other."""
    source = Path(binary).with_name(Path(binary).name.split(".")[0] + ".pyx")
    return source.exists() and source.stat().st_mtime > Path(binary).stat().st_mtime


def described() -> str:
    """One line for people: which parts are compiled."""
    if os.environ.get(SWITCH):
        return f"plain Python ({SWITCH} is set)"
    found = {name: find_spec(module) for name, module in PARTS.items()}  # loading them takes numpy
    missing = [name for name, spec in found.items() if spec is None]
    if any(spec is not None and is_outdated(spec.origin or "") for spec in found.values()):
        return "plain Python (the compiled parts are older than their source: install again)"
    if not missing:
        return "compiled"
    return "plain Python (no compiled part was installed)" if len(missing) == len(PARTS) else f"plain: {missing}"
