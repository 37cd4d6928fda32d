"""The hot loop: a program of allocations and frees through the free lists, with everything rare called out.

Names of allocations are *handles*, 0 … n-1. One operation is a number: a handle to allocate, the bitwise complement of
a handle to free, or n + i for the rare step i, which ``step(i)`` carries out. The compiled part runs the same loop
without the state's methods (``_compiled.pyx``), unless garbage is collected: ages are kept by the methods.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from memtrace.allocator import state as state_module
from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.state import LARGE_SPLIT_BYTES, SMALL_SPLIT_BYTES, AllocatorState
from memtrace.frozen import dataclass
from memtrace.snapshot.model import I4, I8, Bool

_NEVER_BYTES = (1 << 63) - 1  # above every block
Numbers: TypeAlias = "array[int]"  # 64 bits each


@dataclass(frozen=True, slots=True)
class Requests:
    """What every handle asks for.

    ``kinds`` has a row for each distinct rounded size and free list: number of the list, rounded bytes, and from which
    block size on a block is split and is refused. ``row_of`` is a handle's row in it.
    """

    kinds: I8
    row_of: I4

    def of(self, handle: int) -> tuple[int, int]:
        """(free list, rounded bytes) of a handle."""
        number, size, _, _ = self.kinds[self.row_of[handle]].tolist()
        return number, size


def request_kind(state: AllocatorState, number: int, size: int, config: AllocatorConfig) -> tuple[int, int, int, int]:
    """The row of :class:`Requests` for a rounded size from a free list."""
    split = refuse = _NEVER_BYTES
    if state.fine[number]:
        split = size + SMALL_SPLIT_BYTES
    elif config.max_split_bytes is None or size < config.max_split_bytes:
        split = size + LARGE_SPLIT_BYTES + 1
    if config.max_split_bytes is not None:
        refuse = config.max_split_bytes
        if size >= refuse:
            refuse = size + config.max_non_split_rounding_bytes
    return number, size, split, refuse


def distinct(values: I8) -> tuple[I8, I8, I4]:
    """As ``np.unique``: distinct values ascending, where each is met first, and for each value its place among them."""
    if state_module._COMPILED is None or values.min(initial=0) < 0:
        found, first, place = np.unique(values, return_index=True, return_inverse=True)
        return found, first, place.astype(np.int32)
    if len(values) and (values == values[0]).all():  # one stream, as nearly everywhere
        return values[:1], np.zeros(1, np.int64), np.broadcast_to(np.int32(0), len(values))
    first, met = state_module._COMPILED.distinct(np.ascontiguousarray(values))  # in the order in which they are met
    order = np.argsort(values[first])
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order))
    return values[first[order]], first[order], place[met]


def tabulate(
    state: AllocatorState, config: AllocatorConfig, rounded: I8, small: Bool, pool: I4, stream: I8
) -> Requests:
    """The requests of all handles; their free lists are made where they are missing."""
    streams, _, stream_row = distinct(stream)
    pools = int(pool.max(initial=0)) + 1
    code = rounded * 2
    if len(streams) > 1 or pools > 1:
        code = ((distinct(rounded)[2].astype(np.int64) * len(streams) + stream_row) * pools + pool) * 2
    code += small
    _, first, row = distinct(code)
    kinds = [
        request_kind(state, state.list_of(int(pool[i]), bool(small[i]), int(stream[i])), int(rounded[i]), config)
        for i in first.tolist()
    ]
    return Requests(np.array(kinds, dtype=np.int64).reshape(-1, 4), np.ascontiguousarray(row))


def run(
    state: AllocatorState,
    ops: I8,
    requests: Requests,
    address_of: Numbers,
    size_of: Numbers,
    miss: Callable[[int, int, int], None],
    step: Callable[[int], None],
) -> None:
    """Run operations in order. ``miss(handle, list, size)`` serves an allocation that no free block fits.

    Addresses and block sizes go to ``address_of`` and ``size_of`` by handle.
    """
    if state.is_compiled and type(state) is AllocatorState:  # a state of another kind does more in its methods
        state_module._COMPILED.run(state, ops, requests, address_of, size_of, miss, step)
        return
    handles = len(requests.row_of)
    rows = requests.row_of[np.where(ops >= handles, 0, np.maximum(ops, ~ops))] if handles else ops
    kinds = requests.kinds.tolist()
    for number, row in zip(ops.tolist(), rows.tolist(), strict=True):
        if number >= handles:
            step(number - handles)
        elif number >= 0:
            lid, size, _, _ = kinds[row]
            key = state.search(lid, size)
            if key is None:
                miss(number, lid, size)
            else:
                address_of[number], size_of[number] = state.take(lid, key, size)
        else:
            handle = ~number
            state.release(kinds[row][0], address_of[handle], size_of[handle])
