"""States of memory at some events of a long trace, so that a part of it can be looked at without the rest.

From the state at a checkpoint on, the events up to the part's end tell everything: what is live, where, and how much
is reserved. What each allocation is for depends on the whole trace and is kept beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator.replay.segments import InitialSegments
from memtrace.analysis import Analysis
from memtrace.attribution.categories import Evidence
from memtrace.attribution.classify import Attribution, as_known
from memtrace.attribution.phases import Phases
from memtrace.history.layout import first_ranges, move_ranges, segments_of
from memtrace.history.timeline import Allocations, Timeline

I8 = NDArray[np.int64]
I2 = NDArray[np.int16]
_SPACING_EVENTS = 100_000
_LIVE_SHARE = 20  # events between checkpoints for each allocation that one of them holds


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """One entry a checkpoint: the state just before ``event``, of which the first is 0, ascending.

    ``row`` counts the rows of the whole table that were made before it. ``levels`` are (requested, allocated, reserved)
    bytes. What was live then are the rows ``first_live[i]:first_live[i+1]`` of ``live``, which are ``live_row`` in the
    whole table and whose rules are ``live_rule``; what was mapped, those of ``segments`` from ``first_segment[i]`` on.
    """

    event: I8
    row: I8
    levels: tuple[I8, I8, I8]
    first_live: I8
    live_row: I8
    live: Allocations
    live_rule: I2
    first_segment: I8
    segments: InitialSegments


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a device's trace once it was attributed by memtrace's own rules.

    ``rule`` has one entry an allocation, ``labelled`` the purposes of the labels that come first.
    """

    rule: I2
    labelled: tuple[str, ...]
    phases: Phases
    caveats: tuple[str, ...]
    checkpoints: Checkpoints

    def attribution(self, timeline: Timeline) -> Attribution:
        """The attribution of the timeline it was collected from."""
        return as_known(timeline, self.rule, self.labelled, self.phases)


def know(analysis: Analysis) -> Known:
    """Collect it from a whole analysis without rules of the user's. Linear in events."""
    attribution = analysis.attribution
    return Known(
        rule=attribution.rule,
        labelled=tuple(str(r.purpose) for r in attribution.rules if r.evidence is Evidence.LABEL),
        phases=attribution.facts.phases,
        caveats=analysis.caveats,
        checkpoints=_checkpoints(analysis.timeline, attribution.rule),
    )


def _checkpoints(timeline: Timeline, rule: I2) -> Checkpoints:
    table = timeline.allocations
    requested, done = table.free_requested_event, table.free_completed_event
    ranges = first_ranges(timeline.replay.initial_segments)
    at = 0
    rows = timeline.live_rows(-1)
    events, counts, lives, mapped = [], [], [], []
    while True:
        born = int(np.searchsorted(table.alloc_event, at))
        events.append(at)
        counts.append(born)
        lives.append(rows)
        mapped.append(segments_of(ranges))
        following = at + max(_SPACING_EVENTS, _LIVE_SHARE * len(rows))
        if following >= len(timeline):
            break
        later = np.arange(born, int(np.searchsorted(table.alloc_event, following)))
        rows = np.concatenate([rows, later])
        # A damaged trace may complete a free before it requests it: such rows still change a level later.
        rows = rows[(done[rows] < 0) | (done[rows] >= following) | (requested[rows] >= following)]
        move_ranges(ranges, timeline, at, following)
        at = following
    event = np.array(events, dtype=np.int64)
    before = [timeline.curve_at(e - 1) for e in events]
    live_row = np.concatenate(lives)
    return Checkpoints(
        event=event,
        row=np.array(counts, dtype=np.int64),
        levels=tuple(np.array([b[i] for b in before], dtype=np.int64) for i in range(3)),  # type: ignore[arg-type]
        first_live=_offsets([len(rows) for rows in lives]),
        live_row=live_row.astype(np.int64),
        live=Allocations(**{f.name: getattr(table, f.name)[live_row] for f in fields(Allocations)}),
        live_rule=rule[live_row],
        first_segment=_offsets([len(columns) for columns in mapped]),
        segments=InitialSegments(
            **{f.name: np.concatenate([getattr(each, f.name) for each in mapped]) for f in fields(InitialSegments)}
        ),
    )


def _offsets(counts: list[int]) -> I8:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
