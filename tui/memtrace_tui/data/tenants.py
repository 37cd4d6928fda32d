"""Who held a range of addresses: every allocation that was ever there, and how a hole came to be."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrace.history.layout import Layout
from memtrace.history.timeline import Timeline

I8 = NDArray[np.int64]


def tenants(timeline: Timeline, start: int, stop: int) -> I8:
    """Rows of the allocation table that ever lay in ``start <= address < stop``, the last first."""
    table = timeline.allocations
    rows = np.flatnonzero((table.address < stop) & (table.address + np.maximum(table.block_bytes, 1) > start))
    return rows[np.argsort(table.alloc_event[rows], kind="stable")[::-1]]


def span_of(timeline: Timeline, row: int) -> tuple[int, int]:
    """The addresses of an allocation's block: the first, and the one behind the last."""
    start = int(timeline.allocations.address[row])
    return start, start + max(int(timeline.allocations.block_bytes[row]), 1)


def freed_at(timeline: Timeline, row: int) -> int:
    """The event in which the program gave an allocation up; -1 if it never did."""
    table = timeline.allocations
    asked = int(table.free_requested_event[row])
    return asked if asked >= 0 else int(table.free_completed_event[row])


@dataclass(frozen=True, slots=True)
class Origin:
    """What made a hole: ``last`` (-1: nobody was ever there) is its last owner, gone at event ``freed``.

    ``split`` is the allocation that took the front of a larger free piece, and left the hole, where that came later
    than the last free; -1 where a free made the hole.
    """

    last: int
    freed: int
    split: int


def origin(timeline: Timeline, layout: Layout, block: int) -> Origin:
    """How the free block of a layout came to be what it is.

    The allocator takes the front of a free piece and leaves the rest; a freed piece joins with free neighbours. So the
    later of two events made the hole: the last free inside it, or the birth of the block before it.
    """
    table, event = timeline.allocations, layout.event
    start = int(layout.block_address[block])
    rows = tenants(timeline, start, start + int(layout.block_bytes[block]))
    rows = rows[table.alloc_event[rows] <= event]
    freed = table.free_completed_event[rows]
    done = (freed >= 0) & (freed <= event)
    last = int(rows[done][freed[done].argmax()]) if done.any() else -1
    when = int(freed[done].max()) if done.any() else -1
    before = block - 1
    row = int(layout.row[before]) if block > int(layout.first_block[layout.segment[block]]) else -1
    born = int(table.alloc_event[row]) if row >= 0 else -1
    return Origin(last, when, row if born > when else -1)
