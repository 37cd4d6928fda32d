"""The verdict from a snapshot: measured on the layout in which the request was refused.

After its last attempt the allocator has given back whatever it could, so the layout at the ``oom`` event shows what
was left: blocks in use, and free pieces that no flush could release. If the request would not have fitted even with
all pieces in one, memory was too small (*budget*). If it would have, the pieces are to blame (*fragmentation*), unless
they are too few to matter or the same pass still needed more than they hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.analysis import Analysis
from memtrace.explain.answer import Capacity, Pieces
from memtrace.explain.capacity import Known, Refusal, capacity_at, device_total_bytes, refusals
from memtrace.explain.layers import Progress, forward_progress
from memtrace.explain.log_verdict import MATERIAL_SHARE
from memtrace.explain.needs import still_needed
from memtrace.history.layout import Layout, State, layout_at
from memtrace.snapshot.model import DEFAULT_POOL
from memtrace.units import counted
from memtrace.units import format_bytes as size

_WIDE_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Verdict:
    """``verdict`` and ``confidence`` are words of the JSON contract; the rest is None without an OOM."""

    verdict: str
    confidence: str
    because: tuple[str, ...]
    capacity: Capacity | None = None
    refusal: Refusal | None = None
    pieces: Pieces | None = None
    progress: Progress | None = None
    needed_bytes: int | None = None


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


def judge(analysis: Analysis, event: int, known: Known) -> Verdict:
    """Verdict on the snapshot's state at ``event``; ``no_oom`` unless a request was refused there."""
    timeline = analysis.timeline
    refusal = next((r for r in refusals(timeline) if r.event == event), None)
    if refusal is None:
        if not len(timeline):
            nothing = "No history was recorded, so nothing tells whether a request was refused."
            advice = "The log of the run tells; memtrace run SCRIPT records the history."
            return Verdict("unknown", "derived", (nothing, advice))
        count = len(timeline.oom_events)
        where = "at this event" if count else "in these events" if timeline.window else "in this recording"
        text = f"No request was refused {where}."
        return Verdict("no_oom", "measured", (text,))
    capacity = capacity_at(timeline, refusal, known)
    pieces = measure_pieces(layout_at(timeline, event), refusal)
    progress = forward_progress(analysis, event)
    needed = still_needed(analysis, event, progress)
    verdict, sure, because = _decide(timeline_free(refusal, known), refusal, capacity, pieces, progress, needed)
    elsewhere = _elsewhere(device_total_bytes(timeline, known), refusal, capacity)
    if elsewhere is not None and verdict in ("budget", "fragmentation"):
        verdict, sure, because = "not_this_process", True, [elsewhere, *because]
    if not timeline.replay.exact:
        sure = False
        because.append("The recording could not be reproduced exactly, so sizes of blocks are estimates.")
    return Verdict(
        verdict, "measured" if sure else "derived", tuple(because), capacity, refusal, pieces, progress, needed
    )


def timeline_free(refusal: Refusal, known: Known) -> int | None:
    """Free bytes of the card at the refusal, from the event or else from a log."""
    if refusal.device_free_bytes is not None:
        return refusal.device_free_bytes
    return round(known.free.middle) if known.free is not None else None


_Decision = tuple[str, bool, list[str]]


