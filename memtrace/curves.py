"""Memory over time by category, and downsampling that never loses an extreme."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrace.attribution.categories import Category
from memtrace.report import Analysis

I8 = NDArray[np.int64]
Bool = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Curves:
    """Bytes just after each event. ``categories`` has one row a category, in the order of :class:`Category`.

    A category counts the requested bytes of its live allocations; fragmentation is the rest of ``reserved_bytes``,
    so that every column sums to it.
    """

    requested_bytes: I8
    allocated_bytes: I8
    reserved_bytes: I8
    categories: I8

    def __len__(self) -> int:
        return len(self.reserved_bytes)


def category_curves(analysis: Analysis) -> Curves:
    """All curves of a device at full resolution: ``categories`` is int64 of shape (7, events)."""
    timeline, attribution = analysis.timeline, analysis.attribution
    table, count = timeline.allocations, len(timeline)
    names = list(Category)
    code = np.array([names.index(rule.category) for rule in attribution.rules])[attribution.rule]
    pending = np.zeros(len(table), dtype=np.bool_)
    initial = timeline.replay.initial_blocks
    pending[: len(initial.pending)] = initial.pending
    until = np.where(table.free_requested_event >= 0, table.free_requested_event, table.free_completed_event)
    curves = np.zeros((len(names), count), dtype=np.int64)
    for number, name in enumerate(names):
        if name is Category.FRAGMENTATION:
            continue
        rows = np.flatnonzero((code == number) & ~pending)
        delta = curves[number]
        size, born, died = table.requested_bytes[rows], table.alloc_event[rows], until[rows]
        inside, freed = born >= 0, died >= 0
        np.add.at(delta, born[inside], size[inside])
        np.subtract.at(delta, died[freed], size[freed])
        np.cumsum(delta, out=delta)
        delta += int(size[~inside].sum())
    rest = names.index(Category.FRAGMENTATION)
    curves[rest] = timeline.reserved_bytes - curves.sum(axis=0)
    return Curves(timeline.requested_bytes, timeline.allocated_bytes, timeline.reserved_bytes, curves)


def pick_events(curves: Curves, points: int, start: int = 0, stop: int | None = None) -> I8:
    """About ``points`` events of ``start:stop`` that keep both extremes of every curve in every bucket, ascending.

    Each of ``points / (2 * curves)`` buckets contributes where each curve is highest and lowest, plus its ends.
    """
    stop = len(curves) if stop is None else stop
    if stop - start <= points:
        return np.arange(start, stop, dtype=np.int64)
    rows = [curves.requested_bytes, curves.allocated_bytes, curves.reserved_bytes, *curves.categories]
    buckets = max(1, points // (2 * len(rows)))
    edges = np.linspace(start, stop, buckets + 1).astype(np.int64)
    chosen = {start, stop - 1}
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        for row in rows:
            piece = row[low:high]
            chosen.add(low + int(piece.argmax()))
            chosen.add(low + int(piece.argmin()))
    return np.array(sorted(chosen), dtype=np.int64)
