"""Every error memtrace raises on purpose, each with the exit code it ends a command with.

Exit codes (documented in docs/contract.md): 0 done · 1 a check failed · 2 wrong usage · 3 input unreadable or not a
snapshot · 4 input readable but can't answer · 5 an optional package or device is missing · 130 interrupted.
"""

from __future__ import annotations


class MemtraceError(Exception):
    """Base of all. ``str(error)`` is one clear line for a person; ``exit_code`` is what a command returns."""

    exit_code = 1


class UsageError(MemtraceError):
    """The command line or an argument makes no sense."""

    exit_code = 2


class SnapshotError(MemtraceError):
    """The input can't be read, or is not a memory snapshot."""

    exit_code = 3


class NoAnswerError(MemtraceError):
    """The snapshot is readable but lacks what the question needs (a trace, say)."""

    exit_code = 4


class MissingDependencyError(MemtraceError):
    """An optional package or a device is missing."""

    exit_code = 5

    @classmethod
    def of_extra(cls, needs: str, extra: str) -> MissingDependencyError:
        """``needs`` ("plots need matplotlib") and how to get it: the optional packages of torch-memtrace[``extra``]."""
        return cls(f"{needs}: pip install 'torch-memtrace[{extra}]' (in a clone: pip install '.[{extra}]')")
