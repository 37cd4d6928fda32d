"""Facts about every allocation that rules decide on: who ran, in which phase it was born and freed, what it outlived.

One array entry a row of ``Timeline.allocations``. Nothing here decides a category.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator.replay.replay import Allocations
from memtrace.arrays import among, place_of
from memtrace.attribution.blind_phases import Lives
from memtrace.attribution.frame_tags import Tag
from memtrace.attribution.phases import Phase, Phases, frees_share_stacks, infer_phases, with_recorded_steps
from memtrace.attribution.stack_facts import Kind, StackFacts, stack_facts
from memtrace.attribution.strays import stray
from memtrace.frozen import dataclass
from memtrace.history.timeline import NEVER, Timeline
from memtrace.snapshot.model import I4, Action, DeviceTrace

I8 = NDArray[np.int64]
U1 = NDArray[np.uint8]
Bool = NDArray[np.bool_]


@dataclass(frozen=True)
class Facts:
    """Per allocation. Events are ``NEVER`` where they lie beyond the recording, -1 where before it.

    ``born``/``died``: alloc event and the event at which the program gave it up. ``ended``: the same as ``died`` where
    that says something about its purpose; ``NEVER`` where an error, or the end of the program, took it away.
    ``span``: row in ``phases``. ``pass_end``: event at which the forward pass (or the recomputation) that made it
    ended; ``NEVER`` if an error or the recording's end cut it short; -1 for everything else. ``held``: made in such a
    pass and alive when it ended. ``call_end``: the first allocation of other code than the model's after it.
    ``outlives_span``: alive when the phase it was born in ended. ``persistent``: never ended. ``stays``: persistent, or
    still there when the next forward pass began; ``lives_on``: or when the second one did; ``followed``: one did
    begin. ``free_stack``: that of its end, -1 where frees have no stacks of their own; ``freed_by_program``: given up
    by the program's own code rather than by the model or by autograd.
    """

    timeline: Timeline
    stacks: StackFacts
    phases: Phases
    size: I8
    born: I4
    died: I4
    ended: I4
    kind: U1
    is_loss: Bool
    span: I4
    phase: U1
    death_phase: U1
    pass_end: I4
    held: Bool
    call_end: I4
    outlives_span: Bool
    persistent: Bool
    stays: Bool
    lives_on: Bool
    followed: Bool
    free_stack: I4
    freed_by_program: Bool

    def has(self, tag: Tag) -> Bool:
        """Rows whose stack has any of the tags."""
        by_stack = self.stacks.has(tag)
        return by_stack[self.timeline.allocations.stack] if by_stack.any() else np.zeros(len(self.born), np.bool_)

    def is_kind(self, *kinds: Kind) -> Bool:
        """Rows whose stack is of one of the kinds."""
        return among(self.kind, kinds)

    def in_phase(self, *phases: Phase) -> Bool:
        """Rows born in one of the phases."""
        return among(self.phase, phases)

    @cached_property
    def step(self) -> I8:
        """The step in which each was made, as ``phases`` count; -1 where none is told."""
        return _step_of(self.phases, self.span)

    @property
    def may_train(self) -> bool:
        """Whether something is trained, or the recording stops before it could tell: in the middle of its passes."""
        if not among(self.phases.phase, [Phase.FORWARD, Phase.EVALUATION]).any() or (self.phases.step >= 0).any():
            return True
        refused = (self.timeline.trace.action == Action.OOM).any()
        return bool(refused) and not self.stacks.has(Tag.GENERATE).any()

    @property
    def blind(self) -> bool:
        """Whether phases were told by lifetimes alone."""
        return self.phases.basis == "lifetimes"

    @property
    def guessed(self) -> bool:
        """Whether not even recorded optimizer steps confirm them."""
        return self.blind and not (self.phases.phase == Phase.OPTIMIZER).any()

    @property
    def before_trace(self) -> Bool:
        """Rows that were there before the first event."""
        return self.born < 0


class LateFacts:
    """:class:`Facts` of an attribution that is known: its phases at once, what is shown of an allocation when it is
    asked for, the rest when anything else is."""

    def __init__(self, timeline: Timeline, phases: Phases) -> None:
        self.timeline, self.phases = timeline, phases

    @cached_property
    def stacks(self) -> StackFacts:
        """What each stack is."""
        return _stacks_of(self.timeline)

    @cached_property
    def died(self) -> I4:
        """See :class:`Facts`."""
        return _died(self.timeline.allocations)

    @cached_property
    def phase(self) -> U1:
        """See :class:`Facts`."""
        return _phase_of(self.phases, self.phases.span_of(self.timeline.allocations.alloc_event))

    @cached_property
    def step(self) -> I8:
        """See :class:`Facts`."""
        return _step_of(self.phases, self.phases.span_of(self.timeline.allocations.alloc_event))

    @cached_property
    def _all(self) -> Facts:
        return gather(self.timeline, self.phases)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._all, name)


def _stacks_of(timeline: Timeline) -> StackFacts:
    """What each stack of the device is: those of other devices may belong to other models."""
    stacks = stack_facts(timeline.snapshot.stacks)
    ours = np.zeros(len(stacks.kind), dtype=np.bool_)
    ours[timeline.trace.stack] = ours[timeline.allocations.stack] = True
    return replace(stacks, tags=np.where(ours, stacks.tags, 0))


def _with_functions(stacks: StackFacts, timeline: Timeline, shared: bool) -> StackFacts:
    """In a program that calls no modules, lines of which autograd gives up a part are its forward."""
    trace, table = timeline.trace, timeline.allocations
    if shared or stacks.has(Tag.CALL).any():
        return stacks
    died = _died(table)
    asked = _last_request(trace, died[:0])  # behind it the program's end took things away
    rows = np.flatnonzero((died >= 0) & (died < asked) & (stacks.kind[table.stack] == Kind.OTHER))
    by_autograd = among(stacks.kind[trace.stack[died[rows]]], [Kind.NONE, Kind.BACKWARD])
    ended, saved = (
        np.bincount(of, minlength=len(stacks.kind)) for of in (table.stack[rows], table.stack[rows][by_autograd])
    )
    return replace(stacks, kind=np.where((saved > 0) & (saved * 4 >= ended), np.uint8(Kind.FORWARD), stacks.kind))


def _died(table: Allocations) -> I4:
    died = np.where(table.free_requested_event >= 0, table.free_requested_event, table.free_completed_event)
    died[died < 0] = NEVER
    return died


def _phase_of(phases: Phases, span: I4 | I8) -> U1:
    return np.append(phases.phase, np.uint8(Phase.UNKNOWN))[span]  # -1 (before the trace) must not read the last one


def _step_of(phases: Phases, span: I4 | I8) -> I8:
    return np.append(phases.step, np.int64(-1))[span]


def gather(timeline: Timeline, phases: Phases | None = None) -> Facts:
    """Collect the facts. Linear in allocations (sorting small tables aside). ``phases`` may be known already."""
    trace, table = timeline.trace, timeline.allocations
    shared = frees_share_stacks(trace, trace.stack[table.alloc_event[place_of(table.alloc_event, 0) :]])
    stacks = _with_functions(_stacks_of(timeline), timeline, shared)
    born = table.alloc_event
    died = _died(table)
    kind = stacks.kind[table.stack]
    older = place_of(born, 0)  # rows
    lives = Lives(born[older:], died[older:], table.requested_bytes[older:])
    strays = stray(stacks, table.stack[older:], lives)
    kind[older:][strays] = Kind.STRAY
    strange = lives.born[strays]
    if phases is None:
        phases = infer_phases(trace, stacks, timeline.snapshot.annotations, lives, strays, kind[:older], shared)
        phases = with_recorded_steps(phases, trace, timeline.snapshot.memtrace.get("phases"))
    # Rows are in order of events: where the spans begin among them is quicker to find than each row's span.
    counts = np.diff(np.searchsorted(born, phases.start.astype(np.int32)), prepend=0)
    span = np.repeat(np.arange(-1, len(phases), dtype=np.int32), counts)
    span_end = np.append(phases.start[1:], NEVER).astype(np.int32)
    if len(phases):
        span_end[len(phases) - 1] = NEVER  # the recording stops inside the last span
    cut = cut_spans(phases, trace)
    free_stack = _freeing_stacks(trace, died, shared)
    frees = np.where(stacks.has(Tag.ZERO_GRAD), np.uint8(Kind.OPTIMIZER), stacks.kind)
    frees[-1] = _NOT_FREED
    freed_by = frees[free_stack]
    ended = np.where(_unwound(trace, strange, phases, freed_by, born, died, span), NEVER, died)
    phase_at = np.append(np.repeat(phases.phase, np.diff(phases.start)), np.uint8(Phase.UNKNOWN))
    death_phase = phase_at[np.minimum(ended, len(trace))]
    if cut.any():
        in_cut = (span >= 0) & np.append(cut, False)[span] & (ended >= span_end[span])
        in_cut &= death_phase != Phase.BACKWARD
        ended[in_cut], death_phase[in_cut] = NEVER, Phase.UNKNOWN
    persistent = ended == NEVER
    pass_end = _pass_ends(trace, stacks, strange, phases, born, kind, span, cut, shared)
    following = _next_pass(phases, np.append(phases.start[:-1], -1).astype(np.int32))  # by span, and before the trace
    next_pass = following[span]
    return Facts(
        timeline=timeline,
        stacks=stacks,
        phases=phases,
        size=table.requested_bytes,
        born=born,
        died=died,
        ended=ended,
        kind=kind,
        is_loss=stacks.is_loss[table.stack],
        span=span,
        phase=_phase_of(phases, span),
        death_phase=death_phase,
        pass_end=pass_end,
        held=(pass_end >= 0) & (pass_end < NEVER) & (ended >= pass_end),
        call_end=_call_ends(table, stacks, kind, len(trace)),
        outlives_span=ended >= np.where(span_end < NEVER, span_end, NEVER + 1)[span],
        persistent=persistent,
        stays=persistent | (ended > next_pass),
        followed=next_pass < NEVER,
        lives_on=persistent | (ended > _next_pass(phases, following)[span]),
        free_stack=free_stack,
        freed_by_program=among(freed_by, [Kind.OTHER, Kind.OPTIMIZER, Kind.LOAD]),
    )


_NOT_FREED = 255
_PART = 1 << 18  # events


def cut_spans(phases: Phases, trace: DeviceTrace) -> Bool:
    """Spans that an error ended before others began: their last event is a refused request."""
    if not len(phases):
        return np.zeros(0, dtype=np.bool_)
    return np.append(trace.action[np.maximum(phases.start[1:-1] - 1, 0)] == Action.OOM, False)


def _freeing_stacks(trace: DeviceTrace, died: I4, shared: bool) -> I4:
    """Stack of the code that gave each row up; -1 where nothing did or nothing tells."""
    if shared or not len(trace):
        return np.full(len(died), -1, dtype=np.int32)
    stacks = trace.stack[np.minimum(died, len(trace) - 1)]
    stacks[died == NEVER] = -1
    return stacks


def _last_request(trace: DeviceTrace, strange: I4) -> int:
    """The last event at which something was asked for, those of strays left out; -1: none."""
    for stop in range(len(trace), 0, -_PART):
        start = max(stop - _PART, 0)
        asked = among(trace.action[start:stop], [Action.ALLOC, Action.OOM])
        asked[strange[(strange >= start) & (strange < stop)] - start] = False
        found = np.flatnonzero(asked)
        if len(found):
            return start + int(found[-1])
    return -1


def _unwound(trace: DeviceTrace, strange: I4, phases: Phases, freed_by: U1, born: I4, died: I4, span: I4) -> Bool:
    """Rows freed behind the last request of all, by an error that unwound the stack or by a program that ends.

    Behind a refused request that is everything. Else a forward pass that nothing follows was interrupted, unless the
    model itself gave the tensor up; and older memory that the program's own code frees after all work is over.
    """
    asked = _last_request(trace, strange)
    behind = (died > asked) & (died < NEVER)
    if asked < 0 or not len(phases) or not behind.any():
        return np.zeros(len(died), dtype=np.bool_)
    if trace.action[asked] == Action.OOM:
        return behind
    if phases.phase[-1] == Phase.FORWARD:
        return behind & (freed_by != Kind.FORWARD)
    forward = np.flatnonzero(phases.phase == Phase.FORWARD)
    older = born < (phases.start[forward[-1]] if len(forward) else -1)
    # Gradients and states of the last pass, too: nothing else of it is the program's to free.
    older |= (born >= 0) & among(phases.phase, [Phase.BACKWARD, Phase.OPTIMIZER])[span]
    return behind & older & among(freed_by, [Kind.OTHER, Kind.LOAD])


def _recomputation_ends(trace: DeviceTrace, kinds: U1, born: I4, shared: bool) -> I8:
    """A recomputation ends at the first event that does anything else; ``NEVER`` if it is cut short.

    Frees recorded with the stack of their allocation (or with none) don't tell who freed: then it ends after its last
    allocation, which is where non-reentrant checkpointing stops recomputing.
    """
    allocs = np.flatnonzero((trace.action == Action.ALLOC) & (kinds != Kind.STRAY))
    is_other = kinds[allocs] != Kind.RECOMPUTE
    if shared or (kinds == Kind.STRAY).any():
        following = np.searchsorted(allocs[is_other], born)
        stops = np.append(allocs[is_other], NEVER)
        last = allocs[np.maximum(np.searchsorted(allocs, stops) - 1, 0)] + 1
        ends = np.where(stops[following] < NEVER, last[following], NEVER)
        return np.where(_next_refusal(trace, born) < ends, NEVER, ends)
    moves = np.flatnonzero((trace.action == Action.ALLOC) | (trace.action == Action.FREE_REQUESTED))
    others = moves[kinds[moves] != Kind.RECOMPUTE]
    ends = np.append(others, NEVER)[np.searchsorted(others, born)]
    # Behind the last request of all, frees may be the unwinding of an interruption.
    return np.where((_next_refusal(trace, born) < ends) | (len(allocs) > 0 and ends > allocs[-1]), NEVER, ends)


def _call_ends(table: Allocations, stacks: StackFacts, kind: U1, count: int) -> I4:
    """First allocation after each row's that no module makes; the trace's length if none follows."""
    outside = (stacks.depth == 0)[table.stack] & (table.alloc_event >= 0)
    outside &= ~among(kind, [Kind.FORWARD, Kind.RECOMPUTE, Kind.STRAY])
    rows = np.flatnonzero(outside)
    return np.repeat(np.append(table.alloc_event[rows], np.int32(count)), np.diff(rows, prepend=0, append=len(outside)))


def _next_refusal(trace: DeviceTrace, events: I4) -> I4:
    """First refused request after each event."""
    refused = np.flatnonzero(trace.action == Action.OOM)
    return np.append(refused, NEVER).astype(np.int32)[np.searchsorted(refused, events)]


def _next_pass(phases: Phases, events: I4) -> I4:
    """Start of the first forward pass after each event; ``NEVER`` if none follows."""
    forward = among(phases.phase, [Phase.FORWARD, Phase.EVALUATION])
    starts = np.append(phases.start[:-1][forward], NEVER).astype(np.int32)
    return starts[np.searchsorted(starts[:-1], events, side="right")]


def _pass_ends(
    trace: DeviceTrace, stacks: StackFacts, strange: I4, phases: Phases, born: I4, kind: U1, span: I4, cut: Bool,
    shared: bool,
) -> I4:  # fmt: skip
    """End of the forward pass or recomputation each row was made in; see :class:`Facts`."""
    if not len(phases):
        return np.full(len(born), -1, dtype=np.int32)
    # A forward pass ends where the next phase begins.
    forward = among(phases.phase, [Phase.FORWARD, Phase.EVALUATION])
    forward_end = np.where(cut, NEVER, np.append(phases.start[1:-1], NEVER))
    ends = np.append(np.where(forward, forward_end, -1), -1).astype(np.int32)[span]
    recomputed = np.flatnonzero(kind == Kind.RECOMPUTE)
    if len(recomputed):
        ends[recomputed] = -1
        recomputed = recomputed[born[recomputed] >= 0]
        kinds = stacks.kind[trace.stack]
        kinds[strange] = Kind.STRAY
        ends[recomputed] = _recomputation_ends(trace, kinds, born[recomputed], shared)
    return ends
