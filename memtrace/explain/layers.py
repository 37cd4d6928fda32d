"""How far a forward pass got: layers repeat, so what one adds and how many are left says what the pass still needed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memtrace.analysis import Analysis
from memtrace.attribution.categories import Purpose
from memtrace.attribution.phases import Phase
from memtrace.attribution.unfinished import period
from memtrace.explain.facts import Progress

I8 = NDArray[np.int64]
_MATRIX_BYTES = 16 << 10
_LEAST_LAYERS = 4


def layer_count(analysis: Analysis) -> int | None:
    """Number of repeated layers of the trained model, from how often each size occurs among its parameters.

    Adapters decide where there are any, since a reference model has none; else the stored weights. None if no number
    of at least four divides (nearly) all occurrences.
    """
    attribution, table = analysis.attribution, analysis.timeline.allocations
    stays = table.free_requested_event < 0
    for purposes in ((Purpose.PARAMS,), (Purpose.QUANTIZED, Purpose.UNQUANTIZED)):
        rows = attribution.rows_of(*purposes) & stays & (table.requested_bytes >= _MATRIX_BYTES)
        sizes, counts = np.unique(table.requested_bytes[rows], return_counts=True)
        often = counts >= _LEAST_LAYERS
        sizes, counts = sizes[often], counts[often]
        if not len(sizes):
            continue
        weight = sizes * counts
        for layers in range(int(counts.min()), _LEAST_LAYERS - 1, -1):
            if weight[counts % layers == 0].sum() >= 0.9 * weight.sum():
                return layers
    return None


def forward_progress(analysis: Analysis, event: int) -> Progress | None:
    """Progress of the forward pass that ``event`` lies in; None outside of one or where no layer has repeated."""
    facts, timeline = analysis.attribution.facts, analysis.timeline
    if not len(facts.phases):
        return None
    span = int(facts.phases.span_of(np.array([event]))[0])
    if span < 0 or facts.phases.phase[span] != Phase.FORWARD:
        return None
    rows = np.flatnonzero((facts.span == span) & (facts.born <= event))
    sites = timeline.allocations.stack[rows].astype(np.int64)
    distance = period(sites)
    if not distance:
        return None
    count = len(sites)
    done = 1
    while (done + 1) * distance <= count and _alike(sites, distance, done):
        done += 1
    level, born = timeline.requested_bytes, facts.born[rows]
    now, before = int(level[born[-1]]), int(level[born[count - 1 - distance]])
    begins = any(analysis.attribution.sites.module[stack] == "embedding" for stack in np.unique(sites[:distance]))
    return Progress(done, layer_count(analysis) if begins else None, max(0, now - before))


def _alike(sites: I8, distance: int, back: int) -> bool:
    """Whether the stretch ``back`` periods before the last reads like the last one (nearly: firsts do extra work)."""
    end = len(sites)
    last = sites[end - distance :]
    other = sites[end - (back + 1) * distance : end - back * distance]
    return float((last == other).mean()) >= 0.9
