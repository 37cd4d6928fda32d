"""Who released memory: an explicit ``empty_cache()``, or a malloc that could not get memory otherwise."""

from __future__ import annotations

import numpy as np

from memtrace.snapshot.model import I4, I8, U1, Action, Bool, DeviceTrace


def next_anchor(action: U1) -> I8:
    """For every event the next malloc, refusal or free request at or after it (the length of the trace if none).

    Events between two anchors belong to the second: the allocator's own doings are recorded before their cause.
    """
    count = len(action)
    anchors = (action == Action.ALLOC) | (action == Action.OOM) | (action == Action.FREE_REQUESTED)
    place: I8 = np.where(anchors, np.arange(count), count)
    return np.minimum.accumulate(place[::-1])[::-1] if count else place


def causes(trace: DeviceTrace) -> I4:
    """What tells calls apart: the recorded stack objects, or, where a file shares none (JSON), the stacks. -1 unknown.

    A free that completes at once shares its stack object with its request, so a trace with frees shows which it is.
    """
    action = trace.action
    pairs = np.flatnonzero(
        (action[:-1] == Action.FREE_REQUESTED)
        & (action[1:] == Action.FREE_COMPLETED)
        & (trace.address[:-1] == trace.address[1:])
        & (trace.context[:-1] >= 0)
    )
    shared = trace.context[pairs] == trace.context[pairs + 1]
    return trace.stack if len(pairs) and not shared.any() else trace.context


def explicit_releases(trace: DeviceTrace, initial_reserved_bytes: int, collects_garbage: bool) -> Bool:
    """Which segment_free and segment_unmap events an explicit ``empty_cache()`` caused.

    A release belongs to the malloc that follows if both have the same cause. Where stacks were not recorded, it belongs
    to a malloc that was refused, or that grew past all that was ever granted; a malloc that stayed below had no reason
    to flush, unless garbage is collected.
    """
    action, context, size = trace.action, causes(trace), trace.size
    count = len(trace)
    if not count:
        return np.zeros(0, dtype=np.bool_)
    anchor = next_anchor(action)
    safe = np.minimum(anchor, count - 1)
    malloc = (anchor < count) & ((action[safe] == Action.ALLOC) | (action[safe] == Action.OOM))
    release = (action == Action.SEGMENT_FREE) | (action == Action.SEGMENT_UNMAP)
    growth = (action == Action.SEGMENT_ALLOC) | (action == Action.SEGMENT_MAP)
    known = (context >= 0) & (context[safe] >= 0)

    change = np.where(growth, size, np.where(release, -size, 0))
    reserved = initial_reserved_bytes + np.cumsum(change)
    peak = max(initial_reserved_bytes, int(reserved.max()))
    before = np.full(count + 1, peak, dtype=np.int64)
    rows = np.flatnonzero(release)[::-1]
    before[anchor[rows]] = (reserved - change)[rows]  # at the first release of each step
    grown = np.zeros(count + 1, dtype=np.int64)
    np.add.at(grown, anchor[growth], size[growth])
    grows = grown > 0
    if not collects_garbage:
        grows &= before + grown > peak
    own = np.where(known, context == context[safe], grows[anchor] | (action[safe] == Action.OOM))
    return np.asarray(release & ~(malloc & own), dtype=np.bool_)
