"""What was live before the first event, with block sizes, and the allocator state that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.replay.lifetimes import Lifetimes
from memtrace.allocator.replay.segments import InitialSegments, SegmentHistory
from memtrace.allocator.state import LARGE_SPLIT_BYTES, AllocatorState
from memtrace.snapshot.model import I4, I8, Action, Bool, Device

RESERVATION_BYTES = 1 << 40  # PyTorch: 9/8 of the device's memory, which a snapshot does not tell


@dataclass(frozen=True, slots=True)
class InitialBlocks:
    """What was live, or waiting to be freed, before the first event; one row each, by address.

    ``stream`` is the raw handle, ``pool`` indexes the replay's ``pools``, ``stack`` the snapshot's stacks (-1: not
    known, as the allocation is no longer there at the end). ``pending`` rows were freed by their owner before the
    trace, but a stream still used them. The event columns hold -1 for never.
    """

    address: I8
    requested_bytes: I8
    block_bytes: I8
    stream: I8
    is_small: Bool
    pool: I4
    pending: Bool
    stack: I4
    free_requested_event: I8
    free_completed_event: I8

    def __len__(self) -> int:
        return len(self.address)


@dataclass(frozen=True, slots=True)
class Beginning:
    """``segment_row`` is each block's row in the initial segments (-1: outside every one), ``handle`` its handle.

    ``assumed_tails`` counts blocks of which it is unknown whether they end in an unsplit tail; none is assumed.
    """

    blocks: InitialBlocks
    handle: I8
    segment_row: I8
    assumed_tails: int
    contradictions: int


def find_beginning(
    device: Device,
    life: Lifetimes,
    history: SegmentHistory,
    requested: I8,
    rounded: I8,
    config: AllocatorConfig,
) -> Beginning:
    """Blocks before the first event. ``requested`` and ``rounded`` are bytes by handle."""
    count = life.initial
    order = np.argsort(life.address[:count], kind="stable")
    address = life.address[order]
    segments = history.initial
    row = np.searchsorted(segments.address, address, side="right") - 1
    inside = row >= 0
    if len(segments):
        segment_end = segments.address + segments.total_size
        inside &= address < segment_end[np.maximum(row, 0)]
        small = np.where(inside, segments.is_small[row], rounded[order] <= 1 << 20)
        expandable = inside & segments.is_expandable[row]
        pool = np.where(inside, segments.pool[row], 0).astype(np.int32)
        stream = np.where(inside, segments.stream[row], 0)
    else:
        segment_end = np.zeros(1, np.int64)
        small, expandable = rounded[order] <= 1 << 20, np.zeros(count, np.bool_)
        pool, stream = np.zeros(count, np.int32), np.zeros(count, np.int64)

    size = rounded[order].copy()
    last = life.last_block[order]
    still = (last >= 0) & (life.free_completed_event[order] < 0)
    size[still] = device.blocks.size[last[still]]
    settled = still | small | expandable | ~inside
    size, assumed = _tails(device, life, order, address, size, settled, row, segments, config)

    end = address + size
    wrong = int((~inside).sum())
    if count:
        wrong += int((inside & (end > segment_end[np.maximum(row, 0)])).sum())
        wrong += int((end[:-1] > address[1:]).sum())
    stack = np.full(count, -1, dtype=np.int32)
    stack[still] = device.blocks.stack[last[still]]
    requested_event = life.free_requested_event[order]
    completed_event = life.free_completed_event[order]
    pending = still & (device.blocks.state[last] == 2) & (requested_event < 0) if len(device.blocks) else still
    if (device.trace.action == Action.FREE_REQUESTED).any():
        seen = requested_event >= 0
        pending[seen] |= device.trace.action[requested_event[seen]] == Action.FREE_COMPLETED
    blocks = InitialBlocks(
        address=address,
        requested_bytes=np.minimum(requested[order], size),  # more than its block is a contradiction, told elsewhere
        block_bytes=size,
        stream=stream,
        is_small=small,
        pool=pool,
        pending=pending,
        stack=stack,
        free_requested_event=np.where(pending, -1, requested_event),
        free_completed_event=completed_event,
    )
    return Beginning(blocks, order, np.where(inside, row, -1), assumed, wrong)


def _tails(
    device: Device,
    life: Lifetimes,
    order: I8,
    address: I8,
    size: I8,
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
    freed = life.free_completed_event[order]
    assumed = 0
    for i, first, last in zip(unsure.tolist(), low.tolist(), high.tolist(), strict=True):
        place = first + int(np.argmin(by_address[first:last])) if last > first else -1
        if place >= 0 and (freed[i] < 0 or by_address[place] < freed[i]):
            size[i] = sorted_address[place] - address[i]
        else:
            assumed += 1
    return size, assumed


def fill(state: AllocatorState, history: SegmentHistory, beginning: Beginning) -> None:
    """Put the initial segments and their free blocks into an empty state."""
    segments, blocks = history.initial, beginning.blocks
    first = np.searchsorted(beginning.segment_row, np.arange(len(segments)))
    last = np.searchsorted(beginning.segment_row, np.arange(len(segments)), side="right")
    used_at, used = blocks.address.tolist(), blocks.block_bytes.tolist()
    groups: dict[int, list[tuple[int, int]]] = {}
    rows = zip(
        segments.address.tolist(), segments.total_size.tolist(), segments.stream.tolist(), segments.is_small.tolist(),
        segments.is_expandable.tolist(), segments.pool.tolist(), first.tolist(), last.tolist(), strict=True,
    )  # fmt: skip
    for address, size, stream, small, expandable, pool, low, high in rows:
        number = state.list_of(pool, small, stream)
        if expandable:
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
