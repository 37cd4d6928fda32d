"""Who released memory: an explicit ``empty_cache()``, or a malloc that could not get memory otherwise."""

from __future__ import annotations

import numpy as np

from memtrace.snapshot.model import I4, I8, U1, Action, Bool, DeviceTrace

_PART = 1 << 18


def next_anchor(action: U1, rows: I8) -> I8:
    """For each of ``rows``, which ascend, the next malloc, refusal or free request at or after it (the length of the
    trace if none).

    Events between two anchors belong to the second: the allocator's own doings are recorded before their cause.
    """
    result = np.empty(len(rows), dtype=np.int64)
    following = len(action)
    for start in reversed(range(0, len(action), _PART)):  # a few rows are no reason to hold every anchor
        part = action[start : start + _PART]
        low, high = np.searchsorted(rows, [start, start + _PART]).tolist()
        anchors = np.flatnonzero((part <= Action.FREE_REQUESTED) | (part == Action.OOM)) + start
        result[low:high] = np.append(anchors, following)[np.searchsorted(anchors, rows[low:high])]
        following = int(anchors[0]) if len(anchors) else following
    return result


def causes(trace: DeviceTrace) -> I4:
    """What tells calls apart: the recorded stack objects, or, where a file shares none (JSON), the stacks. -1 unknown.

    A free that completes at once shares its stack object with its request, so a trace with frees shows which it is.
    """
    has_pairs = False
    for start in range(0, len(trace), _PART):  # the first part tells, nearly always
        part = slice(start, start + _PART + 1)
        action, address, context = trace.action[part], trace.address[part], trace.context[part]
        pairs = np.flatnonzero(
            (action[:-1] == Action.FREE_REQUESTED)
            & (action[1:] == Action.FREE_COMPLETED)
            & (address[:-1] == address[1:])
            & (context[:-1] >= 0)
        )
        if (context[pairs] == context[pairs + 1]).any():
            return trace.context
        has_pairs |= len(pairs) > 0
    return trace.stack if has_pairs else trace.context


def explicit_releases(trace: DeviceTrace, initial_reserved_bytes: int, collects_garbage: bool) -> Bool:
    """Which segment_free and segment_unmap events an explicit ``empty_cache()`` caused.

    A release belongs to the malloc that follows if both have the same cause. Where stacks were not recorded, it belongs
    to a malloc that was refused, or that grew past all that was ever granted; a malloc that stayed below had no reason
    to flush, unless garbage is collected.
    """
    action, context = trace.action, causes(trace)
    count = len(trace)
    explicit = np.zeros(count, dtype=np.bool_)
    rows = np.flatnonzero((action >= Action.SEGMENT_ALLOC) & (action <= Action.SEGMENT_UNMAP))
    if not len(rows):
        return explicit
    kind, size = action[rows], trace.size[rows]
    anchor = next_anchor(action, rows)
    safe = np.minimum(anchor, count - 1)
    malloc = (anchor < count) & ((action[safe] == Action.ALLOC) | (action[safe] == Action.OOM))
    release = (kind == Action.SEGMENT_FREE) | (kind == Action.SEGMENT_UNMAP)
    known = (context[rows] >= 0) & (context[safe] >= 0)

    change = np.where(release, -size, size)
    reserved = initial_reserved_bytes + np.cumsum(change)
    peak = max(initial_reserved_bytes, int(reserved.max()))
    step = np.cumsum(np.diff(anchor, prepend=-1) != 0) - 1  # events with the same anchor
    before = np.full(int(step[-1]) + 1, peak, dtype=np.int64)
    releases = np.flatnonzero(release)[::-1]
    before[step[releases]] = (reserved - change)[releases]  # at the first release of each step
    grown = np.zeros(len(before), dtype=np.int64)
    np.add.at(grown, step[~release], size[~release])
    grows = grown > 0
    if not collects_garbage:
        grows &= before + grown > peak
    own = np.where(known, context[rows] == context[safe], grows[step] | (action[safe] == Action.OOM))
    explicit[rows] = release & ~(malloc & own)
    return explicit
