"""The hidden overheads of one moment: all that is not parameters × bytes, largest first, down to the naive figure."""

from __future__ import annotations

from memtrace.analysis import Analysis
from memtrace.answers.report import report
from memtrace.attribution.categories import PURPOSE_MEANING, Purpose
from memtrace.frozen import dataclass
from memtrace.history.timeline import At

NAIVE = (Purpose.QUANTIZED, Purpose.UNQUANTIZED, Purpose.PARAMS)
"""What a back-of-the-envelope sum counts: each parameter once, in the type that it is stored in."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """``bytes`` of one purpose (``category/subcategory``); ``left_bytes`` would be reserved without it and all that
    stands before it."""

    purpose: str
    meaning: str
    bytes: int
    left_bytes: int


@dataclass(frozen=True, slots=True)
class Overheads:
    """``reserved_bytes`` at the event = ``naive_bytes`` + the bytes of all ``overheads``, exactly."""

    file: str
    at: At
    reserved_bytes: int
    naive_bytes: int
    overheads: tuple[Overhead, ...]


def overheads(analysis: Analysis, at: At | None = None) -> Overheads:
    """Everything reserved at an event (default: the last OOM if there is one, else the peak) beyond the parameters."""
    budget = report(analysis, at)
    parts = {str(key): size_bytes for key, size_bytes in budget.subcategories.items() if size_bytes}
    naive = sum(parts.pop(purpose, 0) for purpose in NAIVE)
    left, rows = budget.reserved_bytes, []
    for purpose, size_bytes in sorted(parts.items(), key=lambda item: (-item[1], item[0])):
        left -= size_bytes
        meaning = PURPOSE_MEANING.get(Purpose(purpose), "") if purpose in set(Purpose) else ""
        rows.append(Overhead(purpose, meaning, size_bytes, left))
    return Overheads(budget.file, budget.at, budget.reserved_bytes, naive, tuple(rows))
