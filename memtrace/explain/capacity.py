"""What the process could have had: its limit or the card, whichever is smaller, as exactly as the inputs allow.

A snapshot stores neither the card's size nor a limit set through the API, but each refusal bounds them: what was
reserved then fitted, and what was asked for on top of it did not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.allocator.config import conf_string, from_snapshot
from memtrace.allocator.rounding import round_size, segment_size
from memtrace.explain.answer import Capacity
from memtrace.explain.log_figures import Span
from memtrace.history.timeline import Timeline

_EXPANDABLE_OVERSHOOT_BYTES = 20 << 20  # the limit is checked before whole pages are mapped


@dataclass(frozen=True, slots=True)
class Known:
    """What other sources say: ``--capacity``, and a log's figures as intervals of bytes."""

    given_bytes: int | None = None
    limit: Span | None = None
    total: Span | None = None
    free: Span | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refused request. ``asked_bytes`` is rounded; ``need_bytes`` is what the driver would have been asked for."""

    event: int
    asked_bytes: int
    need_bytes: int
    reserved_bytes: int
    device_free_bytes: int | None
    is_small: bool
    stream: int


def refusals(timeline: Timeline) -> list[Refusal]:
    """Every ``oom`` event with what it needed; the rules of sizes are the allocator's."""
    trace, config = timeline.trace, from_snapshot(timeline.snapshot.settings)
    found = []
    for event in timeline.oom_events:
        asked = round_size(int(trace.size[event]), config)
        free = trace.oom_device_free_bytes.get(event)
        stream = int(trace.stream[event])
        found.append(
            Refusal(
                event=event,
                asked_bytes=asked,
                need_bytes=segment_size(asked, config),
                reserved_bytes=timeline.curve_at(event)[2],
                device_free_bytes=free if free is not None and free >= 0 else None,
                is_small=asked <= 1 << 20,
                stream=trace.streams[stream] if 0 <= stream < len(trace.streams) else 0,
            )
        )
    return found


def recorded_limit_bytes(timeline: Timeline) -> int | None:
    """A limit that the file itself states: memtrace's recorder does, or a fraction in the settings string with the
    card's size beside it."""
    extra = timeline.snapshot.memtrace
    limit, total = extra.get("limit_bytes"), extra.get("device_total_bytes")
    if isinstance(limit, int) and limit > 0:
        return limit
    if "per_process_memory_fraction" in conf_string(timeline.snapshot.settings) and isinstance(total, int):
        fraction = from_snapshot(timeline.snapshot.settings).memory_fraction
        return int(fraction * total) if fraction is not None and fraction < 1 else None
    return None


def device_total_bytes(timeline: Timeline, known: Known) -> int | None:
    """The card's memory, where the file or a log says it."""
    total = timeline.snapshot.memtrace.get("device_total_bytes")
    if isinstance(total, int) and total > 0:
        return total
    return round(known.total.middle) if known.total is not None else None


def capacity_at(timeline: Timeline, refusal: Refusal, known: Known) -> Capacity | None:
    """Capacity at a refusal; None if a limit that never changed can't explain it although the card had room.

    The card's part is what this process holds plus what was free: memory of others can't be had.
    """
    reserved, free, need = refusal.reserved_bytes, refusal.device_free_bytes, refusal.need_bytes
    if free is None and known.free is not None:
        free = round(known.free.middle)
    bounds: list[Capacity] = []
    recorded = recorded_limit_bytes(timeline)
    if known.given_bytes is not None:
        bounds.append(Capacity(known.given_bytes, known.given_bytes, "limit", "given"))
    elif recorded is not None:
        bounds.append(Capacity(recorded, recorded, "limit", "recorded"))
    elif known.limit is not None:
        bounds.append(Capacity(round(known.limit.low), round(known.limit.high), "limit", "log"))
    if free is not None and (free < need or bounds):
        bounds.append(Capacity(reserved + free, reserved + free, "card", "measured"))
    if bounds:
        return min(bounds, key=lambda bound: (bound.low_bytes, bound.high_bytes))
    if free is None:
        return None
    return _inferred(timeline, refusal)


def _inferred(timeline: Timeline, refusal: Refusal) -> Capacity | None:
    """A limit between the most ever reserved and the least that was refused."""
    low = timeline.peaks()[2].size_bytes
    if from_snapshot(timeline.snapshot.settings).expandable_segments:
        low = max(refusal.reserved_bytes, low - _EXPANDABLE_OVERSHOOT_BYTES)
    high = min(r.reserved_bytes + r.need_bytes for r in refusals(timeline) if _card_had_room(r))
    return Capacity(low, high - 1, "limit", "inferred") if low < high else None


def _card_had_room(refusal: Refusal) -> bool:
    free = refusal.device_free_bytes
    return free is not None and free >= refusal.need_bytes


def reserved_share(part_bytes: int, capacity: Capacity | None, timeline: Timeline) -> float:
    """A size as a share of the capacity, or of the most ever reserved where that is unknown."""
    whole = capacity.low_bytes if capacity is not None else timeline.peaks()[2].size_bytes
    return part_bytes / whole if whole else float(np.sign(part_bytes))
