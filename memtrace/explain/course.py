"""The course of a run as far as it was recorded, and what it says about the pass that a request was refused in.

A pass is a forward pass with what follows it up to the next one. Two passes of one program allocate in the same
order, so the n-th allocation of a phase is the same point in both, whatever the sequence lengths. Within a forward
pass layers repeat, so what one adds and how many are left says what was still to come.

Nothing heavy is imported here: the recorder asks the same questions when memory has just run out.
"""

from __future__ import annotations

import math

import numpy as np

from memtrace.attribution.phases import Phase, Phases
from memtrace.attribution.repeats import period
from memtrace.explain.facts import ForwardProgress
from memtrace.frozen import dataclass
from memtrace.snapshot.model import I8, Bool

_ALIKE_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Course:
    """One entry an event: whether it allocates, at which call site, and the requested bytes that are live after it.

    ``base_bytes`` were live before the first event. ``begins``: the pass in question was recorded from its beginning.
    ``layers``: how many layers the model has, None if nothing tells.
    """

    is_alloc: Bool
    site: I8
    level: I8
    base_bytes: int
    phases: Phases
    begins: bool
    layers: int | None

    def level_at(self, event: int) -> int:
        """Requested bytes live just after an event; -1 is before the first."""
        return int(self.level[event]) if event >= 0 else self.base_bytes

    def allocs(self, low: int, high: int) -> I8:
        """Allocating events from ``low`` up to ``high``, that one left out."""
        return low + np.flatnonzero(self.is_alloc[low:high])


def span_at(phases: Phases, event: int) -> int:
    """Row of ``phases`` that an event lies in; -1 if in none."""
    return int(phases.span_of(np.array([event]))[0]) if event >= 0 and len(phases) else -1


@dataclass(frozen=True, slots=True)
class Pass:
    """Events ``start <= e < end``; ``spans`` are rows of ``Phases``; ``trained_until`` is where its backward pass and
    optimizer step end."""

    start: int
    end: int
    trained_until: int
    step: int
    spans: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SamePoint:
    """Where an earlier pass was just before the allocation that corresponds to the event in question."""

    event: int
    earlier: Pass
    scale: float
    """How much larger the pass in question is: its bytes since it began over those of the earlier one."""
    needed_bytes: int
    """What the earlier pass still added from that point to its highest level (requested bytes)."""


def find_passes(phases: Phases) -> tuple[Pass, ...]:
    """Training passes in order: each begins with a forward span; what comes before the first is not a pass."""
    heads = [i for i in range(len(phases)) if phases.phase[i] == Phase.FORWARD]
    found = []
    for head, following in zip(heads, [*heads[1:], len(phases)], strict=False):
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


def same_points(course: Course, event: int) -> list[SamePoint]:
    """The point of ``event`` in every earlier pass that reached it, latest first; empty outside of passes."""
    phases = course.phases
    passes = find_passes(phases)
    here = next((p for p in passes if p.start <= event < p.end), None)
    if here is None:
        return []
    span = span_at(phases, event)
    phase = phases.phase[span]
    ordinal = [i for i in here.spans if phases.phase[i] == phase].index(span)
    position = len(course.allocs(int(phases.start[span]), event))
    grown = course.level_at(event) - course.level_at(here.start - 1)
    found = []
    for earlier in reversed(passes[: passes.index(here)]):
        alike = [i for i in earlier.spans if phases.phase[i] == phase]
        if ordinal >= len(alike):
            continue
        allocs = course.allocs(int(phases.start[alike[ordinal]]), int(phases.start[alike[ordinal] + 1]))
        if position >= len(allocs):
            continue
        at = int(allocs[position]) - 1
        before = course.level_at(at)
        ran = before - course.level_at(earlier.start - 1)
        scale = grown / ran if ran > 0 and grown > 0 else 1.0
        peak = int(course.level[at + 1 : max(earlier.trained_until, at + 2)].max())
        found.append(SamePoint(at, earlier, scale, max(0, peak - before)))
    return found


def forward_progress(course: Course, event: int) -> ForwardProgress | None:
    """Progress of the forward pass that ``event`` lies in; None outside of one or where no layer has repeated."""
    span = span_at(course.phases, event)
    if span < 0 or course.phases.phase[span] != Phase.FORWARD:
        return None
    events = course.allocs(int(course.phases.start[span]), event)
    sites = course.site[events]
    distance = period(sites)
    if not distance:
        return None
    done = 1
    while (done + 1) * distance <= len(sites) and _alike(sites, distance, done):
        done += 1
    added = int(course.level[events[-1]]) - int(course.level[events[-1 - distance]])
    return ForwardProgress(done, course.layers if course.begins else None, max(0, added))


def still_needed(course: Course, event: int, progress: ForwardProgress | None) -> int | None:
    """Requested bytes to come in the same pass, those refused included: by the earlier pass that is most alike, or by
    the layers that are left. None if nothing tells."""
    points = same_points(course, event)
    if points:
        best = min(points, key=lambda point: abs(math.log(point.scale)) if point.scale > 0 else math.inf)
        return round(best.needed_bytes * best.scale)
    return progress.at_least_bytes if progress is not None else None


def _alike(sites: I8, distance: int, back: int) -> bool:
    """Whether the stretch ``back`` periods before the last reads like the last one (nearly: firsts do extra work)."""
    end = len(sites)
    last = sites[end - distance :]
    other = sites[end - (back + 1) * distance : end - back * distance]
    return float((last == other).mean()) >= _ALIKE_SHARE
