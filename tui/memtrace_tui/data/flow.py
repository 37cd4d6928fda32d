"""The segment map: segments of a pool flow like words of a paragraph, each as long as it is large; and its cells: how
full each is, with what, and which block it stands for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from memtrace.answers.fragmentation import pool_name
from memtrace.history.layout import Layout, State
from memtrace.snapshot.model import I4, I8, U1


@dataclass(frozen=True, slots=True)
class Piece:
    """Cells ``first:first + count`` of a segment, at column ``x`` of a row."""

    segment: int
    first: int
    count: int
    x: int


@dataclass(frozen=True, slots=True)
class Heading:
    """The title row of a pool of one stream."""

    pool: str
    stream: int
    kind: str
    segments: tuple[int, ...]
    cell_bytes: int


Row = Heading | tuple[Piece, ...]
PoolKey = tuple[str, int, str]  # pool, stream, kind


@dataclass(frozen=True, slots=True)
class Flow:
    """Rows from top to bottom; ``cells[segment]`` is how many cells a segment has, in the order of the rows."""

    rows: tuple[Row, ...]
    cells: dict[int, int]
    row_of: dict[int, int]
    x_of: dict[int, int]


NO_FLOW = Flow((), {}, {}, {})
SORTS: dict[str, str] = {
    "address": "by address", "free": "half-empty first", "share": "free share", "size": "largest first",
    "hole": "largest hole first", "pins": "smallest pin first", "age": "oldest first",
}  # fmt: skip


@lru_cache(4)
def groups(layout: Layout) -> list[tuple[PoolKey, list[int]]]:
    """Segments by pool, stream and kind, the most reserved bytes first."""
    found: dict[PoolKey, list[int]] = {}
    for segment in range(len(layout)):
        kind = "expandable" if layout.is_expandable[segment] else "ordinary"
        found.setdefault((pool_name(layout, segment), int(layout.stream[segment]), kind), []).append(segment)
    return sorted(found.items(), key=lambda item: -int(layout.total_bytes[item[1]].sum()))


def sorted_segments(layout: Layout, segments: list[int], sort: str, born: I4) -> list[int]:
    """Segments in one of ``SORTS``; wherever free bytes count, those that something pins come before the empty ones.

    ``born`` has the event in which each block was allocated.
    """
    if sort not in SORTS or sort == "address":
        return segments
    used, free = layout.used_bytes() + layout.pending_bytes(), layout.free_bytes()
    if sort == "age":
        key = np.full(len(layout), 1 << 62)
        live = layout.row >= 0
        np.minimum.at(key, layout.segment[live], born[live])
    elif sort == "pins":
        key = np.where(free > 0, used, 1 << 61)
    else:
        share = free * 1_000_000 // np.maximum(layout.total_bytes, 1)
        key = -{"free": free, "share": share, "size": layout.total_bytes, "hole": layout.largest_free_bytes()}[sort]
    empty = (used == 0) & (sort in ("free", "share", "pins"))
    return sorted(segments, key=lambda segment: (bool(empty[segment]), int(key[segment])))


def scales(layout: Layout, width: int, height: int) -> dict[PoolKey, int]:
    """Bytes a cell for each pool, so that this layout fills a screen of ``width`` by ``height``.

    A cell is a power of two, and small enough for half of a pool's segments to have two cells or more, even if the map
    must scroll then. Ask once, for the layout with most reserved bytes: a scale that changed while the cursor moves
    would make the map jump.
    """
    cells = {}
    for key, members in groups(layout):
        median = int(np.sort(layout.total_bytes[members])[len(members) // 2])
        cells[key] = 512 if median < 1024 else max(512, 1 << ((median // 2).bit_length() - 1))
    rows = _rows(layout, width, cells)
    while cells:
        # Halve the cells of the pool that has the fewest rows, as long as everything still fits.
        for key in sorted((key for key in cells if cells[key] > 512), key=rows.__getitem__):
            finer = {**cells, key: cells[key] // 2}
            more = _rows(layout, width, finer)
            if more.total() <= height - 2 * len(cells) + 1:
                cells, rows = finer, more
                break
        else:
            break
    return cells


def _rows(layout: Layout, width: int, cells: dict[PoolKey, int]) -> Counter[PoolKey]:
    """Rows that the segments of each pool take."""
    rows: Counter[PoolKey] = Counter()
    for row in flow(layout, width, cells, np.zeros(0, np.int64)).rows:
        if isinstance(row, Heading):
            key = row.pool, row.stream, row.kind
        elif row:
            rows[key] += 1
    return rows


def flow(
    layout: Layout, width: int, cell_bytes: dict[PoolKey, int], born: I4, sort: str = "address", zoom: int = 0
) -> Flow:
    """Lay the segments out in rows of ``width`` cells; each ``zoom`` step halves the bytes of a cell."""
    rows: list[Row] = []
    cells: dict[int, int] = {}
    row_of: dict[int, int] = {}
    x_of: dict[int, int] = {}
    for key, members in groups(layout):
        known = cell_bytes.get(key) or max(512, int(layout.total_bytes[members].max()) // 8 // 512 * 512)
        cell = max(512, known >> zoom if zoom >= 0 else known << -zoom)
        chosen = sorted_segments(layout, members, sort, born)
        if rows:
            rows.append(())
        rows.append(Heading(*key, tuple(chosen), cell))
        row: list[Piece] = []
        x = 0
        for segment in chosen:
            count = cells[segment] = max(1, -(-int(layout.total_bytes[segment]) // cell))
            if x and x + count > width:
                rows.append(tuple(row))
                row, x = [], 0
            row_of[segment], x_of[segment] = len(rows), x
            first = 0
            while count - first > width - x:  # longer than a row: whole rows of it
                rows.append((*row, Piece(segment, first, width - x, x)))
                first += width - x
                row, x = [], 0
            if count > first:
                row.append(Piece(segment, first, count - first, x))
                x += count - first + 1
        if row:
            rows.append(tuple(row))
    return Flow(tuple(rows), cells, row_of, x_of)


@dataclass(frozen=True, slots=True)
class MapCells:
    """One entry a cell. ``fill``: eighths in use (0 free, 8 full; at least 1 where anything lives, at most 7 where
    anything is free). ``code``: the block code with most bytes in it (of the live ones, if any). ``block``: the block
    with most bytes in it, live ones first. ``odd``: parity of that block among its segment's blocks, for shading.
    """

    fill: U1
    code: U1
    block: I8
    odd: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.fill)


def range_cells(layout: Layout, codes: U1, segment: int, start: int, stop: int, count: int) -> MapCells:
    """Cut the addresses ``start:stop`` of one segment into ``count`` equal cells; ``codes`` has one entry a block."""
    number = np.arange(int(layout.first_block[segment]), int(layout.first_block[segment + 1]))
    low = layout.block_address[number] - start
    return _cut(layout, codes, number, low, low + layout.block_bytes[number], (stop - start) / count, count)


def packed_cells(
    layout: Layout, codes: U1, segments: Sequence[int], counts: Sequence[int], cell_bytes: int
) -> MapCells:
    """The cells of several segments one after another, ``counts[i]`` cells of ``cell_bytes`` for segment ``i``.

    What a segment lacks to fill its last cell counts neither as free nor as used.
    """
    chosen = np.array(segments, dtype=np.int64)
    base = np.zeros(len(layout), dtype=np.int64)
    base[chosen] = np.cumsum([0, *counts[:-1]])
    member = np.zeros(len(layout), dtype=np.bool_)
    member[chosen] = True
    number = np.flatnonzero(member[layout.segment])
    owner = layout.segment[number]
    low = base[owner] * cell_bytes + layout.block_address[number] - layout.address[owner]
    return _cut(layout, codes, number, low, low + layout.block_bytes[number], float(cell_bytes), int(sum(counts)))


def _cut(layout: Layout, codes: U1, number: I8, low: I8, high: I8, width: float, count: int) -> MapCells:
    """Blocks ``number`` lie at ``low:high`` of a line that is cut into ``count`` cells of ``width`` bytes."""
    inside = np.flatnonzero((high > 0) & (low < width * count))
    number = number[inside]
    low, high = np.maximum(low[inside], 0), np.minimum(high[inside], width * count)
    used = layout.block_state[number] != State.FREE
    first = np.minimum((low / width).astype(np.int64), count - 1)
    last = np.minimum(np.maximum(np.ceil(high / width).astype(np.int64) - 1, first), count - 1)
    pieces = last - first + 1
    owner = np.repeat(np.arange(len(number)), pieces)
    cell = first[owner] + np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    overlap = np.minimum(high[owner], (cell + 1) * width) - np.maximum(low[owner], cell * width)
    overlap = np.maximum(overlap, 0.0)

    in_use = used[owner]
    use = np.bincount(cell[in_use], weights=overlap[in_use], minlength=count)
    room = np.bincount(cell, weights=overlap, minlength=count)
    share = np.divide(use, room, out=np.zeros(count), where=room > 0)
    fill = np.rint(share * 8).astype(np.uint8)
    fill[(use > 0) & (fill == 0)] = 1
    fill[(use < room * (1 - 1e-9)) & (fill == 8)] = 7

    # Most bytes by code, then most bytes by block; live blocks outweigh free ones wherever there are any.
    weight = np.where(in_use, overlap + width, overlap)
    kinds = int(codes.max(initial=0)) + 1
    place, light = cell * kinds + codes[number][owner], np.where(in_use, overlap, overlap * 1e-9)
    sums = np.bincount(place, weights=light, minlength=count * kinds)
    code = sums.reshape(count, kinds).argmax(axis=1).astype(np.uint8)
    block = np.full(count, -1, dtype=np.int64)
    order = np.argsort(weight, kind="stable")
    block[cell[order]] = number[owner[order]]
    return MapCells(fill, code, block, (block & 1).astype(np.bool_))
