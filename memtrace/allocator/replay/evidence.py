"""What a trace says before anything is simulated: lifetimes, segments, the beginning, and columns by allocation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.replay.flushes import explicit_releases
from memtrace.allocator.replay.initial import Beginning, find_beginning
from memtrace.allocator.replay.lifetimes import Lifetimes, link
from memtrace.allocator.replay.segments import SegmentHistory, trace_back
from memtrace.allocator.rounding import SMALL_LIMIT_BYTES, round_sizes
from memtrace.arrays import Number, narrowed
from memtrace.frozen import dataclass
from memtrace.snapshot.model import DEFAULT_POOL, I4, I8, Action, Bool, Device, PoolId


@dataclass(frozen=True, slots=True)
class TraceEvidence:
    """What a trace says before any simulation: lifetimes, segments, the beginning, and columns by handle (bytes).

    ``explicit`` is per event: releases that an ``empty_cache()`` caused.
    """

    device: Device
    config: AllocatorConfig
    life: Lifetimes
    history: SegmentHistory
    beginning: Beginning
    requested: I8
    small: Bool
    pool: I4
    stream: I8  # raw handles
    explicit: Bool


NPU_PADDING_BYTES = 32  # torch_npu adds this to every request before rounding it


def with_padding(device: Device, config: AllocatorConfig, is_npu: bool = False) -> AllocatorConfig:
    """The settings with the padding of torch_npu, if block sizes show it: in the small pool, where blocks have no
    unsplit tails, some are what the padded request rounds to, and no block at all is what the bare one does.

    Where sizes show neither, it is taken on if the file names that back end.
    """
    blocks = device.blocks
    if config.padding_bytes:
        return config
    rows = np.flatnonzero(blocks.requested_size > 0)
    padded_config = replace(config, padding_bytes=NPU_PADDING_BYTES)
    bare = round_sizes(blocks.requested_size[rows], config)
    padded = round_sizes(blocks.requested_size[rows], padded_config)
    telling = bare != padded
    size = blocks.size[rows]
    if (telling & (size == bare)).any():
        return config
    small = device.segments.is_small[blocks.segment[rows]]
    return padded_config if is_npu or (telling & small & (size == padded)).any() else config


def gather(device: Device, config: AllocatorConfig, is_npu: bool = False) -> TraceEvidence:
    """Read lifetimes, segments and the beginning out of one device's trace and final state."""
    trace, blocks = device.trace, device.blocks
    config = with_padding(device, config, is_npu)
    life = link(trace, blocks)
    pools = tuple(dict.fromkeys((DEFAULT_POOL, *trace.pools, *device.segments.pools)))
    history = trace_back(device, config, pools)

    requested = np.zeros(life.count, dtype=np.int64)
    requested[life.initial :] = trace.size[life.alloc_event[life.initial :]]
    freed = life.free_requested_event[: life.initial]
    requested[: life.initial] = np.where(freed >= 0, trace.size[freed] if len(trace) else 0, 0)
    last = life.last_block[: life.initial]
    kept = (last >= 0) & (life.free_completed_event[: life.initial] < 0)
    requested[: life.initial][kept] = blocks.requested_size[last[kept]]
    rounded = round_sizes(requested, config)
    beginning = find_beginning(device, life, history, rounded, config)

    small = rounded <= SMALL_LIMIT_BYTES
    streams = np.array(trace.streams or (0,), dtype=np.int64)
    stream = _joined(beginning.stream, _meant(trace.stream, streams, life.alloc_event[life.initial :]))
    pool = _joined(beginning.pool, _alloc_pools(device, life, history, pools))
    small[: life.initial] = beginning.is_small
    reserved = int(history.initial.total_size.sum())
    explicit = explicit_releases(trace, reserved, config.gc_threshold > 0)
    return TraceEvidence(device, config, life, history, beginning, requested, small, pool, stream, explicit)


def _meant(column: I4, meanings: NDArray[Number], events: I4) -> NDArray[Number]:
    """What a column's numbers stand for at the events; in the room of one value where the column is."""
    if len(column) and column.strides == (0,):
        return np.broadcast_to(meanings[column[0]], len(events))
    return meanings[column[events]]


def _joined(first: NDArray[Number], others: NDArray[Number]) -> NDArray[Number]:
    """Both, in the room of one value where all are alike."""
    if len(others) and others.strides == (0,) and (first == others[0]).all():
        return np.broadcast_to(others[0], len(first) + len(others))
    return narrowed(np.concatenate([first, others]))


def _alloc_pools(device: Device, life: Lifetimes, history: SegmentHistory, pools: tuple[PoolId, ...]) -> I4:
    """Pool index of every alloc: as recorded, else by the private segments that hold it, else the default pool."""
    trace = device.trace
    events = life.alloc_event[life.initial :]
    number = {pool: i for i, pool in enumerate(pools)}
    pool = _meant(trace.pool, np.array([*(number[pool] for pool in trace.pools), 0], dtype=np.int32), events)
    final = device.segments
    private = np.flatnonzero(final.pool != 0) if len(final.pools) > 1 else np.zeros(0, np.int64)
    said = trace.pool[events] if len(private) else trace.pool[:0]
    if (said >= 0).all():
        return pool
    # Private segments that are still there at the end hold every allocation since they were made.
    address, end = final.address[private], final.address[private] + final.total_size[private]
    made = np.full(len(private), -1, dtype=np.int64)
    for event in history.events.tolist():
        if trace.action[event] in (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP):
            place = int(np.searchsorted(address, trace.address[event], side="right")) - 1
            is_first = trace.action[event] == Action.SEGMENT_ALLOC or made[place] < 0
            if place >= 0 and trace.address[event] < end[place] and is_first:
                made[place] = event
    rows = np.searchsorted(address, trace.address[events], side="right") - 1
    safe = np.maximum(rows, 0)
    within = (rows >= 0) & (trace.address[events] < end[safe]) & (events > made[safe]) & (said < 0)
    final_index = np.array([number[pool] for pool in final.pools], dtype=np.int32)
    return np.where(within, final_index[final.pool[private][safe]], pool).astype(np.int32)
