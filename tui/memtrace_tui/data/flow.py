"""The segment map's geometry: segments of a pool flow like words of a paragraph, each as long as it is large."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrace.answers.fragmentation import pool_name
from memtrace.history.layout import Layout

I8 = NDArray[np.int64]


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


@dataclass(frozen=True, slots=True)
class Flow:
    """Rows from top to bottom; ``cells[segment]`` is how many cells a segment has, ``order`` how they follow."""

    rows: tuple[Row, ...]
    cells: dict[int, int]
    order: tuple[int, ...]
    row_of: dict[int, int]
    x_of: dict[int, int]


SORTS: dict[str, str] = {
    "address": "by address", "free": "half-empty first", "share": "free share", "size": "largest first",
    "hole": "largest hole first", "pins": "smallest pin first", "age": "oldest first",
}  # fmt: skip


def groups(layout: Layout) -> list[tuple[tuple[str, int, str], list[int]]]:
    """Segments by (pool, stream, kind), the most reserved bytes first."""
    found: dict[tuple[str, int, str], list[int]] = {}
    for segment in range(len(layout)):
        kind = "expandable" if layout.is_expandable[segment] else "ordinary"
        found.setdefault((pool_name(layout, segment), int(layout.stream[segment]), kind), []).append(segment)
    return sorted(found.items(), key=lambda item: -int(layout.total_bytes[item[1]].sum()))


def sorted_segments(layout: Layout, segments: list[int], sort: str, born: I8) -> list[int]:
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


PoolKey = tuple[str, int, str]


def row_count(sizes: Sequence[int], width: int, cell: int) -> int:
    """Rows that segments of these sizes take."""
    rows, x = 1, 0
    for size in sizes:
        count = -(-size // cell)
        if x and x + count > width:
            rows, x = rows + 1, 0
        if count > width - x:
            rest = count - (width - x)
            full = (rest - 1) // width
            rows += 1 + full
            x = rest - full * width
        else:
            x += count
        x += 1
    return rows


def scales(layout: Layout, width: int, height: int) -> dict[PoolKey, int]:
    """Bytes a cell for each pool, so that this layout fills a screen of ``width`` by ``height``.

    A cell is a power of two, and small enough for half of a pool's segments to have two cells or more, even if the map
    must scroll then. Ask once, for the layout with most reserved bytes: a scale that changed while the cursor moves
    would make the map jump.
    """
    pools = {key: [int(layout.total_bytes[s]) for s in members] for key, members in groups(layout)}
    cells = {}
    for key, sizes in pools.items():
        median = sorted(sizes)[len(sizes) // 2]
        largest = max(512, 1 << ((median // 2).bit_length() - 1)) if median >= 1024 else 512
        cells[key] = largest
    space = height - 2 * len(pools) + 1

    def rows() -> int:
        return sum(row_count(sizes, width, cells[key]) for key, sizes in pools.items())

    while pools:
        # Halve the cells of the pool that has the fewest rows, as long as everything still fits.
        candidates = sorted(pools, key=lambda key: row_count(pools[key], width, cells[key]))
        for key in candidates:
            if cells[key] > 512:
                cells[key] //= 2
                if rows() <= space:
                    break
                cells[key] *= 2
        else:
            break
    return cells


def flow(
    layout: Layout, width: int, cell_bytes: dict[PoolKey, int], born: I8, sort: str = "address", zoom: int = 0
) -> Flow:
    """Lay the segments out in rows of ``width`` cells; each ``zoom`` step halves the bytes of a cell."""
    rows: list[Row] = []
    cells: dict[int, int] = {}
    order: list[int] = []
    row_of: dict[int, int] = {}
    x_of: dict[int, int] = {}
    for key, members in groups(layout):
        known = cell_bytes.get(key) or max(512, int(layout.total_bytes[members].max()) // 8 // 512 * 512)
        cell = max(512, known >> zoom if zoom >= 0 else known << -zoom)
        chosen = sorted_segments(layout, members, sort, born)
        if rows:
            rows.append(())
        rows.append(Heading(*key, tuple(chosen), cell))
        _place(layout, chosen, cell, width, rows, cells, row_of, x_of)
        order += chosen
    return Flow(tuple(rows), cells, tuple(order), row_of, x_of)


def _place(
    layout: Layout,
    segments: list[int],
    cell: int,
    width: int,
    rows: list[Row],
    cells: dict[int, int],
    row_of: dict[int, int],
    x_of: dict[int, int],
) -> None:
    row: list[Piece] = []
    x = 0
    for segment in segments:
        count = max(1, -(-int(layout.total_bytes[segment]) // cell))
        cells[segment] = count
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
