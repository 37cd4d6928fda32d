"""memtrace: why did the GPU run out of memory?

The public names below are imported on first use, so that ``import memtrace`` costs nothing.
"""

from __future__ import annotations

import sys

from memtrace._version import __version__

TYPE_CHECKING = False  # as type checkers know it; importing typing would take half the time of `import memtrace`
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from memtrace.record.api import record
    from memtrace.session import open_file as open
else:
    ModuleType = type(sys)

_PUBLIC = {
    "load": "memtrace.snapshot.load",
    "Snapshot": "memtrace.snapshot.model",
    "MemtraceError": "memtrace.errors",
    "record": "memtrace.record.api",
    "MemtraceCallback": "memtrace.record.callback",
    "LightningCallback": "memtrace.record.trainers",
    "AccelerateTracker": "memtrace.record.trainers",
    "open": "memtrace.session",
    "load_ipython_extension": "memtrace.notebook",
}

_RENAMED = {"open": "open_file"}  # where a module's own name may not hide Python's

__all__ = ["MemtraceCallback", "MemtraceError", "Snapshot", "__version__", "load", "open", "record"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        from importlib import import_module

        return getattr(import_module(_PUBLIC[name]), _RENAMED.get(name, name))
    raise AttributeError(f"module 'memtrace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """``memtrace.record`` is the function, also after the package of that name was imported."""

    @property
    def record(self) -> Any:
        return __getattr__("record")

    @record.setter
    def record(self, package: Any) -> None:
        """The import system offers the package here."""


sys.modules[__name__].__class__ = _Package
