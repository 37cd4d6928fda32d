"""The segment map's geometry: segments of a pool flow like words of a paragraph, each as long as it is large."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrace.fragmentation import pool_name
from memtrace.layout import Layout

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


SORTS = ("address", "free", "size", "hole")


def groups(layout: Layout) -> list[tuple[tuple[str, int, str], list[int]]]:
    """Segments by (pool, stream, kind), the most reserved bytes first."""
    found: dict[tuple[str, int, str], list[int]] = {}
    for segment in range(len(layout)):
        kind = "expandable" if layout.is_expandable[segment] else "ordinary"
        found.setdefault((pool_name(layout, segment), int(layout.stream[segment]), kind), []).append(segment)
    return sorted(found.items(), key=lambda item: -int(layout.total_bytes[item[1]].sum()))


def sorted_segments(layout: Layout, segments: list[int], sort: str) -> list[int]:
    """Segments by address, or by free bytes, size or largest hole, largest first."""
    if sort == "address":
        return segments
    key = {"free": layout.free_bytes, "size": lambda: layout.total_bytes, "hole": layout.largest_free_bytes}[sort]()
    return sorted(segments, key=lambda segment: -int(key[segment]))


def cell_bytes_for(sizes: I8, width: int, rows: int) -> int:
    """The smallest power of two (at least 512) for which the segments fit into ``rows`` of ``width`` cells."""
    cell = 512
    while True:
        cells = -(-sizes // cell)
        # Every segment also takes a gap, and half of a row is lost where a long one does not fit any more.
        if int((cells + 1).sum()) <= width * rows * 0.92 or int(cells.max(initial=1)) <= 1:
            return cell
        cell *= 2


def flow(layout: Layout, width: int, height: int, sort: str = "address", zoom: int = 0) -> Flow:
    """Lay the segments out for a screen of ``width`` by ``height``; each ``zoom`` step halves the bytes of a cell."""
    rows: list[Row] = []
    cells: dict[int, int] = {}
    order: list[int] = []
    row_of: dict[int, int] = {}
    x_of: dict[int, int] = {}
    pools = groups(layout)
    reserved = max(layout.reserved_bytes, 1)
    space = max(height - 2 * len(pools), len(pools))
    for (pool, stream, kind), members in pools:
        sizes = layout.total_bytes[members]
        # Half of the space by size, half evenly: a small pool of many segments stays readable.
        share = 0.65 * int(sizes.sum()) / reserved + 0.35 / len(pools)
        cell = cell_bytes_for(sizes, width, max(round(space * share), 1))
        cell = max(512, cell >> zoom if zoom >= 0 else cell << -zoom)
        chosen = sorted_segments(layout, members, sort)
        if rows:
            rows.append(())
        rows.append(Heading(pool, stream, kind, tuple(chosen), cell))
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
