"""The segment/block layout as an answer: every segment with its blocks and what they are for."""

from __future__ import annotations

from memtrace.analysis import Analysis
from memtrace.answers.fragmentation import pool_name
from memtrace.frozen import dataclass
from memtrace.history.layout import State, layout_at
from memtrace.history.timeline import At


@dataclass(frozen=True, slots=True)
class BlockView:
    """One block. ``category`` and the rest are null for free blocks."""

    address: int
    block_bytes: int
    state: str
    requested_bytes: int | None
    category: str | None
    subcategory: str | None
    frame: str | None
    alloc_event: int | None


@dataclass(frozen=True, slots=True)
class SegmentView:
    """One segment, or one mapped range of an expandable segment."""

    address: int
    total_bytes: int
    free_bytes: int
    largest_free_block_bytes: int
    pool: str
    stream: int
    is_expandable: bool
    blocks: tuple[BlockView, ...]


@dataclass(frozen=True, slots=True)
class SegmentMap:
    """All segments of a device at an event, by address."""

    at: At
    reserved_bytes: int
    segments: tuple[SegmentView, ...]


def segment_map(analysis: Analysis, at: At) -> SegmentMap:
    """The layout just after ``at.event``."""
    timeline, attribution = analysis.timeline, analysis.attribution
    layout = layout_at(timeline, at.event)
    table = timeline.allocations
    free, largest = layout.free_bytes(), layout.largest_free_bytes()
    segments = []
    for segment in range(len(layout)):
        blocks = []
        for block in range(int(layout.first_block[segment]), int(layout.first_block[segment + 1])):
            row = int(layout.row[block])
            rule = attribution.rules[attribution.rule[row]] if row >= 0 else None
            blocks.append(
                BlockView(
                    address=int(layout.block_address[block]),
                    block_bytes=int(layout.block_bytes[block]),
                    state=State(int(layout.block_state[block])).name.lower(),
                    requested_bytes=int(table.requested_bytes[row]) if row >= 0 else None,
                    category=str(rule.category) if rule else None,
                    subcategory=rule.subcategory if rule else None,
                    frame=attribution.sites.label(int(table.stack[row])) if row >= 0 else None,
                    alloc_event=int(table.alloc_event[row]) if row >= 0 else None,
                )
            )
        segments.append(
            SegmentView(
                address=int(layout.address[segment]),
                total_bytes=int(layout.total_bytes[segment]),
                free_bytes=int(free[segment]),
                largest_free_block_bytes=int(largest[segment]),
                pool=pool_name(layout, segment),
                stream=int(layout.stream[segment]),
                is_expandable=bool(layout.is_expandable[segment]),
                blocks=tuple(blocks),
            )
        )
    return SegmentMap(at, layout.reserved_bytes, tuple(segments))
