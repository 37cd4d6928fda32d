"""Segments and blocks at any event: what lies where, and which bytes are free between them.

Segments follow from the driver events; live blocks from the allocation table; whatever is left of a segment is free.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator.replay.segments import InitialSegments, Owner, RangeMap, owned
from memtrace.frozen import dataclass
from memtrace.history.timeline import Timeline
from memtrace.snapshot.model import Action, PoolId

I8 = NDArray[np.int64]
I4 = NDArray[np.int32]
Bool = NDArray[np.bool_]
U1 = NDArray[np.uint8]


class State(IntEnum):
    """What a block is at the event."""

    FREE = 0
    ALLOCATED = 1
    PENDING_FREE = 2


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """One device's memory at one event; segments by address, blocks by address within them.

    ``first_block[i]:first_block[i+1]`` are the blocks of segment ``i``. ``row`` is the block's row in
    ``Timeline.allocations`` (-1 for a free block).
    """

    event: int
    address: I8
    total_bytes: I8
    stream: I8
    is_small: Bool
    is_expandable: Bool
    pool: I4
    pools: tuple[PoolId, ...]
    first_block: I8
    block_address: I8
    block_bytes: I8
    block_state: U1
    row: I8
    segment: I4

    def __len__(self) -> int:
        return len(self.address)

    @property
    def reserved_bytes(self) -> int:
        """Sum of the segments."""
        return int(self.total_bytes.sum())

    def free_bytes(self) -> I8:
        """Free bytes of each segment, pending ones not counted."""
        return self._per_segment(self.block_state == State.FREE)

    def used_bytes(self) -> I8:
        """Allocated bytes (whole blocks) of each segment."""
        return self._per_segment(self.block_state == State.ALLOCATED)

    def pending_bytes(self) -> I8:
        """Bytes of each segment whose free has not completed."""
        return self._per_segment(self.block_state == State.PENDING_FREE)

    def largest_free_bytes(self) -> I8:
        """Largest free block of each segment; 0 where it has none."""
        largest = np.zeros(len(self), dtype=np.int64)
        free = self.block_state == State.FREE
        np.maximum.at(largest, self.segment[free], self.block_bytes[free])
        return largest

    def _per_segment(self, chosen: Bool) -> I8:
        total = np.zeros(len(self), dtype=np.int64)
        np.add.at(total, self.segment[chosen], self.block_bytes[chosen])
        return total


def _segments_at(timeline: Timeline, event: int) -> InitialSegments:
    """Segments, and maximal mapped ranges of one stream and pool, just after an event: columns by address."""
    trace, replay = timeline.trace, timeline.replay
    ranges = RangeMap()
    for address, size, owner in owned(replay.initial_segments):
        ranges.add(address, size, owner)
    count = int(np.searchsorted(replay.segment_events, event, side="right"))
    rows = replay.segment_events[:count]
    for kind, address, size, number, small, pool in zip(
        trace.action[rows].tolist(), trace.address[rows].tolist(), trace.size[rows].tolist(),
        trace.stream[rows].tolist(), replay.segment_is_small[:count].tolist(), replay.segment_pool[:count].tolist(),
        strict=True,
    ):  # fmt: skip
        if kind in (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP):
            segment = address if kind == Action.SEGMENT_ALLOC else None
            ranges.add(address, size, Owner(trace.streams[number], small, pool, segment))
        else:
            ranges.cut(address, size)
    return InitialSegments.of(ranges.merged())


def layout_at(timeline: Timeline, event: int) -> Layout:
    """The layout just after ``event`` (-1: before the trace).

    Where the replay is not exact, blocks that would overlap are cut at the next one's start, and blocks outside every
    segment are left out, so that the blocks always tile the segments.
    """
    segments = _segments_at(timeline, event)
    address, total, count = segments.address, segments.total_size, len(segments)
    table = timeline.allocations
    rows = timeline.live_rows(event)
    rows = rows[np.argsort(table.address[rows], kind="stable")]
    start = table.address[rows]
    holder = np.searchsorted(address, start, side="right") - 1
    inside = (holder >= 0) & (start < (address + total)[np.maximum(holder, 0)]) if count else np.zeros(len(rows), bool)
    # Two live rows at one address can only come from a damaged trace; the later one is the one that is there.
    if len(rows) > 1:
        inside[:-1] &= start[:-1] != start[1:]
    rows, start, holder = rows[inside], start[inside], holder[inside]
    end = np.minimum(start + table.block_bytes[rows], (address + total)[holder]) if len(rows) else start
    if len(rows) > 1:
        end[:-1] = np.minimum(end[:-1], start[1:])
    state = np.where(timeline.pending(rows, event), State.PENDING_FREE, State.ALLOCATED).astype(np.uint8)

    # Free space: from each segment's start or a block's end, to the next block's start or the segment's end.
    gap_start = np.concatenate([address, end])
    gap_segment = np.concatenate([np.arange(count, dtype=np.int64), holder])
    order = np.lexsort((gap_start, gap_segment))
    gap_start, gap_segment = gap_start[order], gap_segment[order]
    next_start = np.searchsorted(start, gap_start, side="left")
    segment_end = (address + total)[gap_segment] if count else gap_start
    padded = np.append(start, np.iinfo(np.int64).max)
    gap_end = np.minimum(padded[next_start], segment_end)
    is_gap = gap_end > gap_start
    gap_start, gap_end, gap_segment = gap_start[is_gap], gap_end[is_gap], gap_segment[is_gap]

    block_address = np.concatenate([start, gap_start])
    segment = np.concatenate([holder, gap_segment]).astype(np.int32)
    order = np.argsort(block_address, kind="stable")
    segment = segment[order]
    first_block = np.searchsorted(segment, np.arange(count + 1)).astype(np.int64)
    return Layout(
        event=event,
        address=address,
        total_bytes=total,
        stream=segments.stream,
        is_small=segments.is_small,
        is_expandable=segments.is_expandable,
        pool=segments.pool,
        pools=timeline.pools,
        first_block=first_block,
        block_address=block_address[order],
        block_bytes=np.concatenate([end - start, gap_end - gap_start])[order],
        block_state=np.concatenate([state, np.zeros(len(gap_start), np.uint8)])[order],
        row=np.concatenate([rows, np.full(len(gap_start), -1, np.int64)])[order],
        segment=segment,
    )
