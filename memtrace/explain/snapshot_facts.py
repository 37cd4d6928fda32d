"""The facts of a refused request from a snapshot: what was asked, what the process could have had, what was free.

A snapshot stores neither the card's size nor a limit set through the API, but each refusal bounds them: what was
reserved then fitted, and what was asked for on top of it did not. After its last attempt the allocator has given back
whatever it could, so the layout at the ``oom`` event shows what was left: blocks in use, and free pieces that no flush
could release.
"""

from __future__ import annotations

import numpy as np

from memtrace.allocator.config import from_snapshot
from memtrace.analysis import Analysis, is_truncated
from memtrace.arrays import among, distinct
from memtrace.attribution.categories import Purpose
from memtrace.attribution.phases import Phase
from memtrace.explain.answer import Capacity, Pieces
from memtrace.explain.course import Course, forward_progress, span_at, still_needed
from memtrace.explain.dims import layer_count
from memtrace.explain.facts import ByteSpan, FactSource, OomFacts, measured
from memtrace.explain.verdict import Verdict, judge
from memtrace.frozen import dataclass
from memtrace.history.layout import Layout, State, layout_at
from memtrace.history.refusals import Refusal, refusals, stated_limit_bytes
from memtrace.history.timeline import Timeline
from memtrace.snapshot.model import DEFAULT_POOL, Action
from memtrace.units import counted

_EXPANDABLE_OVERSHOOT_BYTES = 20 << 20  # the limit is checked before whole pages are mapped


@dataclass(frozen=True, slots=True)
class Refused:
    """A refusal with its facts and, for people, the capacity and the pieces they come from."""

    refusal: Refusal
    facts: OomFacts
    capacity: Capacity | None
    pieces: Pieces


def refused_at(
    analysis: Analysis, event: int, given_bytes: int | None = None, printed: OomFacts | None = None
) -> Refused | None:
    """The refusal at an event; None if nothing was refused there. ``given_bytes``: the process's limit, if somebody
    says it; ``printed``: what a log's message says of the same refusal, for what the file does not know."""
    timeline = analysis.timeline
    refusal = next((r for r in refusals(timeline) if r.event == event), None)
    if refusal is None:
        return None
    pieces = measure_pieces(layout_at(timeline, event), refusal)
    free = refusal.device_free_bytes
    total = timeline.snapshot.noted_bytes("device_total_bytes")
    if printed is not None:
        free = round(printed.free.middle) if free is None and printed.free is not None else free
        total = round(printed.total.middle) if total is None and printed.total is not None else total
    limit, source = _limit(timeline, refusal, free, given_bytes, printed)
    course = course_of(analysis, event)
    progress = forward_progress(course, event)
    needed = still_needed(course, event, progress)
    needed = needed if needed is not None else _missing_states(analysis, event)
    facts = OomFacts(
        source=FactSource.SNAPSHOT,
        **measured(asked=refusal.asked_bytes, driver_asked=refusal.need_bytes, reserved=refusal.reserved_bytes),
        **measured(allocated=pieces.allocated_bytes, slack=pieces.slack_bytes, total=total),
        # What was free may be unknown, but the refusal bounds it.
        free=ByteSpan.exactly(free) if free is not None else ByteSpan(0, refusal.need_bytes),
        limit=limit,
        pieces=pieces.count,
        usable_bytes=pieces.usable_bytes,
        still_needed_bytes=max(needed, refusal.asked_bytes) if needed is not None else None,
        progress=progress,
        is_exact=timeline.replay.exact,
    )
    capacity = None
    if facts.capacity is not None and (limit is not None or (free is not None and free < refusal.need_bytes)):
        kind, told = ("limit", source) if facts.is_limited else ("card", "measured")
        capacity = Capacity(round(facts.capacity.low), round(facts.capacity.high), kind, told)
    return Refused(refusal, facts, capacity, pieces)


def verdict_at(
    analysis: Analysis, event: int, given_bytes: int | None = None, printed: OomFacts | None = None
) -> tuple[Verdict, Refused | None]:
    """Verdict on the snapshot's state at ``event``; ``no_oom`` unless a request was refused there. See
    :func:`refused_at`."""
    refused = refused_at(analysis, event, given_bytes, printed)
    if refused is not None:
        return judge(refused.facts), refused
    timeline = analysis.timeline
    if not len(timeline):
        nothing = "No history was recorded, so nothing tells whether a request was refused."
        told = "The log of the run tells; memtrace run SCRIPT records the history."
        return Verdict("unknown", "derived", (nothing, told)), None
    made = int((timeline.trace.action == Action.ALLOC).sum())
    if is_truncated(timeline) is not False and len(timeline.replay.initial_pending) > made:
        few = f"The trace holds {counted(len(timeline), 'event')}, too few to tell what had become of this process."
        return Verdict("unknown", "derived", (few,)), None
    where = "at this event" if timeline.oom_events else "in these events" if timeline.window else "in this recording"
    because = [f"No request was refused {where}."]
    if is_truncated(timeline) is True:
        because.append("The recording's beginning is lost, and with it whatever was refused there.")
    return Verdict("no_oom", "measured" if len(because) == 1 else "derived", tuple(because)), None


