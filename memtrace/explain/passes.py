"""Passes over the model and their likeness: the same point of an earlier pass, and what that pass still needed from it.

A pass is a forward pass with what follows it up to the next one. Two passes of one program allocate in the same
order, so the n-th allocation of a phase is the same point in both, whatever the sequence lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrace.analysis import Analysis
from memtrace.answers.report import category_bytes
from memtrace.attribution.phases import Phase, Phases
from memtrace.snapshot.model import Action

I8 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pass:
    """Events ``start <= e < end``; ``spans`` are rows of ``Phases``; ``trained_until`` is where its backward pass and
    optimizer step end."""

    start: int
    end: int
    trained_until: int
    step: int
    spans: tuple[int, ...]


def find_passes(phases: Phases) -> tuple[Pass, ...]:
    """Training passes in order: each begins with a forward span; what comes before the first is no pass."""
    heads = [i for i in range(len(phases)) if phases.phase[i] == Phase.FORWARD]
    found = []
    ends = [*heads[1:], len(phases)]
    for head, following in zip(heads, ends, strict=False):
        spans = tuple(range(head, following))
        trains = [i for i in spans if phases.phase[i] in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)]
        found.append(
            Pass(
                start=int(phases.start[head]),
                end=int(phases.start[following]),
                trained_until=int(phases.start[trains[-1] + 1]),
                step=int(phases.step[head]),
                spans=spans,
            )
        )
    return tuple(found)


@dataclass(frozen=True, slots=True)
class SamePoint:
    """Where an earlier pass was just before the allocation that corresponds to the event in question."""

    event: int
    earlier: Pass
    scale: float
    """How much larger the pass in question is: its bytes since it began over those of the earlier one."""
    needed_bytes: int
    """What the earlier pass still added from that point to its highest level (requested bytes)."""


def _allocs(analysis: Analysis, low: int, high: int) -> I8:
    return low + np.flatnonzero(analysis.timeline.trace.action[low:high] == Action.ALLOC)


def same_points(analysis: Analysis, event: int) -> list[SamePoint]:
    """The point of ``event`` in every earlier pass that reached it, latest first; empty outside of passes."""
    phases, timeline = analysis.attribution.facts.phases, analysis.timeline
    passes = find_passes(phases)
    here = next((p for p in passes if p.start <= event < p.end), None)
    if here is None:
        return []
    span = int(phases.span_of(np.array([event]))[0])
    phase = phases.phase[span]
    ordinal = [i for i in here.spans if phases.phase[i] == phase].index(span)
    position = len(_allocs(analysis, int(phases.start[span]), event))
    level = timeline.requested_bytes
    base = timeline.curve_at(here.start - 1)[0]
    grown = timeline.curve_at(event)[0] - base
    found = []
    for earlier in reversed(passes[: passes.index(here)]):
        alike = [i for i in earlier.spans if phases.phase[i] == phase]
        if ordinal >= len(alike):
            continue
        low, high = int(phases.start[alike[ordinal]]), int(phases.start[alike[ordinal] + 1])
        allocs = _allocs(analysis, low, high)
        if position >= len(allocs):
            continue
        at = int(allocs[position]) - 1
        before = timeline.curve_at(at)[0]
        ran = before - timeline.curve_at(earlier.start - 1)[0]
        scale = grown / ran if ran > 0 and grown > 0 else 1.0
        peak = int(level[at + 1 : max(earlier.trained_until, at + 2)].max())
        found.append(SamePoint(at, earlier, scale, max(0, peak - before)))
    return found


def grown_since(analysis: Analysis, event: int, point: SamePoint) -> dict[str, int]:
    """Change of live requested bytes by ``category/subcategory`` since an earlier pass's same point, largest first."""
    timeline = analysis.timeline

    def live(at: int) -> dict[str, int]:
        rows = timeline.live_rows(at)
        return category_bytes(analysis, rows[~timeline.pending(rows, at)])

    now, then = live(event), live(point.event)
    change = {key: now.get(key, 0) - then.get(key, 0) for key in now.keys() | then.keys()}
    return dict(sorted(((k, v) for k, v in change.items() if v), key=lambda item: (-abs(item[1]), -item[1], item[0])))
