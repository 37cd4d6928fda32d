"""Source text of a frame, where the file exists on this machine, and which frames are library plumbing."""

from __future__ import annotations

import stat
from functools import lru_cache
from pathlib import Path

from memtrace.attribution.sites import is_plumbing
from memtrace.snapshot.stacks import Frame
from memtrace.units import printable
from memtrace_tui.data.lines import Line, line
from memtrace_tui.settings import is_served

_LARGEST_BYTES = 4 << 20
_SUFFIXES = {".py", ".pyx", ".pyi", ".ipynb", ".cpp", ".cc", ".c", ".h", ".hpp", ".cu", ".cuh"}


is_library = lru_cache(1 << 14)(is_plumbing)


@lru_cache(maxsize=64)
def _text(filename: str) -> tuple[str, ...] | None:
    """Lines of a source file; None unless it is a regular file of source code and of sensible size.

    The path comes from the recording, so nothing but plain source files is ever opened.
    """
    path = Path(filename)
    try:
        if path.suffix not in _SUFFIXES or not path.is_absolute():
            return None
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST_BYTES:
            return None
        return tuple(path.read_text("utf-8", "replace").splitlines())
    except (OSError, ValueError):
        return None


def source_lines(frame: Frame, height: int) -> list[Line]:
    """About ``height`` lines around the frame's line, that one marked; [] where the file isn't here."""
    text = None if is_served() else _text(frame.filename)
    if text is None or not 1 <= frame.line <= len(text) or height < 1:
        return []
    first = max(0, min(frame.line - 1 - height // 2, len(text) - height))
    lines = []
    for number in range(first, min(first + height, len(text))):
        here = number == frame.line - 1
        code = printable(text[number].expandtabs(4))
        lines.append(line((f"{number + 1:>5} ", "dim"), ("▶ " if here else "  ", "accent"),
                          (code, "strong" if here else "text")))  # fmt: skip
    return lines