def measure_pieces(layout: Layout, refusal: Refusal) -> Pieces:
    """Free pieces in the layout of a refusal, by whether the request could have used them."""
    free = layout.block_state == State.FREE
    busy = layout.used_bytes() + layout.pending_bytes() > 0
    default = np.array([pool == DEFAULT_POOL for pool in layout.pools] or [True])
    private = ~default[np.maximum(layout.pool, 0)] if len(layout) else np.zeros(0, np.bool_)
    own = (layout.is_small == refusal.is_small) & (layout.stream == refusal.stream) & ~private
    segment = layout.segment
    stuck = free & (busy | private)[segment] if len(layout) else free
    mine = stuck & own[segment] if len(layout) else free
    pending = int(layout.pending_bytes().sum())
    slack = int(layout.block_bytes[free].sum()) + pending
    return Pieces(
        allocated_bytes=int(layout.used_bytes().sum()),
        slack_bytes=slack,
        usable_bytes=int(layout.block_bytes[mine].max(initial=0)),
        own_free_bytes=int(layout.block_bytes[mine].sum()),
        elsewhere_bytes=int(layout.block_bytes[stuck].sum() - layout.block_bytes[mine].sum()),
        releasable_bytes=int(layout.block_bytes[free & ~stuck].sum()),
        pending_bytes=pending,
        count=int(free.sum()),
    )


def course_of(analysis: Analysis, event: int) -> Course:
    """The run as the recording shows it. A pass that its embedding is seen in was recorded from its beginning."""
    timeline, facts = analysis.timeline, analysis.attribution.facts
    phases, trace = facts.phases, timeline.trace
    span = span_at(phases, event)
    first = int(phases.start[span]) if span >= 0 else event
    begun = trace.stack[first:event][trace.action[first:event] == Action.ALLOC]
    begins = any(analysis.attribution.sites.module[stack] == "embedding" for stack in distinct(begun).tolist())
    return Course(
        is_alloc=trace.action == Action.ALLOC,
        site=trace.stack.astype(np.int64),
        level=timeline.requested_bytes,
        base_bytes=timeline.curve_at(-1)[0],
        phases=phases,
        begins=begins,
        layers=layer_count(analysis) if begins else None,
    )


def _missing_states(analysis: Analysis, event: int) -> int | None:
    """Inside the first optimizer step: two states a parameter, less those made. None where states are smaller."""
    attribution, timeline = analysis.attribution, analysis.timeline
    phases = attribution.facts.phases
    span = span_at(phases, event)
    if span < 0 or phases.phase[span] != Phase.OPTIMIZER:
        return None
    live = np.zeros(len(timeline.allocations), dtype=np.bool_)
    live[timeline.live_rows(event)] = True
    size = timeline.allocations.requested_bytes
    params, states = live & attribution.rows_of(Purpose.PARAMS), live & attribution.rows_of(Purpose.OPTIMIZER_STATE)
    full = states & among(size, size[params])
    if not params.any() or size[full].sum() < 0.5 * size[states].sum():
        return None
    return max(0, 2 * int(size[params].sum()) - int(size[full].sum()))


def _limit(
    timeline: Timeline, refusal: Refusal, free: int | None, given_bytes: int | None, printed: OomFacts | None
) -> tuple[ByteSpan | None, str]:
    """The process's limit and who says so; None where the card was full, or where no limit that never changed can
    explain a refusal although the card had room."""
    if given_bytes is not None:
        return ByteSpan.exactly(given_bytes), "given"
    if (stated := stated_limit_bytes(timeline.snapshot)) is not None:
        return ByteSpan.exactly(stated), "recorded"
    limit, total = (printed.limit, printed.total) if printed is not None else (None, None)
    if limit is not None and (total is None or limit.low < total.high):
        return ByteSpan(round(limit.low), round(limit.high)), "log"
    if free is None or free < refusal.need_bytes:
        return None, ""
    low = timeline.peaks()[2].size_bytes
    if from_snapshot(timeline.snapshot.settings).expandable_segments:
        low = max(refusal.reserved_bytes, low - _EXPANDABLE_OVERSHOOT_BYTES)
    had_room = [r for r in refusals(timeline) if (r.device_free_bytes or 0) >= r.need_bytes]
    high = min((r.reserved_bytes + r.need_bytes for r in had_room), default=0)
    tried = timeline.replay.limit_below_bytes  # also what was refused at first and granted after a flush
    if timeline.replay.exact and tried is not None and low < tried:
        high = min(high, tried)
    return (ByteSpan(low, high - 1) if low < high else None), "inferred"
