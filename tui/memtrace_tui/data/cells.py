"""Cells of the segment map: how full each is, with what, and which block it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrace.history.layout import Layout, State

I8 = NDArray[np.int64]
U1 = NDArray[np.uint8]


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
    code = np.zeros(count, dtype=np.uint8)
    kinds = int(codes.max(initial=0)) + 1
    sums = np.bincount(
        cell * kinds + codes[number][owner], weights=np.where(in_use, overlap, overlap * 1e-9), minlength=count * kinds
    )
    code[:] = sums.reshape(count, kinds).argmax(axis=1)
    block = np.full(count, -1, dtype=np.int64)
    order = np.argsort(weight, kind="stable")
    block[cell[order]] = number[owner[order]]
    return MapCells(fill, code, block, (block & 1).astype(np.bool_))
