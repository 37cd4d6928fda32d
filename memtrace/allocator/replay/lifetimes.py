"""Which event allocated and which freed: every alloc, free_requested and free_completed gets a handle.

Handles 0 … ``initial`` - 1 are allocations that were there before the first event, by address; the others follow the
order of the ``alloc`` events. An address is used many times; only the sequence of events at it tells the uses apart.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memtrace import compiled
from memtrace.arrays import among
from memtrace.frozen import dataclass
from memtrace.snapshot.model import I4, I8, Action, Blocks, BlockState, Bool, DeviceTrace

_COMPILED = compiled.part("allocator")


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """``handle`` is per event (-1: none, or a free that belongs to nothing); the other arrays are per handle.

    ``freed_by_reuse`` marks allocations whose frees are missing from the trace: they end where their address is
    allocated again. ``last_block`` is the row of the final block that still holds the allocation, else -1.
    """

    handle: I4
    initial: int
    address: I8
    alloc_event: I4  # -1 for initial allocations
    free_requested_event: I4
    free_completed_event: I4
    freed_by_reuse: Bool
    last_block: I4
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
    handle, first, requested, completed, next_alloc, unmatched = found
    if not (action == Action.FREE_COMPLETED).any():  # recorded without completions
        completed = requested.copy()
    np.copyto(requested, completed, where=requested < 0)

    # An address that is allocated again must have been free: the frees in between are missing.
    reused = (next_alloc >= 0) & (completed < 0)
    np.copyto(requested, next_alloc, where=reused & (requested < 0))
    np.copyto(completed, next_alloc, where=reused)

    alloc_events = np.flatnonzero(action == Action.ALLOC).astype(np.int32)
    handle_address = np.concatenate([first, trace.address[alloc_events]])
    return Lifetimes(
        handle=handle,
        initial=len(first),
        address=handle_address,
        alloc_event=np.concatenate([np.full(len(first), -1, np.int32), alloc_events]),
        free_requested_event=requested,
        free_completed_event=completed,
        freed_by_reuse=reused,
        last_block=_last_blocks(handle_address, completed, blocks),
        unmatched_frees=unmatched,
    )


def match(action: NDArray[np.uint8], address: I8, active: I8) -> tuple[I4, I8, I4, I4, I4, int]:
    """Who owns which event: (handle by event, ascending addresses of what was there before, and by handle the first
    free request, the first completion and the next allocation at the address; number of frees that belong to nothing).

    Before were the addresses that are freed without having been allocated, and those ``active`` at the end that don't
    occur.
    """
    allocs = int(np.count_nonzero(action == Action.ALLOC))
    handle = np.full(len(action), -1, np.int32)
    late: list[list[int]] = [[-1] * allocs for _ in range(3)]  # first free request, first completion, next allocation
    early: dict[int, list[int]] = {}  # by address: owners from before the trace
    holders: dict[int, int] = {}  # by address: the number of the allocation there
    made, unmatched, rows = 0, 0, np.flatnonzero(action <= Action.FREE_COMPLETED)
    first_events: list[tuple[int, int]] = []  # of early owners: event, address
    for i, kind, at in zip(rows.tolist(), action[rows].tolist(), address[rows].tolist(), strict=True):
        owner = holders.get(at, -1)
        if kind == Action.ALLOC:
            if owner >= 0:
                late[2][owner] = i
            elif at in early:
                early[at][2] = i
            holders[at] = handle[i] = made
            made += 1
            continue
        ends = late[kind - 1] if owner >= 0 else early.setdefault(at, [-1, -1, -1])
        place = owner if owner >= 0 else kind - 1
        if ends[place] >= 0:
            unmatched += 1
            continue
        ends[place] = i
        if owner >= 0:
            handle[i] = owner
        else:
            first_events.append((i, at))
    first = np.sort(np.concatenate([np.array(list(early), np.int64), active[~among(active, address[rows])]]))
    handle[handle >= 0] += len(first)
    for i, at in first_events:
        handle[i] = np.searchsorted(first, at)
    before = np.full((3, len(first)), -1, np.int32)
    for at, ends in early.items():
        before[:, np.searchsorted(first, at)] = ends
    requested, completed, following = np.concatenate((before, np.array(late, np.int32).reshape(3, -1)), axis=1)
    return handle, first, requested, completed, following, unmatched


def _last_blocks(address: I8, completed: I4, blocks: Blocks) -> I4:
    """Row of the active final block at the address of each handle that was never freed."""
    result = np.full(len(address), -1, dtype=np.int32)
    active = np.flatnonzero(blocks.state != BlockState.INACTIVE)
    alive = np.flatnonzero(completed < 0)
    if not len(active) or not len(alive):
        return result
    place = np.searchsorted(blocks.address[active], address[alive])
    place = np.minimum(place, len(active) - 1)
    match = blocks.address[active][place] == address[alive]
    result[alive[match]] = active[place[match]]
    return result
