"""What no allocator setting can go below: bounds on reserved memory from the program alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.allocator.config import AllocatorConfig
from memtrace.allocator.rounding import SMALL_LIMIT_BYTES, round_sizes
from memtrace.allocator.whatif.program import Op, Program
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
    held = np.ones(program.initial, dtype=np.bool_)
    held[program.absent[: program.initial]] = False
    beginning = program.evidence.beginning
    owned = held.copy()
    owned[beginning.handle[beginning.blocks.pending]] = False
    return LowerBounds(
        requested_bytes=_peak(program, program.requested_bytes, owned),
        rounded_bytes=_peak(program, rounded, owned),
        placement_bytes=_packed_peak(program, rounded, held),
    )


def _changes(program: Program, size: I8, ends: tuple[Op, Op]) -> I8:
    change = np.zeros(len(program.op), dtype=np.int64)
    made = program.op == Op.MALLOC
    change[made] = size[program.handle[made]]
    gone = (program.op == ends[0]) | (program.op == ends[1])
    change[gone] = -size[program.handle[gone]]
    return change


def _peak(program: Program, size: I8, held: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    start = int(size[: program.initial][held].sum())
    curve = np.cumsum(_changes(program, size, (Op.FREE, Op.DEFER)))
    return start + max(0, int(curve.max()) if len(curve) else 0)


def _packed_peak(program: Program, size: I8, held: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    """Peak of the sum over free lists of their live bytes in whole pages."""
    _, stream = np.unique(program.stream, return_inverse=True)
    pools = len(program.evidence.history.pools)
    which = (stream * pools + program.pool) * 2 + (size <= SMALL_LIMIT_BYTES)
    lists, which = np.unique(which, return_inverse=True)
    starts = np.zeros(len(lists), dtype=np.int64)
    first = np.flatnonzero(held)
    np.add.at(starts, which[first], size[first])

    change = _changes(program, size, (Op.FREE, Op.COMPLETE))
    rows = np.flatnonzero(change)
    order = np.argsort(which[program.handle[rows]], kind="stable")
    rows = rows[order]
    of = which[program.handle[rows]]
    level = np.cumsum(change[rows])
    begins = np.searchsorted(of, np.arange(len(lists)))
    before = np.concatenate(([0], level))[begins]  # what earlier lists added up to
    level = level - before[of] + starts[of]
    pages = -(-level // _PAGE_BYTES)
    step = np.diff(pages, prepend=0)
    is_first = np.zeros(len(rows), dtype=np.bool_)
    is_first[begins[begins < len(rows)]] = True
    start_pages = -(-starts // _PAGE_BYTES)
    step = np.where(is_first, pages - start_pages[of], step)
    total = np.zeros(len(program.op), dtype=np.int64)
    total[rows] = step
    start = int(start_pages.sum())
    curve = np.cumsum(total)
    return (start + max(0, int(curve.max()) if len(curve) else 0)) * _PAGE_BYTES
