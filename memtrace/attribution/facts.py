"""Facts about every allocation that rules decide on: who ran, in which phase it was born and freed, what it outlived.

One array entry a row of ``Timeline.allocations``. Nothing here decides a category.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrace.attribution.blind_phases import Lives
from memtrace.attribution.frame_tags import Tag
from memtrace.attribution.phases import Phase, Phases, frees_share_stacks, infer_phases, with_recorded_steps
from memtrace.attribution.stack_facts import Kind, StackFacts, stack_facts
from memtrace.history.timeline import NEVER, Timeline
from memtrace.snapshot.model import Action

I8 = NDArray[np.int64]
U1 = NDArray[np.uint8]
Bool = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Facts:
    """Per allocation. Events are ``NEVER`` where they lie beyond the recording, -1 where before it.

    ``born``/``died``: alloc event and the event at which the program gave it up. ``span``: row in ``phases``.
    ``pass_end``: event at which the forward pass (or the recomputation) that made it ended; ``NEVER`` if the recording
    ends inside it; -1 for everything else. ``held``: made in such a pass and alive when it ended.
    ``outlives_span``: alive when the phase it was born in ended. ``persistent``: never freed in the recording.
    ``stays``: persistent, or still there when the next forward pass began.
    """

    timeline: Timeline
    stacks: StackFacts
    phases: Phases
    size: I8
    born: I8
    died: I8
    tags: I8
    kind: U1
    is_loss: Bool
    span: I8
    phase: U1
    death_phase: U1
    step: I8
    pass_end: I8
    held: Bool
    outlives_span: Bool
    persistent: Bool
    stays: Bool

    def has(self, tag: Tag) -> Bool:
        """Rows whose stack has any of the tags."""
        return (self.tags & int(tag)) != 0

    def is_kind(self, *kinds: Kind) -> Bool:
        """Rows whose stack is of one of the kinds."""
        return np.isin(self.kind, [int(kind) for kind in kinds])

    def in_phase(self, *phases: Phase) -> Bool:
        """Rows born in one of the phases."""
        return np.isin(self.phase, [int(phase) for phase in phases])

    @property
    def before_trace(self) -> Bool:
        """Rows that were there before the first event."""
        return self.born < 0


def gather(timeline: Timeline, phases: Phases | None = None) -> Facts:
    """Collect the facts. Linear in allocations (sorting small tables aside). ``phases`` may be known already."""
    trace, table = timeline.trace, timeline.allocations
    stacks = stack_facts(timeline.snapshot.stacks)
    if phases is None:
        phases = infer_phases(trace, stacks, timeline.snapshot.annotations, lambda: _lives(timeline))
        phases = with_recorded_steps(phases, trace, timeline.snapshot.memtrace.get("phases"))
    born = table.alloc_event
    died = np.where(table.free_requested_event >= 0, table.free_requested_event, table.free_completed_event)
    died = np.where(died >= 0, died, NEVER)
    kind = stacks.kind[table.stack]
    span = phases.span_of(born)
    # Index -1 (before the trace) must not read the last span.
    span_phase = np.append(phases.phase, np.uint8(Phase.UNKNOWN))
    span_step = np.append(phases.step, np.int64(-1))
    span_end = np.append(phases.start[1:], NEVER)
    if len(phases):
        span_end[len(phases) - 1] = NEVER  # the recording stops inside the last span
    death_span = np.where(died < NEVER, phases.span_of(died), len(phases))
    pass_end = _pass_ends(timeline, stacks, phases, born, kind, span)
    return Facts(
        timeline=timeline,
        stacks=stacks,
        phases=phases,
        size=table.requested_bytes,
        born=born,
        died=died,
        tags=stacks.tags[table.stack],
        kind=kind,
        is_loss=stacks.is_loss[table.stack],
        span=span,
        phase=span_phase[span],
        death_phase=span_phase[death_span],
        step=span_step[span],
        pass_end=pass_end,
        held=(pass_end >= 0) & (pass_end < NEVER) & (died >= pass_end),
        outlives_span=(span >= 0) & (span_end[span] < NEVER) & (died >= span_end[span]),
        persistent=died == NEVER,
        stays=(died == NEVER) | (died > _next_pass(phases, born)),
    )


def _lives(timeline: Timeline) -> Lives:
    table = timeline.allocations
    lived = (table.alloc_event >= 0) & (table.free_requested_event >= 0)
    return Lives(table.alloc_event[lived], table.free_requested_event[lived], table.requested_bytes[lived])


def _recomputation_ends(timeline: Timeline, stacks: StackFacts, born: I8) -> I8:
    """A recomputation ends at the first event that does anything else; ``NEVER`` if the recording stops inside it.

    Frees recorded with the stack of their allocation don't tell who freed: then it ends after its last allocation,
    which is where non-reentrant checkpointing stops recomputing.
    """
    trace = timeline.trace
    allocs = np.flatnonzero(trace.action == Action.ALLOC)
    is_other = stacks.kind[trace.stack[allocs]] != Kind.RECOMPUTE
    if frees_share_stacks(trace):
        following = np.searchsorted(allocs[is_other], born)
        stops = np.append(allocs[is_other], NEVER)
        last = allocs[np.maximum(np.searchsorted(allocs, stops) - 1, 0)] + 1
        return np.where(stops[following] < NEVER, last[following], NEVER)
    moves = np.flatnonzero((trace.action == Action.ALLOC) | (trace.action == Action.FREE_REQUESTED))
    others = moves[stacks.kind[trace.stack[moves]] != Kind.RECOMPUTE]
    return np.append(others, NEVER)[np.searchsorted(others, born)]


def _next_pass(phases: Phases, events: I8) -> I8:
    """Start of the first forward pass after each event; ``NEVER`` if none follows."""
    forward = np.isin(phases.phase, [Phase.FORWARD, Phase.EVALUATION, Phase.GENERATION])
    starts = np.append(phases.start[:-1][forward], NEVER)
    return starts[np.searchsorted(starts[:-1], events, side="right")]


def _pass_ends(timeline: Timeline, stacks: StackFacts, phases: Phases, born: I8, kind: U1, span: I8) -> I8:
    """End of the forward pass or recomputation each row was made in; see :class:`Facts`."""
    ends = np.full(len(born), -1, dtype=np.int64)
    if not len(phases):
        return ends
    # A forward pass ends where the next phase begins.
    forward = np.isin(phases.phase, [Phase.FORWARD, Phase.EVALUATION, Phase.GENERATION])
    forward_end = np.append(phases.start[1:-1], NEVER)
    in_forward = (span >= 0) & forward[span] & (kind != Kind.RECOMPUTE)
    ends[in_forward] = forward_end[span[in_forward]]
    recomputed = np.flatnonzero((kind == Kind.RECOMPUTE) & (born >= 0))
    if len(recomputed):
        ends[recomputed] = _recomputation_ends(timeline, stacks, born[recomputed])
    return ends
