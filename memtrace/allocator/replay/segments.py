"""Which segments were there before the first event, and to which pool every segment event belongs.

The trace is undone backwards from the final segments; what is left is the beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.ranges import Owner, RangeMap
from memtrace.allocator.rounding import SMALL_LIMIT_BYTES, SMALL_SEGMENT_BYTES
from memtrace.snapshot.model import I4, I8, Action, Bool, Device, PoolId


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
    trace, final = device.trace, device.segments
    index = {pool: i for i, pool in enumerate(pools)}
    events = np.flatnonzero((trace.action >= Action.SEGMENT_ALLOC) & (trace.action <= Action.SEGMENT_UNMAP))
    action, address = trace.action[events].tolist(), trace.address[events].tolist()
    size, stream = trace.size[events].tolist(), [trace.streams[s] for s in trace.stream[events].tolist()]
    said = [index[trace.pools[p]] if p >= 0 else -1 for p in trace.pool[events].tolist()]

    whole: dict[int, tuple[int, Owner]] = {}
    mapped = RangeMap()
    final_pool = [index[final.pools[p]] for p in final.pool.tolist()]
    for a, n, s, small, expandable, pool in zip(
        final.address.tolist(), final.total_size.tolist(), final.stream.tolist(), final.is_small.tolist(),
        final.is_expandable.tolist(), final_pool, strict=True,
    ):  # fmt: skip
        if expandable:
            mapped.add(a, n, Owner(s, small, pool))
        else:
            whole[a] = (n, Owner(s, small, pool))

    small_events = [False] * len(events)
    pool_events = list(said)
    wrong = 0
    for i in range(len(events) - 1, -1, -1):
        kind, a, n = action[i], address[i], size[i]
        by_size = n <= SMALL_SEGMENT_BYTES
        if kind == Action.SEGMENT_ALLOC:
            known = whole.pop(a, None)
            wrong += known is None or known[0] != n
            if known is not None:
                by_size = known[1].small is True
                pool_events[i] = known[1].pool if said[i] < 0 else said[i]
            small_events[i] = by_size
        elif kind == Action.SEGMENT_FREE:
            wrong += a in whole
            small_events[i] = by_size
            whole[a] = (n, Owner(stream[i], by_size, said[i]))
        elif kind == Action.SEGMENT_MAP:
            pieces = mapped.cut(a, n)
            wrong += sum(high - low for low, high, _ in pieces) != n
            small_events[i] = by_size
            if pieces and said[i] < 0:
                pool_events[i] = pieces[0][2].pool
        elif n > 0:
            wrong += not mapped.add(a, n, Owner(stream[i], None, said[i]))

    default = index.get((0, 0), 0)
    _settle(mapped, device, config, default)
    rows = sorted(
        [(a, a + n, owner, False) for a, (n, owner) in whole.items()]
        + [(low, high, owner, True) for low, high, owner in mapped.merged()]
    )
    forward = zip(range(len(events)), action, address, size, stream, strict=True)
    base_of = _forward(mapped, forward, small_events, pool_events, default)
    initial = InitialSegments(
        address=np.array([row[0] for row in rows], dtype=np.int64),
        total_size=np.array([row[1] - row[0] for row in rows], dtype=np.int64),
        stream=np.array([row[2].stream for row in rows], dtype=np.int64),
        is_small=np.array([row[2].small is True for row in rows], dtype=np.bool_),
        is_expandable=np.array([row[3] for row in rows], dtype=np.bool_),
        pool=np.array([row[2].pool if row[2].pool >= 0 else default for row in rows], dtype=np.int32),
    )
    return SegmentHistory(
        initial=initial,
        pools=tuple(pools),
        events=events,
        is_small=np.array(small_events, dtype=np.bool_),
        pool=np.array(pool_events, dtype=np.int32),
        base_of=base_of,
        contradictions=int(wrong),
    )


def _settle(mapped: RangeMap, device: Device, config: AllocatorConfig, default: int) -> None:
    """Decide the pool of ranges that are known only from their unmapping: by their neighbours in the same segment,
    by page size, or by what lay in them."""
    trace = device.trace
    used = np.flatnonzero(trace.action <= Action.FREE_COMPLETED)
    order = used[np.argsort(trace.address[used], kind="stable")] if len(used) else used
    address = trace.address[order]
    ranges = mapped.merged()
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
            place = int(np.searchsorted(address, low))
            held = place < len(address) and int(address[place]) < high
            small = held and int(trace.size[order[place]]) <= SMALL_LIMIT_BYTES
        owner = Owner(owner.stream, small, pool if pool >= 0 else default)
        ranges[i] = (low, high, owner)
        mapped.add(low, high - low, owner)


def _forward(
    mapped: RangeMap,
    events: Iterable[tuple[int, int, int, int, int]],
    small: list[bool],
    pools: list[int],
    default: int,
) -> dict[int, int]:
    """Walk forward again: the unmapping of a range belongs to whoever had it mapped.

    Returns, by address of a reservation's first mapped range, its true base where later maps show a hole in front:
    as long as any page is mapped, all pages of one free list lie in the same reservation.
    """
    first: dict[Owner, int] = {}
    base: dict[Owner, int] = {}
    held: dict[Owner, int] = {}
    for low, high, owner in mapped.merged():
        first.setdefault(owner, low)
        base.setdefault(owner, low)
        held[owner] = held.get(owner, 0) + high - low
    for i, kind, a, n, stream in events:
        if kind == Action.SEGMENT_MAP and n > 0:
            owner = Owner(stream, small[i], pools[i] if pools[i] >= 0 else default)
            if held.get(owner, 0) > 0:
                base[owner] = min(base[owner], a)
                held[owner] += n
            mapped.add(a, n, owner)
        elif kind == Action.SEGMENT_UNMAP and n > 0:
            for low, high, owner in mapped.cut(a, n):
                small[i] = owner.small is True
                pools[i] = owner.pool if pools[i] < 0 else pools[i]
                if owner in held:
                    held[owner] -= high - low
    return {first[owner]: start for owner, start in base.items()}
