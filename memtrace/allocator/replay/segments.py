"""Which segments were there before the first event, and to which pool every segment event belongs.

The trace is undone backwards from the final segments; what is left is the beginning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.ranges import Owner, RangeMap
from memtrace.allocator.rounding import SMALL_LIMIT_BYTES, SMALL_SEGMENT_BYTES
from memtrace.snapshot.model import I4, I8, Action, Bool, Device, DeviceTrace, PoolId


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
    rows = sorted(
        [(a, a + n, owner, False) for a, (n, owner) in past.whole.items()]
        + [(low, high, owner, True) for low, high, owner in past.mapped.merged()]
    )
    base_of = past.redo(default)
    return SegmentHistory(
        initial=InitialSegments(
            address=np.array([row[0] for row in rows], dtype=np.int64),
            total_size=np.array([row[1] - row[0] for row in rows], dtype=np.int64),
            stream=np.array([row[2].stream for row in rows], dtype=np.int64),
            is_small=np.array([row[2].small is True for row in rows], dtype=np.bool_),
            is_expandable=np.array([row[3] for row in rows], dtype=np.bool_),
            pool=np.array([row[2].pool if row[2].pool >= 0 else default for row in rows], dtype=np.int32),
        ),
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
        for address, size, stream, small, expandable, pool in zip(
            final.address.tolist(), final.total_size.tolist(), final.stream.tolist(), final.is_small.tolist(),
            final.is_expandable.tolist(), final.pool.tolist(), strict=True,
        ):  # fmt: skip
            owner = Owner(stream, small, index[final.pools[pool]])
            if expandable:
                self.mapped.add(address, size, owner)
            else:
                self.whole[address] = (size, owner)

    def _learn_pool(self, event: int, pool: int) -> None:
        if self.pools[event] < 0:
            self.pools[event] = pool

    def undo(self) -> None:
        """From the final segments back to those before the first event."""
        undo = {
            Action.SEGMENT_ALLOC: self._undo_alloc,
            Action.SEGMENT_FREE: self._undo_free,
            Action.SEGMENT_MAP: self._undo_map,
            Action.SEGMENT_UNMAP: self._undo_unmap,
        }
        for event in range(len(self._rows) - 1, -1, -1):
            kind, address, size, stream = self._rows[event]
            self.contradictions += not undo[Action(kind)](event, address, size, stream)
        unmapped = Action.SEGMENT_UNMAP  # whose pages those were is known only from who had mapped them
        self.small = [small and row[0] != unmapped for small, row in zip(self.small, self._rows, strict=True)]

    def _undo_alloc(self, event: int, address: int, size: int, stream: int) -> bool:
        known = self.whole.pop(address, None)
        if known is None:
            return False
        self.small[event] = known[1].small is True
        self._learn_pool(event, known[1].pool)
        return known[0] == size

    def _undo_free(self, event: int, address: int, size: int, stream: int) -> bool:
        clean = address not in self.whole
        self.whole[address] = (size, Owner(stream, self.small[event], self.pools[event]))
        return clean

    def _undo_map(self, event: int, address: int, size: int, stream: int) -> bool:
        pieces = self.mapped.cut(address, size)
        if pieces:
            self._learn_pool(event, pieces[0][2].pool)
        return sum(high - low for low, high, _ in pieces) == size

    def _undo_unmap(self, event: int, address: int, size: int, stream: int) -> bool:
        return size <= 0 or self.mapped.add(address, size, Owner(stream, None, self.pools[event]))

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


class _Lowest:
    """The requests of a trace by address."""

    def __init__(self, trace: DeviceTrace) -> None:
        used = np.flatnonzero(trace.action <= Action.FREE_COMPLETED)
        order = used[np.argsort(trace.address[used], kind="stable")]
        self.address, self.size = trace.address[order], trace.size[order]

    def size_in(self, low: int, high: int) -> int | None:
        """Bytes of the first request at the lowest address in a range; None if there is none."""
        place = int(np.searchsorted(self.address, low))
        return int(self.size[place]) if place < len(self.address) and int(self.address[place]) < high else None


def _settle(mapped: RangeMap, device: Device, config: AllocatorConfig, default: int) -> None:
    """Decide the pool of ranges that are known only from their unmapping: by their neighbours in the same segment,
    by page size, or by what lay in them."""
    ranges = mapped.merged()
    lowest: _Lowest | None = None  # sorting takes long, and hardly any recording needs it
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
            lowest = lowest or _Lowest(device.trace)
            size = lowest.size_in(low, high)
            small = size is not None and size <= SMALL_LIMIT_BYTES
        owner = Owner(owner.stream, small, pool if pool >= 0 else default)
        ranges[i] = (low, high, owner)
        mapped.add(low, high - low, owner)
