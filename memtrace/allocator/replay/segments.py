"""Which segments were there before the first event, and to which pool every segment event belongs.

The trace is undone backwards from the final segments; what is left is the beginning.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.rounding import SMALL_LIMIT_BYTES, SMALL_SEGMENT_BYTES
from memtrace.frozen import dataclass
from memtrace.snapshot.model import I4, I8, Action, Bool, Device, PoolId, Segments


class Owner(NamedTuple):
    """Whom a segment belongs to. ``small`` is None while unknown; ``pool`` is an index, -1 while unknown.

    ``segment`` is the address of an ordinary segment, which never joins a neighbour; None for expandable ones.
    """

    stream: int
    small: bool | None
    pool: int
    segment: int | None = None


class RangeMap:
    """Sorted disjoint ranges; every operation costs a bisection and the ranges it touches."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self._end: dict[int, int] = {}
        self._owner: dict[int, Owner] = {}

    def add(self, start: int, size: int, owner: Owner) -> bool:
        """Add a range. False (and what was there is replaced) if it overlaps another. An empty one adds nothing."""
        if size <= 0:
            return True
        clean = not self.cut(start, size)
        self._put(start, start + size, owner)
        return clean

    def _put(self, start: int, end: int, owner: Owner) -> None:
        self.starts.insert(bisect_left(self.starts, start), start)
        self._end[start] = end
        self._owner[start] = owner

    def cut(self, start: int, size: int) -> list[tuple[int, int, Owner]]:
        """Remove what lies in a range; returns the removed pieces (start, end, owner)."""
        if size <= 0:
            return []
        end = start + size
        pieces: list[tuple[int, int, Owner]] = []
        place = max(bisect_right(self.starts, start) - 1, 0)
        last = place
        while last < len(self.starts) and self.starts[last] < end:
            last += 1
        kept: list[tuple[int, int, Owner]] = []
        touched = self.starts[place:last]
        for low in touched:
            high, owner = self._end[low], self._owner[low]
            if high <= start:
                kept.append((low, high, owner))
                continue
            pieces.append((max(low, start), min(high, end), owner))
            if low < start:
                kept.append((low, start, owner))
            if high > end:
                kept.append((end, high, owner))
        if not pieces:
            return pieces
        for low in touched:
            del self._end[low], self._owner[low]
        self.starts[place:last] = [low for low, _, _ in kept]
        for low, high, owner in kept:
            self._end[low] = high
            self._owner[low] = owner
        return pieces

    def merged(self) -> list[tuple[int, int, Owner]]:
        """All ranges (start, end, owner), neighbours with one owner joined."""
        result: list[tuple[int, int, Owner]] = []
        for start in self.starts:
            end, owner = self._end[start], self._owner[start]
            if result and result[-1][1] == start and result[-1][2] == owner:
                result[-1] = (result[-1][0], end, owner)
            else:
                result.append((start, end, owner))
        return result


@dataclass(frozen=True, slots=True)
class InitialSegments:
    """Mapped ranges before the first event, one row each, by address. ``pool`` indexes the replay's ``pools``."""

    address: I8
    total_size: I8
    stream: I8  # raw handles
    is_small: Bool
    is_expandable: Bool
    pool: I4

    def __len__(self) -> int:
        return len(self.address)

    @classmethod
    def of(cls, ranges: Sequence[tuple[int, int, Owner]], default: int = 0) -> InitialSegments:
        """The columns of (start, end, owner) by address; ``default`` is the pool of those that are in none known."""
        return cls(
            address=np.array([low for low, _, _ in ranges], dtype=np.int64),
            total_size=np.array([high - low for low, high, _ in ranges], dtype=np.int64),
            stream=np.array([owner.stream for _, _, owner in ranges], dtype=np.int64),
            is_small=np.array([owner.small is True for _, _, owner in ranges], dtype=np.bool_),
            is_expandable=np.array([owner.segment is None for _, _, owner in ranges], dtype=np.bool_),
            pool=np.array([owner.pool if owner.pool >= 0 else default for _, _, owner in ranges], dtype=np.int32),
        )


def owned(segments: InitialSegments | Segments) -> Iterator[tuple[int, int, Owner]]:
    """(address, size, owner) of each segment."""
    for address, size, stream, small, expandable, pool in zip(
        segments.address.tolist(), segments.total_size.tolist(), segments.stream.tolist(), segments.is_small.tolist(),
        segments.is_expandable.tolist(), segments.pool.tolist(), strict=True,
    ):  # fmt: skip
        yield address, size, Owner(stream, small, pool, None if expandable else address)


@dataclass(frozen=True, slots=True)
class SegmentHistory:
    """The beginning, and for every segment event (``events``) its pool index and whether it is of the small pool.

    ``base_of`` gives the base of a reservation by the address of its first mapped range.
    ``contradictions`` counts events that do not fit the final segments.
    """

    initial: InitialSegments
    pools: tuple[PoolId, ...]
    events: I8
    is_small: Bool
    pool: I4
    base_of: Mapping[int, int]
    contradictions: int


def trace_back(device: Device, config: AllocatorConfig, pools: Sequence[PoolId]) -> SegmentHistory:
    """Undo every segment event of a device. ``pools`` lists the pool ids the result's indices refer to."""
    index = {pool: i for i, pool in enumerate(pools)}
    default = index.get((0, 0), 0)
    past = _Past(device, index)
    past.undo()
    _settle(past.mapped, device, config, default)
    ranges = [(address, address + size, owner) for address, (size, owner) in past.whole.items()]
    ranges = sorted(ranges + past.mapped.merged(), key=itemgetter(0, 1))
    base_of = past.redo(default)
    return SegmentHistory(
        initial=InitialSegments.of(ranges, default),
        pools=tuple(pools),
        events=past.events,
        is_small=np.array(past.small, dtype=np.bool_),
        pool=np.array(past.pools, dtype=np.int32),
        base_of=base_of,
        contradictions=past.contradictions,
    )


