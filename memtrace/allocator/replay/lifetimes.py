"""Which event allocated and which freed: every alloc, free_requested and free_completed gets a handle.

Handles 0 … ``initial`` - 1 are allocations that were there before the first event, the others follow the order of the
``alloc`` events. An address is used many times; only the sequence of events at it tells the uses apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memtrace import compiled
from memtrace.snapshot.model import I8, Action, Blocks, BlockState, Bool, DeviceTrace

_COMPILED = compiled.part("allocator")


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """``handle`` is per event (-1: none, or a free that belongs to nothing); the other arrays are per handle.

    ``freed_by_reuse`` marks allocations whose frees are missing from the trace: they end where their address is
    allocated again. ``last_block`` is the row of the final block that still holds the allocation, else -1.
    """

    handle: I8
    initial: int
    address: I8
    alloc_event: I8  # -1 for initial allocations
    free_requested_event: I8
    free_completed_event: I8
    freed_by_reuse: Bool
    last_block: I8
    unmatched_frees: int

    @property
    def count(self) -> int:
        """Number of handles."""
        return len(self.address)


def link(trace: DeviceTrace, blocks: Blocks) -> Lifetimes:
    """Match frees to allocations by address and order."""
    action = trace.action
    active = np.flatnonzero(blocks.state != BlockState.INACTIVE)
    address = np.ascontiguousarray(trace.address)
    found = (_COMPILED.match if _COMPILED else match)(np.ascontiguousarray(action), address, blocks.address[active])
    handle, initial_freed, touched, requested, completed, next_alloc, unmatched = found
    if not (action == Action.FREE_COMPLETED).any():  # recorded without completions
        completed = requested.copy()
    requested = np.where(requested < 0, completed, requested)

    # An address that is allocated again must have been free: the frees in between are missing.
    reused = (next_alloc >= 0) & (completed < 0)
    requested = np.where(reused & (requested < 0), next_alloc, requested)
    completed = np.where(reused, next_alloc, completed)

    alloc_events = np.flatnonzero(action == Action.ALLOC)
    untouched = active[~touched]
    initial = len(initial_freed) + len(untouched)
    handle_address = np.concatenate([initial_freed, blocks.address[untouched], trace.address[alloc_events]])
    last_block = _last_blocks(handle_address, completed, blocks)
    last_block[len(initial_freed) : initial] = untouched
    return Lifetimes(
        handle=handle,
        initial=initial,
        address=handle_address,
        alloc_event=np.concatenate([np.full(initial, -1, np.int64), alloc_events]),
        free_requested_event=requested,
        free_completed_event=completed,
        freed_by_reuse=reused,
        last_block=last_block,
        unmatched_frees=unmatched,
    )


def match(action: NDArray[np.uint8], address: I8, active: I8) -> tuple[I8, I8, Bool, I8, I8, I8, int]:
    """Who owns which event: (handle by event, addresses of what was freed but not allocated here, ascending, which of
    the ``active`` final addresses occur, and by handle the first free request, the first completion and the next
    allocation at the address; number of frees that belong to nothing).

    Handles are those of the addresses, of the active blocks that don't occur, and of the allocations, in this order.
    """
    index = np.int32 if len(action) < 1 << 31 else np.int64  # half the memory, on all but absurd traces
    order, sorted_address = _by_address(action, address, index)
    kind = action[order]
    n = len(order)
    is_alloc = kind == Action.ALLOC
    starts = np.ones(n, dtype=np.bool_)
    starts[1:] = sorted_address[1:] != sorted_address[:-1]
    distinct = sorted_address[starts]
    del sorted_address
    position: NDArray[Any] = np.arange(n, dtype=index)
    group_start: NDArray[Any] = np.maximum.accumulate(np.where(starts, position, index(0))) if n else position
    last_alloc: NDArray[Any] = np.maximum.accumulate(np.where(is_alloc, position, index(-1))) if n else position
    del position
    before = last_alloc < group_start  # frees of what was there before the trace: one allocation an address
    del group_start

    alloc_events = np.flatnonzero(action == Action.ALLOC)
    initial_start = starts & before
    initial_freed = distinct[before[starts]]
    touched = np.isin(active, distinct)
    del distinct
    initial = len(initial_freed) + int(np.count_nonzero(~touched))
    total = initial + len(alloc_events)

    ordinal = np.zeros(len(action), dtype=index)
    ordinal[alloc_events] = np.arange(initial, total, dtype=index)
    owner = ordinal[order[np.maximum(last_alloc, 0)]]
    del ordinal, last_alloc
    number: NDArray[Any] = np.cumsum(initial_start, dtype=index)
    number -= 1
    owner[before] = number[before]
    requested, completed = np.full(total, -1, np.int64), np.full(total, -1, np.int64)
    handle = np.full(len(action), -1, dtype=np.int64)
    handle[order] = owner
    unmatched = 0
    for code, target in ((Action.FREE_REQUESTED, requested), (Action.FREE_COMPLETED, completed)):
        rows = np.flatnonzero(kind == code)[::-1]
        target[owner[rows]] = order[rows]  # the earliest wins; later ones free nothing
        extra = order[rows][target[owner[rows]] != order[rows]]
        handle[extra] = -1
        unmatched += len(extra)
    next_alloc = np.full(total, -1, dtype=np.int64)
    again = np.flatnonzero(is_alloc & ~starts)
    next_alloc[owner[again - 1]] = order[again]
    return handle, initial_freed, touched, requested, completed, next_alloc, unmatched


def _by_address(action: NDArray[np.uint8], address: I8, index: type[np.int32 | np.int64]) -> tuple[NDArray[Any], I8]:
    """Events of allocations by address, in order at each: (event indices, addresses)."""
    events = np.flatnonzero(action <= Action.FREE_COMPLETED)
    address = address[events]
    order = np.argsort(address, kind="stable")
    return events[order].astype(index), address[order]


def _last_blocks(address: I8, completed: I8, blocks: Blocks) -> I8:
    """Row of the active final block at the address of each handle that was never freed."""
    result = np.full(len(address), -1, dtype=np.int64)
    active = np.flatnonzero(blocks.state != BlockState.INACTIVE)
    alive = np.flatnonzero(completed < 0)
    if not len(active) or not len(alive):
        return result
    place = np.searchsorted(blocks.address[active], address[alive])
    place = np.minimum(place, len(active) - 1)
    match = blocks.address[active][place] == address[alive]
    result[alive[match]] = active[place[match]]
    return result
