"""What no allocator setting can go below, and what a packing that knows the future needs: from the program alone."""

from __future__ import annotations

import numpy as np

from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.rounding import SMALL_LIMIT_BYTES, round_sizes
from memtrace.allocator.whatif.program import Op, Program
from memtrace.frozen import dataclass
from memtrace.snapshot.model import I8

_PAGE_BYTES = 2 << 20  # the smallest unit that the allocator gets from the driver


@dataclass(frozen=True, slots=True)
class LowerBounds:
    """Bounds on peak reserved memory in bytes, for the program as recorded.

    ``requested_bytes``: peak of what the program asked for and held; no allocator can reserve less.
    ``rounded_bytes``: the same with every request rounded to blocks; peak allocated memory without unsplit tails.
    ``placement_bytes``: peak of live and pending memory if every free list (pool, stream, small or large) could pack
    its blocks without any gap at every moment, in pages of 2 MiB that lists never share. The best placement of an
    allocator with these pools can't be below it; whether any placement reaches it is not said.
    """

    requested_bytes: int
    rounded_bytes: int
    placement_bytes: int


def lower_bounds(program: Program, config: AllocatorConfig) -> LowerBounds:
    """Bounds for ``program`` with the rounding of ``config``."""
    rounded = round_sizes(program.requested_bytes, config)
    owned = np.ones(len(rounded), dtype=np.bool_)
    owned[: program.initial] = ~program.evidence.beginning.pending
    born, died = _lives(program, Op.DEFER)
    return LowerBounds(
        requested_bytes=_highest(program.requested_bytes * owned, born, died),
        rounded_bytes=_highest(rounded * owned, born, died),
        placement_bytes=_packed_peak(program, rounded),
    )


@dataclass(frozen=True, slots=True)
class Packing:
    """The certified interval of the best possible placement in one address space: no placement needs less than
    ``at_least_bytes``, and one that needs ``found_bytes`` was found."""

    at_least_bytes: int
    found_bytes: int


_MOST_PACKED = 8_000  # allocations placed one by one, unless any number is wanted: ten thousand take a second or two
_SLAB_BYTES = 64 << 10  # smaller ones are taken together, by what is live of them at most
_BUCKETS, _LONG = 4096, 64  # of time, and how many of them something long-lived covers


def pack(program: Program, config: AllocatorConfig, most: int | None = _MOST_PACKED) -> Packing | None:
    """Place every block with its lifetime known: the largest first, each at the lowest address that is free as long as
    it lives. Blocks below 64 KiB lie apart, as tightly as they can. None for programs with more than ``most`` others.

    Source: greedy by size, Y. Pisarchyk and J. Lee, Efficient memory management for deep neural net inference, 2020.
    """
    size = round_sizes(program.requested_bytes, config)
    born, died = _lives(program, Op.COMPLETE)
    live = died > born
    small = live & (size < _SLAB_BYTES)
    rows = np.flatnonzero(live & ~small)
    if most is not None and len(rows) > most:
        return None
    rows = rows[np.lexsort((died[rows] == len(program.op), born[rows], -size[rows]))]
    lowest, apart = _highest(size * live, born, died), _highest(size * small, born, died)
    top = _place_by_size(size[rows], born[rows], died[rows])
    found = -(-(top + apart) // _PAGE_BYTES) * _PAGE_BYTES
    return Packing(lowest, max(found, lowest))


def _place_by_size(size: I8, start: I8, end: I8) -> int:
    """The highest address of a greedy placement in the given order."""
    low, high = np.zeros(len(size), dtype=np.int64), np.zeros(len(size), dtype=np.int64)
    width = max(int(end.max(initial=1)) // _BUCKETS, 1)
    first, last = (start // width).tolist(), ((end - 1) // width).tolist()
    shorts: dict[int, list[int]] = {}  # bucket of time -> what lives in it
    longs, count = np.zeros(len(size), dtype=np.int64), 0
    for i, need in enumerate(size.tolist()):
        is_long = last[i] - first[i] > _LONG
        if is_long:
            others = np.arange(i)
        else:
            near = {row for bucket in range(first[i], last[i] + 1) for row in shorts.get(bucket, ())}
            others = np.concatenate((np.fromiter(near, np.int64, len(near)), longs[:count]))
        others = others[(start[others] < end[i]) & (end[others] > start[i])]
        bottoms = low[others]
        order = bottoms.argsort()
        tops = np.maximum.accumulate(high[others[order]])
        gaps = bottoms[order[1:]] - tops[:-1]
        if not len(others) or bottoms[order[0]] >= need:
            place = 0
        else:
            fitting = gaps >= need
            place = int(tops[fitting.argmax()]) if fitting.any() else int(tops[-1])
        low[i], high[i] = place, place + need
        if is_long:
            longs[count] = i
            count += 1
        else:
            for bucket in range(first[i], last[i] + 1):
                shorts.setdefault(bucket, []).append(i)
    return int(high.max(initial=0))


def _lives(program: Program, ends: Op) -> tuple[I8, I8]:
    """Operation at which each handle is made (-1: before the first) and at which it is freed or ``ends``."""
    count = len(program.op)
    born = np.full(len(program.requested_bytes), count, dtype=np.int64)
    born[: program.initial] = np.where(program.absent[: program.initial], count, -1)
    made = np.flatnonzero(program.op == Op.MALLOC)
    born[program.handle[made]] = made
    died = np.full(len(born), count, dtype=np.int64)
    gone = np.flatnonzero((program.op == Op.FREE) | (program.op == ends))
    died[program.handle[gone]] = gone
    return born, died


def _highest(size: I8, born: I8, died: I8) -> int:
    """Most bytes that are live at once."""
    change = np.zeros(int(died.max(initial=0)) + 2, dtype=np.int64)
    np.add.at(change, np.minimum(born + 1, len(change) - 1), size)
    np.subtract.at(change, np.minimum(died + 1, len(change) - 1), size)
    return max(int(np.cumsum(change).max(initial=0)), 0)


def _packed_peak(program: Program, size: I8) -> int:
    """Peak of the sum over free lists of their live bytes in whole pages."""
    born, died = _lives(program, Op.COMPLETE)
    _, stream = np.unique(program.stream, return_inverse=True)
    pools = len(program.evidence.history.pools)
    _, which = np.unique((stream * pools + program.pool) * 2 + (size <= SMALL_LIMIT_BYTES), return_inverse=True)
    when, change, which = np.concatenate((born, died)) + 1, np.concatenate((size, -size)), np.tile(which, 2)
    order = np.lexsort((when, which))
    when, which = when[order], which[order]
    level = np.cumsum(change[order])  # of one list after the other: each ends at 0
    pages = -(-level // _PAGE_BYTES)
    total = np.zeros(len(program.op) + 2, dtype=np.int64)
    np.add.at(total, when, np.diff(pages, prepend=0))
    return int(np.cumsum(total).max(initial=0)) * _PAGE_BYTES
