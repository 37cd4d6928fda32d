"""Reserved but not in use, at one event: how much, of which kind, where, and what keeps it from being given back.

Kinds: *rounding* (requests rounded up to whole blocks), *unsplit tails* (a block's rest too small to be split off),
*holes* (free blocks in segments that are partly in use), *cached segments* (wholly free) and *pending frees* (freed,
but another stream may still use them). Together with the requested bytes of live allocations they are ``reserved``.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memtrace.allocator.rounding import round_sizes
from memtrace.attribution.classify import Attribution
from memtrace.frozen import dataclass
from memtrace.history.layout import Layout, State, layout_at
from memtrace.history.timeline import At, Timeline
from memtrace.snapshot.model import DEFAULT_POOL

Place = tuple[str, str, str]  # category, subcategory, call site


@dataclass(frozen=True, slots=True)
class Pool:
    """One pool of one stream: blocks of one never serve requests of another."""

    pool: str
    stream: int
    kind: str
    reserved_bytes: int
    allocated_bytes: int
    free_bytes: int
    largest_free_block_bytes: int


@dataclass(frozen=True, slots=True)
class Pin:
    """Live allocations of one purpose that keep a segment from being released."""

    category: str
    subcategory: str
    bytes: int
    frame: str


@dataclass(frozen=True, slots=True)
class PinnedSegment:
    """A segment with free space that can't be given back because something in it is live."""

    address: int
    total_bytes: int
    free_bytes: int
    pinned_by: tuple[Pin, ...]


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """Everything about unused reserved memory at one event. ``utilisation`` is allocated / reserved."""

    at: At
    reserved_bytes: int
    allocated_bytes: int
    requested_bytes: int
    rounding_bytes: int
    unsplit_tail_bytes: int
    holes_bytes: int
    cached_segments_bytes: int
    pending_free_bytes: int
    largest_free_block_bytes: int
    free_block_count: int
    asked_bytes: int | None
    by_pool: tuple[Pool, ...]
    utilisation: float
    peak_utilisation: float
    pinned_segments: tuple[PinnedSegment, ...]

    @property
    def total_bytes(self) -> int:
        """Reserved bytes that no live allocation asked for."""
        inside = self.rounding_bytes + self.unsplit_tail_bytes + self.holes_bytes
        return inside + self.cached_segments_bytes + self.pending_free_bytes


def measure(timeline: Timeline, attribution: Attribution, at: At, layout: Layout | None = None) -> Fragmentation:
    """Fragmentation just after ``at.event``."""
    layout = layout or layout_at(timeline, at.event)
    table = timeline.allocations
    taken = layout.block_state == State.ALLOCATED
    rows = layout.row[taken]
    block = layout.block_bytes[taken]
    asked = np.minimum(table.requested_bytes[rows], block)  # blocks that would overlap are cut
    rounded = np.minimum(round_sizes(asked, timeline.config), block)
    free = layout.block_state == State.FREE
    in_use = layout.used_bytes() + layout.pending_bytes() > 0
    in_used_segment = in_use[layout.segment[free]] if len(layout) else np.zeros(0, np.bool_)
    free_bytes = layout.block_bytes[free]
    _, allocated_peak, reserved_peak = timeline.peaks()
    reserved_bytes, allocated_bytes = layout.reserved_bytes, int(block.sum())
    return Fragmentation(
        at=at,
        reserved_bytes=reserved_bytes,
        allocated_bytes=allocated_bytes,
        requested_bytes=int(asked.sum()),
        rounding_bytes=int((rounded - asked).sum()),
        unsplit_tail_bytes=int((block - rounded).sum()),
        holes_bytes=int(free_bytes[in_used_segment].sum()),
        cached_segments_bytes=int(free_bytes[~in_used_segment].sum()),
        pending_free_bytes=int(layout.pending_bytes().sum()),
        largest_free_block_bytes=int(free_bytes.max(initial=0)),
        free_block_count=int(free.sum()),
        asked_bytes=int(timeline.trace.size[at.event]) if at.event in timeline.oom_events else None,
        by_pool=_by_pool(layout),
        utilisation=allocated_bytes / reserved_bytes if reserved_bytes else 1.0,
        peak_utilisation=allocated_peak.size_bytes / reserved_peak.size_bytes if reserved_peak.size_bytes else 1.0,
        pinned_segments=tuple(_pinned(timeline, attribution, layout)),
    )


def pool_name(layout: Layout, segment: int) -> str:
    """``small``, ``large``, or with a private pool's id in front: ``(1, 0) large``."""
    size = "small" if layout.is_small[segment] else "large"
    number = int(layout.pool[segment])
    pool = layout.pools[number] if 0 <= number < len(layout.pools) else DEFAULT_POOL
    return size if pool == DEFAULT_POOL else f"{pool} {size}"


def _by_pool(layout: Layout) -> tuple[Pool, ...]:
    groups: dict[tuple[str, int, str], list[int]] = {}
    for segment in range(len(layout)):
        kind = "expandable" if layout.is_expandable[segment] else "ordinary"
        groups.setdefault((pool_name(layout, segment), int(layout.stream[segment]), kind), []).append(segment)
    free, used, largest = layout.free_bytes(), layout.used_bytes(), layout.largest_free_bytes()
    pools = [
        Pool(
            name, stream, kind,
            int(layout.total_bytes[members].sum()), int(used[members].sum()),
            int(free[members].sum()), int(largest[members].max()),
        )
        for (name, stream, kind), members in groups.items()
    ]  # fmt: skip
    return tuple(sorted(pools, key=lambda pool: -pool.reserved_bytes))


def live_by_site(timeline: Timeline, attribution: Attribution, layout: Layout) -> dict[int, dict[Place, int]]:
    """For each segment that is partly free, most free bytes first: live bytes by purpose and call site."""
    free, used = layout.free_bytes(), layout.used_bytes() + layout.pending_bytes()
    partly = np.flatnonzero((free > 0) & (used > 0))
    found: dict[int, dict[Place, int]] = {}
    places: dict[tuple[int, int], Place] = {}  # of rule and stack: most blocks share theirs with others
    stacks = timeline.allocations.stack
    for segment in partly[np.argsort(-free[partly], kind="stable")].tolist():
        blocks = slice(int(layout.first_block[segment]), int(layout.first_block[segment + 1]))
        sites = found[segment] = {}
        for row, size in zip(layout.row[blocks].tolist(), layout.block_bytes[blocks].tolist(), strict=True):
            if row >= 0:
                kind = int(attribution.rule[row]), int(stacks[row])
                place = places.get(kind) or places.setdefault(kind, place_of(timeline, attribution, row))
                sites[place] = sites.get(place, 0) + size
    return found


def place_of(timeline: Timeline, attribution: Attribution, row: int) -> Place:
    """What an allocation is for and where it was made."""
    rule = attribution.rules[attribution.rule[row]]
    return str(rule.category), rule.subcategory, attribution.sites.label(int(timeline.allocations.stack[row]))


def _pinned(timeline: Timeline, attribution: Attribution, layout: Layout) -> Iterator[PinnedSegment]:
    """Segments that are partly free, most free bytes first, with what is live in them."""
    free = layout.free_bytes()
    for segment, sites in live_by_site(timeline, attribution, layout).items():
        ranked = sorted(sites.items(), key=lambda item: (-item[1], *map(str, item[0])))
        pins = tuple(Pin(category, sub, size, frame) for (category, sub, frame), size in ranked)
        address, total = int(layout.address[segment]), int(layout.total_bytes[segment])
        yield PinnedSegment(address, total, int(free[segment]), pins)