def _decide(
    free_bytes: int | None,
    refusal: Refusal,
    capacity: Capacity | None,
    pieces: Pieces,
    progress: Progress | None,
    needed: int | None,
) -> _Decision:
    asked = refusal.asked_bytes
    if capacity is None:
        if free_bytes is None:
            # The refusal itself bounds what could be had.
            capacity = Capacity(refusal.reserved_bytes, refusal.reserved_bytes + refusal.need_bytes, "card", "inferred")
        else:
            return _hidden(refusal, free_bytes)
    if refusal.reserved_bytes + refusal.need_bytes <= capacity.low_bytes:
        room = size(capacity.low_bytes - refusal.reserved_bytes)
        what = f"{size(refusal.need_bytes)} was refused although {room} more was to be had: neither size nor pieces."
        return "limit", True, [what]
    because = [_state(refusal, pieces, capacity)]
    if asked > capacity.high_bytes:
        return "budget", True, [f"The request alone, {size(asked)}, is larger than the capacity.", *because]
    spare = capacity.high_bytes - pieces.allocated_bytes - asked
    if pieces.allocated_bytes + asked > capacity.low_bytes:
        if pieces.slack_bytes:
            because.append(
                f"The {size(pieces.slack_bytes)} that is free in pieces would not have held it in one either."
            )
        else:
            because.append("Nothing was free inside reserved memory, so pieces play no part.")
        # Between the bounds of an inferred capacity it might have fitted just so.
        sure = spare < 0 or 2 * pieces.slack_bytes < asked
        return "budget", sure, [*because, *_outlook(progress, needed, asked)]
    if pieces.slack_bytes <= MATERIAL_SHARE * capacity.low_bytes:
        share = pieces.slack_bytes / max(capacity.low_bytes, 1)
        because.append(
            f"Only {size(pieces.slack_bytes)} ({share:.1%} of the capacity) is free in pieces: no allocator setting "
            "can win more than that."
        )
        return "budget", True, [*because, *_outlook(progress, needed, asked)]
    if needed is not None and needed > asked + spare:
        because.append(
            f"In one piece the {size(pieces.slack_bytes)} that is free in {counted(pieces.count, 'piece')} would have "
            "held it, but not what this pass still needed."
        )
        sure = needed >= 2 * (asked + spare) and (progress is None or progress.total is not None)
        return "budget", sure, [*because, *_outlook(progress, needed, asked)]
    because.append(
        f"{size(pieces.slack_bytes)} was free inside reserved memory, in {counted(pieces.count, 'piece')}; the "
        f"largest this request could use has {size(pieces.usable_bytes)}."
    )
    if needed is not None:
        because.append(f"The rest of this pass needed about {size(needed)}: in one piece it would have fitted.")
    if pieces.usable_bytes >= asked:
        because.append("A fitting piece came free too late: PyTorch does not search again after its flush.")
    return "fragmentation", True, because


def _state(refusal: Refusal, pieces: Pieces, capacity: Capacity) -> str:
    what = {"limit": "limit of this process", "card": "card"}[capacity.kind]
    if capacity.is_exact:
        allows = size(capacity.low_bytes)
    elif capacity.high_bytes - capacity.low_bytes > _WIDE_SHARE * capacity.high_bytes:
        allows = f"less than {size(capacity.high_bytes)}"
    else:
        allows = f"about {size(capacity.low_bytes)}"
    held = f"{size(pieces.allocated_bytes)} allocated and {size(refusal.reserved_bytes)} reserved"
    held = held if refusal.reserved_bytes else "nothing allocated yet"
    return f"{size(refusal.asked_bytes)} asked for with {held}; the {what} allows {allows}."


def _outlook(progress: Progress | None, needed: int | None, asked: int) -> list[str]:
    if progress is not None and progress.total is not None and progress.bytes_per_layer:
        return [
            f"{progress.done} of {progress.total} layers were done, each adding {size(progress.bytes_per_layer)}: "
            f"the rest needs about {size(progress.needed_bytes or 0)} more."
        ]
    if progress is not None and progress.bytes_per_layer and needed == progress.bytes_per_layer:
        return [f"Each layer adds {size(progress.bytes_per_layer)}, so not even the next one would have fitted."]
    if needed is not None and needed > 1.5 * asked:
        return [f"About {size(needed)} more was still to come in this pass."]
    return []


def _hidden(refusal: Refusal, free_bytes: int) -> _Decision:
    return (
        "limit",
        False,
        [
            f"{size(refusal.need_bytes)} was refused with {size(free_bytes)} free on the card, after this process had "
            "held more than that: no limit that stays the same explains it.",
            "Suspects: a limit changed at run time, a Windows commit limit, WSL's cap on pinned memory, a MIG or vGPU "
            "slice, the driver's bound on mappings.",
        ],
    )


def _elsewhere(total: int | None, refusal: Refusal, capacity: Capacity | None) -> str | None:
    """Most of what is in use on a full card is not this allocator's, and would have held the request."""
    free = refusal.device_free_bytes
    if total is None or free is None or capacity is None or capacity.kind != "card":
        return None
    outside = total - free - refusal.reserved_bytes
    if outside > refusal.reserved_bytes and outside + free >= refusal.need_bytes:
        return (
            f"PyTorch in this process holds {size(refusal.reserved_bytes)} of {size(total)}; {size(outside)} is in use "
            "outside its allocator."
        )
    return None
