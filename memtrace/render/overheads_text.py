"""The hidden overheads as text."""

from __future__ import annotations

from memtrace.explain.overheads import Overheads
from memtrace.render.words import moment_name
from memtrace.units import format_bytes


def render_overheads(found: Overheads) -> list[str]:
    """One line an overhead: its bytes, what would be left without it and those above it, and what it is."""
    lines = [f"{format_bytes(found.reserved_bytes)} reserved at the {moment_name(found.at)}", ""]
    lines.append(f"{'overhead':>12}  {'left without':>12}  what it is")
    for row in found.overheads:
        line = f"{format_bytes(row.bytes):>12}  {format_bytes(row.left_bytes):>12}  {row.purpose}: {row.meaning}"
        lines.append(line if len(line) <= 118 else f"{line[:117]}…")
    lines.append(f"{format_bytes(found.naive_bytes):>12}  {'':>12}  parameters × bytes: the naive figure")
    return lines
