"""What was live before the first event, with block sizes, and the allocator state that it makes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.replay.lifetimes import Lifetimes
from memtrace.allocator.replay.segments import InitialSegments, SegmentHistory, owned
from memtrace.allocator.state import LARGE_SPLIT_BYTES, AllocatorState
from memtrace.frozen import dataclass
from memtrace.snapshot.model import I4, I8, Action, Bool, Device

RESERVATION_BYTES = 1 << 40  # PyTorch: 9/8 of the device's memory, which a snapshot does not tell


@dataclass(frozen=True, slots=True)
class Beginning:
    """What was live, or waiting to be freed, before the first event; one row each, which is its handle.

    ``stream`` is the raw handle, ``pool`` indexes the replay's ``pools``, ``stack`` the snapshot's stacks (-1: not
    known, as the allocation is no longer there at the end). ``pending`` rows were freed by their owner before the
    trace, but a stream still used them. ``segment_row`` is the row in the initial segments (-1: outside every one).
    ``assumed_tails`` counts blocks of which it is unknown whether they end in an unsplit tail; none is assumed.
    """

    block_bytes: I8
    stream: I8
    is_small: Bool
    pool: I4
    pending: Bool
    stack: I4
    segment_row: I8
    assumed_tails: int
    contradictions: int


def find_beginning(
    device: Device, life: Lifetimes, history: SegmentHistory, rounded: I8, config: AllocatorConfig
) -> Beginning:
    """Blocks before the first event. ``rounded`` are bytes by handle."""
    count = life.initial
    address, size = life.address[:count], rounded[:count].copy()
    requested_event, completed_event, last = (
        column[:count] for column in (life.free_requested_event, life.free_completed_event, life.last_block)
    )
    segments = history.initial
    row = np.searchsorted(segments.address, address, side="right") - 1
    inside = row >= 0
    if len(segments):
        segment_end = segments.address + segments.total_size
        inside &= address < segment_end[np.maximum(row, 0)]
        small = np.where(inside, segments.is_small[row], size <= 1 << 20)
        expandable = inside & segments.is_expandable[row]
        pool = np.where(inside, segments.pool[row], 0).astype(np.int32)
        stream = np.where(inside, segments.stream[row], 0)
    else:
        segment_end = np.zeros(1, np.int64)
        small, expandable = size <= 1 << 20, np.zeros(count, np.bool_)
        pool, stream = np.zeros(count, np.int32), np.zeros(count, np.int64)

    still = (last >= 0) & (completed_event < 0)
    size[still] = device.blocks.size[last[still]]
    settled = still | small | expandable | ~inside
    size, assumed = _tails(device, address, size, completed_event, settled, row, segments, config)

    end = address + size
    wrong = int((~inside).sum())
    if count:
        wrong += int((inside & (end > segment_end[np.maximum(row, 0)])).sum())
        wrong += int((end[:-1] > address[1:]).sum())
    stack = np.full(count, -1, dtype=np.int32)
    stack[still] = device.blocks.stack[last[still]]
    pending = still & (device.blocks.state[last] == 2) & (requested_event < 0) if len(device.blocks) else still
    if (device.trace.action == Action.FREE_REQUESTED).any():
        seen = requested_event >= 0
        pending[seen] |= device.trace.action[requested_event[seen]] == Action.FREE_COMPLETED
    return Beginning(size, stream, small, pool, pending, stack, np.where(inside, row, -1), assumed, wrong)


def _tails(
    device: Device,
    address: I8,
    size: I8,
    freed: I4,
    settled: Bool,
    row: I8,
    segments: InitialSegments,
    config: AllocatorConfig,
) -> tuple[I8, int]:
    """Add the unsplit tails of large ordinary blocks: whole oversize segments, and gaps too small to be free blocks.

    A larger gap may begin with a tail. The first allocation that lands in it shows where its free block starts.
    """
    size = size.copy()
    if not len(segments) or not len(address):
        return size, 0
    segment_end = (segments.address + segments.total_size)[np.maximum(row, 0)]
    following = segment_end.copy()
    following[:-1] = np.minimum(following[:-1], np.where(row[1:] == row[:-1], address[1:], following[:-1]))
    candidates = ~settled
    gap = following - address - size
    split = config.max_split_bytes
    if split is not None:
        whole = candidates & (segments.total_size[np.maximum(row, 0)] >= split) & (gap > 0)
        size = np.where(whole, following - address, size)
        candidates &= ~whole
    short = candidates & (gap > 0) & (gap <= LARGE_SPLIT_BYTES)
    size = np.where(short, following - address, size)
    unsure = np.flatnonzero(candidates & (gap > LARGE_SPLIT_BYTES))
    if not len(unsure):
        return size, 0
    allocs = np.flatnonzero(device.trace.action == Action.ALLOC)
    by_address = allocs[np.argsort(device.trace.address[allocs], kind="stable")]
    sorted_address = device.trace.address[by_address]
    end = address + size
    low = np.searchsorted(sorted_address, end[unsure])
    high = np.searchsorted(sorted_address, end[unsure] + LARGE_SPLIT_BYTES, side="right")
    assumed = 0
    for i, first, last in zip(unsure.tolist(), low.tolist(), high.tolist(), strict=True):
        place = first + int(np.argmin(by_address[first:last])) if last > first else -1
        if place >= 0 and (freed[i] < 0 or by_address[place] < freed[i]):
            size[i] = sorted_address[place] - address[i]
        else:
            assumed += 1
    return size, assumed


def fill(state: AllocatorState, history: SegmentHistory, beginning: Beginning, addresses: I8) -> None:
    """Put the initial segments and their free blocks into an empty state. ``addresses`` are by handle."""
    segments = history.initial
    first = np.searchsorted(beginning.segment_row, np.arange(len(segments)))
    last = np.searchsorted(beginning.segment_row, np.arange(len(segments)), side="right")
    used = beginning.block_bytes.tolist()
    used_at = addresses[: len(used)].tolist()
    groups: dict[int, list[tuple[int, int]]] = {}
    for (address, size, owner), low, high in zip(owned(segments), first.tolist(), last.tolist(), strict=True):
        number = state.list_of(owner.pool, owner.small is True, owner.stream)
        if owner.segment is None:
            state.grew(number, size)
            groups.setdefault(number, []).append((address, size))
        else:
            state.add_segment(number, address, size)
        position = address
        for i in range(low, high):
            if used_at[i] > position:
                state.insert(number, position, used_at[i] - position)
            position = max(position, used_at[i] + used[i])
        if address + size > position:
            state.insert(number, position, address + size - position)
    for number, ranges in groups.items():
        _reserve(state, number, ranges, history.base_of)


def _reserve(state: AllocatorState, number: int, ranges: list[tuple[int, int]], base_of: Mapping[int, int]) -> None:
    """One reservation around the mapped ranges of a free list, with holes between them."""
    first = ranges[0][0]
    base = base_of.get(first, first)
    end = max(base + RESERVATION_BYTES, ranges[-1][0] + ranges[-1][1])
    state.add_reservation(number, base, end - base)
    state.cut_unmapped(number, base)
    position = base
    for address, size in ranges:
        if address > position:
            state.add_unmapped(number, position, address - position)
        position = address + size
    if end > position:
        state.add_unmapped(number, position, end - position)
