"""Memory over time by category, and downsampling that never loses an extreme."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memtrace.analysis import Analysis
from memtrace.attribution.categories import Category
from memtrace.frozen import dataclass
from memtrace.history.timeline import Window, running

I8 = NDArray[np.int64]
Bool = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Curves:
    """Bytes just after each event from ``first`` on. ``categories`` has one row a category, as :class:`Category` lists.

    A category counts the requested bytes of its live allocations; fragmentation is the rest of ``reserved_bytes``,
    so that every column sums to it.
    """

    requested_bytes: I8
    allocated_bytes: I8
    reserved_bytes: I8
    categories: I8
    first: int = 0

    def __len__(self) -> int:
        return len(self.reserved_bytes)


def category_curves(analysis: Analysis, window: Window | None = None) -> Curves:
    """The curves of a device at full resolution, all of them or a window: ``categories`` is int64 of (7, events)."""
    timeline, attribution = analysis.timeline, analysis.attribution
    table = timeline.allocations
    first, stop = window or (0, len(timeline))
    names = list(Category)
    code = np.array([names.index(rule.category) for rule in attribution.rules])[attribution.rule]
    pending = np.zeros(len(table), dtype=np.bool_)
    pending[: len(timeline.replay.initial_pending)] = timeline.replay.initial_pending
    until = np.where(table.free_requested_event >= 0, table.free_requested_event, table.free_completed_event)
    counted = ~pending & (table.alloc_event < stop) & ((until < 0) | (until >= first))
    curves = np.zeros((len(names), stop - first), dtype=np.int64)
    for number, name in enumerate(names):
        if name is Category.FRAGMENTATION:
            continue
        rows = np.flatnonzero((code == number) & counted)
        if not len(rows):  # zeros that nothing writes to take no memory
            continue
        size, born = table.requested_bytes[rows], table.alloc_event[rows]
        before = int(size[born < first].sum())
        curves[number] = running(Window(first, stop), before, (born, size), (until[rows], -size))
    rest = names.index(Category.FRAGMENTATION)
    part = slice(first, stop)
    curves[rest] = timeline.reserved_bytes[part]
    for number in range(len(names)):
        if number != rest:
            curves[rest] -= curves[number]
    levels = (timeline.requested_bytes[part], timeline.allocated_bytes[part], timeline.reserved_bytes[part])
    return Curves(*levels, curves, first)


def pick_events(curves: Curves, points: int, start: int | None = None, stop: int | None = None) -> I8:
    """About ``points`` events of ``start:stop`` that keep both extremes of every curve in every bucket, ascending.

    Each of ``points / (2 * curves)`` buckets contributes where each curve is highest and lowest, plus its ends.
    """
    start = curves.first if start is None else start
    stop = curves.first + len(curves) if stop is None else stop
    if stop - start <= points:
        return np.arange(start, stop, dtype=np.int64)
    rows = [curves.requested_bytes, curves.allocated_bytes, curves.reserved_bytes, *curves.categories]
    buckets = max(1, points // (2 * len(rows)))
    edges = np.linspace(start, stop, buckets + 1).astype(np.int64)
    chosen = {start, stop - 1}
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        for row in rows:
            piece = row[low - curves.first : high - curves.first]
            chosen.add(low + int(piece.argmax()))
            chosen.add(low + int(piece.argmin()))
    return np.array(sorted(chosen), dtype=np.int64)