class _Past:
    """Segments while their events are undone, last first: ordinary ones (``whole``) and mapped ranges (``mapped``)."""

    def __init__(self, device: Device, index: Mapping[PoolId, int]) -> None:
        trace, final = device.trace, device.segments
        self.events = np.flatnonzero((trace.action >= Action.SEGMENT_ALLOC) & (trace.action <= Action.SEGMENT_UNMAP))
        rows = self.events
        streams = [trace.streams[s] for s in trace.stream[rows].tolist()]
        self._rows = list(
            zip(trace.action[rows].tolist(), trace.address[rows].tolist(), trace.size[rows].tolist(), streams,
                strict=True)
        )  # fmt: skip
        self.pools = [index[trace.pools[p]] if p >= 0 else -1 for p in trace.pool[rows].tolist()]
        self.small = [size <= SMALL_SEGMENT_BYTES for _, _, size, _ in self._rows]
        self.contradictions = 0
        self.whole: dict[int, tuple[int, Owner]] = {}
        self.mapped = RangeMap()
        for address, size, owner in owned(final):
            owner = owner._replace(pool=index[final.pools[owner.pool]])
            if owner.segment is None:
                self.mapped.add(address, size, owner)
            else:
                self.whole[address] = (size, owner)

    def _learn_pool(self, event: int, pool: int) -> None:
        if self.pools[event] < 0:
            self.pools[event] = pool

    def undo(self) -> None:
        """From the final segments back to those before the first event."""
        for event in range(len(self._rows) - 1, -1, -1):
            kind, address, size, stream = self._rows[event]
            if kind == Action.SEGMENT_FREE:
                fits = address not in self.whole
                self.whole[address] = (size, Owner(stream, self.small[event], self.pools[event], address))
            elif kind == Action.SEGMENT_UNMAP:
                fits = self.mapped.add(address, size, Owner(stream, None, self.pools[event]))
            elif kind == Action.SEGMENT_ALLOC:
                length, owner = self.whole.pop(address, (-1, Owner(stream, self.small[event], -1)))
                self.small[event] = owner.small is True
                self._learn_pool(event, owner.pool)
                fits = length == size
            else:
                pieces = self.mapped.cut(address, size)
                for _, _, owner in pieces[:1]:
                    self._learn_pool(event, owner.pool)
                fits = sum(high - low for low, high, _ in pieces) == size
            self.contradictions += not fits
        unmapped = Action.SEGMENT_UNMAP  # whose pages those were is known only from who had mapped them
        self.small = [small and row[0] != unmapped for small, row in zip(self.small, self._rows, strict=True)]

    def redo(self, default: int) -> dict[int, int]:
        """Walk forward again: the unmapping of a range belongs to whoever had it mapped.

        Returns, by address of a reservation's first mapped range, its true base where later maps show a hole in
        front: as long as any page is mapped, all pages of one free list lie in the same reservation.
        """
        first: dict[Owner, int] = {}
        base: dict[Owner, int] = {}
        held: dict[Owner, int] = {}
        for low, high, owner in self.mapped.merged():
            first.setdefault(owner, low)
            base.setdefault(owner, low)
            held[owner] = held.get(owner, 0) + high - low
        for event, (kind, address, size, stream) in enumerate(self._rows):
            if kind == Action.SEGMENT_MAP and size > 0:
                pool = self.pools[event]
                owner = Owner(stream, self.small[event], pool if pool >= 0 else default)
                if held.get(owner, 0) > 0:
                    base[owner] = min(base[owner], address)
                    held[owner] += size
                self.mapped.add(address, size, owner)
            elif kind == Action.SEGMENT_UNMAP and size > 0:
                for low, high, owner in self.mapped.cut(address, size):
                    self.small[event] = owner.small is True
                    self._learn_pool(event, owner.pool)
                    if owner in held:
                        held[owner] -= high - low
        return {first[owner]: start for owner, start in base.items()}


def _settle(mapped: RangeMap, device: Device, config: AllocatorConfig, default: int) -> None:
    """Decide the pool of ranges that are known only from their unmapping: by their neighbours in the same segment,
    by page size, or by what lay in them."""
    ranges, trace = mapped.merged(), device.trace

    @cache  # sorting takes long, and hardly any recording needs it
    def by_address() -> I8:
        used = np.flatnonzero(trace.action <= Action.FREE_COMPLETED)
        return used[np.argsort(trace.address[used], kind="stable")]

    for i, (low, high, owner) in enumerate(ranges):
        small, pool = owner.small, owner.pool
        for near in (i - 1, i + 1):
            if 0 <= near < len(ranges):
                start, end, other = ranges[near]
                if other.stream == owner.stream and (end == low or start == high):
                    small = other.small if small is None else small
                    pool = other.pool if pool < 0 else pool
        if small is None and (high - low) % config.large_segment_bytes:
            small = True
        if small is None:
            order = by_address()  # the first request at the lowest address tells
            first = order[np.searchsorted(trace.address[order], low) :][:1]
            small = bool(((trace.address[first] < high) & (trace.size[first] <= SMALL_LIMIT_BYTES)).any())
        owner = Owner(owner.stream, small, pool if pool >= 0 else default)
        ranges[i] = (low, high, owner)
        mapped.add(low, high - low, owner)
