"""What the program would still have asked for after a refusal, as far as earlier passes, layers or parameters tell."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from memtrace.analysis import Analysis
from memtrace.attribution.categories import Purpose
from memtrace.attribution.phases import Phase
from memtrace.explain.facts import Progress
from memtrace.explain.passes import SamePoint, same_points


def still_needed(analysis: Analysis, event: int, progress: Progress | None) -> int | None:
    """Requested bytes to come in the same pass, those refused included: by the earlier pass that is most alike, by the
    layers that are left, or by the optimizer states that are missing. None if nothing tells."""
    points = same_points(analysis, event)
    if points:
        best = min(points, key=_distance)
        return round(best.needed_bytes * best.scale)
    if progress is not None:
        return progress.at_least_bytes
    return _missing_states(analysis, event)


def _distance(point: SamePoint) -> float:
    return abs(math.log(point.scale)) if point.scale > 0 else math.inf


def _missing_states(analysis: Analysis, event: int) -> int | None:
    """Inside the first optimizer step: two states a parameter, less those made. None where states are smaller."""
    phases = analysis.attribution.facts.phases
    if not len(phases):
        return None
    span = int(phases.span_of(np.array([event]))[0])
    if span < 0 or phases.phase[span] != Phase.OPTIMIZER:
        return None
    size = analysis.timeline.allocations.requested_bytes
    params, states = _rows(analysis, event, Purpose.PARAMS), _rows(analysis, event, Purpose.OPTIMIZER_STATE)
    full = states & np.isin(size, np.unique(size[params]))
    if not params.any() or size[full].sum() < 0.5 * size[states].sum():
        return None
    return max(0, 2 * int(size[params].sum()) - int(size[full].sum()))


def _rows(analysis: Analysis, event: int, purpose: Purpose) -> NDArray[np.bool_]:
    live = np.zeros(len(analysis.timeline.allocations), dtype=np.bool_)
    live[analysis.timeline.live_rows(event)] = True
    return analysis.attribution.rows_of(purpose) & live
