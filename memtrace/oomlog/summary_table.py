"""``torch.cuda.memory_summary()`` printed into a log: the few rows that say what an OOM text may lack.

The table prints whole numbers in the largest unit that leaves at least 768 (B, KiB, MiB, GiB, …), cut off rather than
rounded, so a figure of ``n KiB`` stands for ``n`` up to ``n + 1`` KiB.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .sizes import unit_bytes

_TITLE = re.compile(rb"PyTorch \w+ memory summary, device ID (\d{1,4})")
_COUNTS = re.compile(rb"\w+ OOMs: (\d+)[ |]+\w+ retries: (\d+)")
_ROW = r"\|\s*{name}\s*\|\s*(\d+)\s*([KMGTP]?i?B)\s*\|\s*(\d+)\s*([KMGTP]?i?B)"
_ROWS = {
    "allocated": re.compile(_ROW.format(name="Allocated memory").encode()),
    "reserved": re.compile(_ROW.format(name="(?:GPU )?[Rr]eserved memory").encode()),
    "non_releasable": re.compile(_ROW.format(name="Non-releasable memory").encode()),
    "requested": re.compile(_ROW.format(name="Requested memory").encode()),
}
_SPAN = 4000


@dataclass(frozen=True, slots=True)
class MemorySummary:
    """Bytes at the time of printing and at their peak; None where the row is missing."""

    device: int
    line: int
    ooms: int | None
    alloc_retries: int | None
    allocated_bytes: int | None
    allocated_peak_bytes: int | None
    reserved_bytes: int | None
    reserved_peak_bytes: int | None
    non_releasable_bytes: int | None
    requested_bytes: int | None


def read_summaries(data: bytes, first_line: int) -> list[MemorySummary]:
    """Every summary table in a stretch of log that begins on line ``first_line``."""
    found: list[MemorySummary] = []
    for title in _TITLE.finditer(data):
        block = data[title.end() : title.end() + _SPAN]
        following = _TITLE.search(block)
        if following:
            block = block[: following.start()]
        values = {name: _row(pattern, block) for name, pattern in _ROWS.items()}
        counts = _COUNTS.search(block)
        found.append(
            MemorySummary(
                device=int(title[1]),
                line=first_line + data.count(b"\n", 0, title.start()),
                ooms=int(counts[1]) if counts else None,
                alloc_retries=int(counts[2]) if counts else None,
                allocated_bytes=values["allocated"][0],
                allocated_peak_bytes=values["allocated"][1],
                reserved_bytes=values["reserved"][0],
                reserved_peak_bytes=values["reserved"][1],
                non_releasable_bytes=values["non_releasable"][0],
                requested_bytes=values["requested"][0],
            )
        )
    return found


def _row(pattern: re.Pattern[bytes], block: bytes) -> tuple[int | None, int | None]:
    found = pattern.search(block)
    if found is None:
        return None, None
    now, peak = (int(found[i]) * _unit(found[i + 1].decode()) for i in (1, 3))
    return now, peak


def _unit(name: str) -> int:
    return 1 << 50 if name.startswith("P") else unit_bytes(name)
