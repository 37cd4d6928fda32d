"""Damage to recorded traces: the kinds of :func:`damage` by number, ``KINDS`` of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memtrace.snapshot.intern import StackInterner
from memtrace.snapshot.model import Device, DeviceTrace
from memtrace.snapshot.segment_columns import read_segments

KINDS = 12
COLUMNS = ["action", "address", "size", "stream", "stack", "context", "pool", "user_metadata", "compile_context"]


def rows_of(trace: DeviceTrace, rows: np.ndarray) -> DeviceTrace:
    times = None if trace.time_us is None else trace.time_us[rows]
    return replace(trace, time_us=times, **{name: getattr(trace, name)[rows] for name in COLUMNS})


def damage(dev: Device, kind: int, rng: np.random.Generator) -> Device:
    """One kind of damage at random places."""
    trace, count = dev.trace, len(dev.trace)
    if not count:
        return dev
    spots = rng.integers(0, count, 20)
    if kind == 0:
        keep = np.sort(rng.choice(count, int(count * rng.random()), replace=False))
        return replace(dev, trace=rows_of(trace, keep))
    if kind == 1:
        return replace(dev, trace=rows_of(trace, np.flatnonzero(trace.action != rng.integers(0, 9))))
    if kind == 2:
        return replace(dev, trace=rows_of(trace, np.arange(rng.integers(0, count), count)))
    if kind == 3:
        return replace(dev, trace=rows_of(trace, rng.permutation(count)))
    if kind == 4:
        size = trace.size.copy()
        size[spots[:5]] = [0, 1 << 60, 1, 513, 1 << 59]
        return replace(dev, trace=replace(trace, size=size))
    if kind == 5:
        address = trace.address.copy()
        address[spots] = np.abs(address[rng.integers(0, count, 20)] + rng.integers(-5000, 5000, 20))
        return replace(dev, trace=replace(trace, address=address))
    if kind == 6:
        action = trace.action.copy()
        action[spots] = rng.integers(0, 12, 20)
        return replace(dev, trace=replace(trace, action=action))
    if kind == 7:
        segments, blocks = read_segments([], StackInterner(), print)
        return replace(dev, segments=segments, blocks=blocks)
    if kind == 8:
        none = np.full(count, -1, dtype=np.int32)
        return replace(dev, trace=replace(trace, context=none, stack=none))
    if kind == 9:
        stream = trace.stream.copy()
        stream[spots] = rng.integers(0, len(trace.streams), 20)
        return replace(dev, trace=replace(trace, stream=stream))
    if kind == 10:
        return replace(dev, trace=rows_of(trace, np.sort(np.append(np.arange(count), spots))))
    size = dev.blocks.size.copy()
    if len(size):
        size[rng.integers(0, len(size))] += 512
    return replace(dev, blocks=replace(dev.blocks, size=size))
