"""Memory over time by category, and downsampling that never loses an extreme."""

from __future__ import annotations

import numpy as np

from memtrace.analysis import Analysis
from memtrace.attribution.categories import Category
from memtrace.frozen import dataclass
from memtrace.history.timeline import NEVER, Window, running
from memtrace.snapshot.model import I4, I8

_REST = list(Category).index(Category.FRAGMENTATION)


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


def _held(analysis: Analysis) -> tuple[I4, I4]:
    """The events from which on, and up to which, the program held each allocation (``born <= event < until``)."""
    timeline, table = analysis.timeline, analysis.timeline.allocations
    until = np.where(table.free_requested_event >= 0, table.free_requested_event, table.free_completed_event)
    until[until < 0] = NEVER
    until[: len(timeline.replay.initial_pending)][timeline.replay.initial_pending] = -1  # given up before the trace
    return table.alloc_event, until


def _category_of_rows(analysis: Analysis, rows: I8) -> I8:
    """The place of each allocation's category in :class:`Category`."""
    names, attribution = list(Category), analysis.attribution
    return np.array([names.index(rule.category) for rule in attribution.rules])[attribution.rule[rows]]


def live_curve(analysis: Analysis) -> I8:
    """Requested bytes that the program held after each event: the sum of all categories but fragmentation."""
    (born, until), size = _held(analysis), analysis.timeline.allocations.requested_bytes
    before = int(size[(born < 0) & (until >= 0)].sum())
    return running(Window(0, len(analysis.timeline)), before, (born, size), (until, -size))


def categories_at(analysis: Analysis, events: I8) -> I8:
    """As ``categories`` of the curves, at a few events in ascending order."""
    count, table = len(events), analysis.timeline.allocations
    born, until = _held(analysis)
    near = np.flatnonzero((born <= events[-1]) & (until > events[0])) if count else np.empty(0, np.int64)
    since, before = (np.searchsorted(events.astype(each.dtype), each[near]) for each in (born, until))
    seen = since != before
    rows, since, before = near[seen], since[seen], before[seen]
    category, size = _category_of_rows(analysis, rows), table.requested_bytes[rows]
    changes = np.zeros((len(Category), count + 1), dtype=np.int64)
    np.add.at(changes, (category, since), size)
    np.subtract.at(changes, (category, before), size)
    held = changes.cumsum(axis=1)[:, :count]
    held[_REST] = analysis.timeline.reserved_bytes[events] - held.sum(axis=0)
    return held


def category_curves(analysis: Analysis, window: Window | None = None) -> Curves:
    """The curves of a device at full resolution, all of them or a window: ``categories`` is int64 of (7, events)."""
    timeline = analysis.timeline
    first, stop = window or (0, len(timeline))
    born, until = _held(analysis)
    counted = np.flatnonzero((born < stop) & (until >= first))
    category = _category_of_rows(analysis, counted)
    part = slice(first, stop)
    curves = np.zeros((len(Category), stop - first), dtype=np.int64)
    curves[_REST] = timeline.reserved_bytes[part]
    for number in range(len(Category)):
        rows = counted[category == number]
        if not len(rows):  # zeros that nothing writes to take no memory
            continue
        size = timeline.allocations.requested_bytes[rows]
        before = int(size[born[rows] < first].sum())
        curves[number] = running(Window(first, stop), before, (born[rows], size), (until[rows], -size))
        curves[_REST] -= curves[number]
    levels = (timeline.requested_bytes[part], timeline.allocated_bytes[part], timeline.reserved_bytes[part])
    return Curves(*levels, curves, first)


def pick_events(curves: Curves, points: int) -> I8:
    """About ``points`` events of the curves that keep both extremes of every curve in every bucket, ascending.

    Each of ``points / (2 * curves)`` buckets contributes where each curve is highest and lowest, plus its ends.
    """
    start, stop = curves.first, curves.first + len(curves)
    if len(curves) <= points:
        return np.arange(start, stop, dtype=np.int64)
    rows = [curves.requested_bytes, curves.allocated_bytes, curves.reserved_bytes, *curves.categories]
    buckets = max(1, points // (2 * len(rows)))
    edges = np.linspace(start, stop, buckets + 1).astype(np.int64)
    chosen = {start, stop - 1}
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        for row in rows:
            piece = row[low - start : high - start]
            chosen.add(low + int(piece.argmax()))
            chosen.add(low + int(piece.argmin()))
    return np.array(sorted(chosen), dtype=np.int64)
