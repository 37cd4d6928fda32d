"""``torch.cuda.memory_summary()`` printed into a log: the few rows that say what an OOM text may lack.

The table prints whole numbers in the largest unit that leaves at least 768 (B, KiB, MiB, GiB, …), cut off rather than
rounded, so a figure of ``n KiB`` stands for ``n`` up to ``n + 1`` KiB.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from memtrace.oomlog.message import unit_bytes

_TITLE = re.compile(rb"PyTorch \w+ memory summary, device ID (\d{1,4})")
_ROW = rb"\|\s*%s\s*\|\s*(\d+)\s*([KMGT]?i?B)\s*\|\s*(\d+)\s*([KMGT]?i?B)"
_ALLOCATED = re.compile(_ROW % b"Allocated memory")
_RESERVED = re.compile(_ROW % b"(?:GPU )?[Rr]eserved memory")
_SPAN = 4000


@dataclass(frozen=True, slots=True)
class MemorySummary:
    """Bytes at the time of printing and at their peak; None where the row is missing."""

    device: int
    line: int
    allocated_bytes: int | None
    allocated_peak_bytes: int | None
    reserved_bytes: int | None
    reserved_peak_bytes: int | None


def read_summaries(data: bytes, first_line: int) -> list[MemorySummary]:
    """Every summary table in a stretch of log that begins on line ``first_line``."""
    found: list[MemorySummary] = []
    for title in _TITLE.finditer(data):
        block = data[title.end() : title.end() + _SPAN]
        if following := _TITLE.search(block):
            block = block[: following.start()]
        line = first_line + data.count(b"\n", 0, title.start())
        found.append(MemorySummary(int(title[1]), line, *_row(_ALLOCATED, block), *_row(_RESERVED, block)))
    return found


def _row(pattern: re.Pattern[bytes], block: bytes) -> tuple[int | None, int | None]:
    found = pattern.search(block)
    if found is None:
        return None, None
    now, peak = (int(found[i]) * unit_bytes(found[i + 1].decode()) for i in (1, 3))
    return now, peak
