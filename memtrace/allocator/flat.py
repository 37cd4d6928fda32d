"""The hot loop: a program of allocations and frees through the free lists, with everything rare called out.

Names of allocations are *handles*, 0 … n-1. One operation is a pair of ``(number, request)``: a handle to allocate,
the bitwise complement of a handle to free, or, with ``request`` None, a rare step that ``step(number)`` carries out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

import numpy as np

from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.state import LARGE_SPLIT_BYTES, MASK, SHIFT, SMALL_SPLIT_BYTES, AllocatorState
from memtrace.snapshot.model import I4, I8, Bool

_NEVER = 1 << 200  # above every key
# free list, its number, rounded bytes, smallest key that fits, smallest key that is split, smallest key that is refused
Request = tuple[list[int], int, int, int, int, int]


def request(state: AllocatorState, number: int, size: int, config: AllocatorConfig) -> Request:
    """Everything about a rounded size and a free list that the loop would otherwise compute every time."""
    split = refuse = _NEVER
    if state.fine[number]:
        split = (size + SMALL_SPLIT_BYTES) << SHIFT
    elif config.max_split_bytes is None or size < config.max_split_bytes:
        split = (size + LARGE_SPLIT_BYTES + 1) << SHIFT
    if config.max_split_bytes is not None:
        too_large = config.max_split_bytes
        if size >= too_large:
            too_large = size + config.max_non_split_rounding_bytes
        refuse = too_large << SHIFT
    return state.lists[number], number, size, size << SHIFT, split, refuse


def tabulate(
    state: AllocatorState, config: AllocatorConfig, rounded: I8, small: Bool, pool: I4, stream: I8
) -> tuple[list[Request | None], I8]:
    """One request per distinct size and free list, and by handle its row in them; row -1 is for rare steps."""
    _, size_row = np.unique(rounded, return_inverse=True)
    streams, stream_row = np.unique(stream, return_inverse=True)
    pools = int(pool.max(initial=0)) + 1
    code = ((size_row * len(streams) + stream_row) * pools + pool) * 2 + small
    _, first, row = np.unique(code, return_index=True, return_inverse=True)
    table: list[Request | None] = []
    for i in first.tolist():
        number = state.list_of(int(pool[i]), bool(small[i]), int(stream[i]))
        table.append(request(state, number, int(rounded[i]), config))
    return [*table, None], row.astype(np.int64)


def run(
    state: AllocatorState,
    numbers: Sequence[int],
    requests: Sequence[Request | None],
    address_of: list[int],
    size_of: list[int],
    miss: Callable[[int, int, int], None],
    step: Callable[[int], None],
) -> None:
    """Run operations in order. ``miss(handle, list, size)`` serves an allocation that no free block fits.

    Addresses and block sizes go to ``address_of`` and ``size_of`` by handle.
    """
    free_at, free_end, bounds = state.free_at, state.free_end, state.bounds
    reservations, unmapped_at, expands = state.reservations, state.unmapped_at, state.expands
    for number, asked in zip(numbers, requests, strict=True):
        if asked is None:
            step(number)
        elif number >= 0:
            free, lid, size, need, split, refuse = asked
            place = bisect_left(free, need)
            if place == len(free):
                miss(number, lid, size)
                continue
            key = free[place]
            address = key & MASK
            have = key >> SHIFT
            if lid in reservations and (address + have in unmapped_at or not expands[lid]):
                found = state.search(lid, size)  # the choice depends on what is unmapped behind
                if found is None:
                    miss(number, lid, size)
                    continue
                key = found
                place = bisect_left(free, key)
                address = key & MASK
                have = key >> SHIFT
            if key >= refuse:
                miss(number, lid, size)
                continue
            del free[place]
            del free_at[address]
            address_of[number] = address
            if key < split:
                del free_end[address + have]
                size_of[number] = have
            else:
                size_of[number] = size
                rest = address + size
                free_end[address + have] = rest
                have -= size
                key = have << SHIFT | rest
                free_at[rest] = key
                insort(free, key)
        else:
            handle = ~number
            free = asked[0]
            address = address_of[handle]
            size = size_of[handle]
            end = address + size
            key = free_at.get(end, 0)
            if key and end not in bounds:
                del free_at[end]
                del free[bisect_left(free, key)]
                end += key >> SHIFT
            start = free_end.get(address)
            if start is not None and address not in bounds:
                del free_end[address]
                del free[bisect_left(free, free_at[start])]
                address = start
            key = (end - address) << SHIFT | address
            free_at[address] = key
            free_end[end] = address
            insort(free, key)


def run_complete(
    state: AllocatorState,
    numbers: Sequence[int],
    requests: Sequence[Request | None],
    address_of: list[int],
    size_of: list[int],
    miss: Callable[[int, int, int], None],
    step: Callable[[int], None],
) -> None:
    """:func:`run` through the state's own methods, which also keep GC ages. Half as fast."""
    for number, asked in zip(numbers, requests, strict=True):
        if asked is None:
            step(number)
        elif number >= 0:
            lid, size = asked[1], asked[2]
            key = state.search(lid, size)
            if key is None:
                miss(number, lid, size)
            else:
                address_of[number], size_of[number] = state.take(lid, key, size)
        else:
            handle = ~number
            state.release(asked[1], address_of[handle], size_of[handle])
