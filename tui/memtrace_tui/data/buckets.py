"""Memory over time in as many columns as the screen has, without losing an extreme.

Each column covers a range of events. It knows the highest and the lowest total of live bytes in that range, the
categories at the highest one, and the highest reserved bytes; so a peak of a single event is as tall on an 80-column
screen as in the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from memtrace.answers.curves import categories_at
from memtrace.attribution.categories import Category
from memtrace.snapshot.model import I8, U1
from memtrace_tui.provider import Provider

LAYERS: tuple[Category, ...] = tuple(c for c in Category if c is not Category.FRAGMENTATION)


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """``start[i] <= event < stop[i]`` is column i (an empty range: the state before it holds on).

    ``layers`` has one row a category of ``LAYERS``, bytes at ``high_event``; ``low`` and ``high`` are extremes of
    their sum within the column, ``reserved`` the highest reserved bytes.
    """

    start: I8
    stop: I8
    high_event: I8
    layers: I8
    low: I8
    high: I8
    reserved: I8

    def __len__(self) -> int:
        return len(self.start)

    def column_of(self, event: int) -> int | None:
        """The column that shows an event; None outside the window."""
        if not len(self) or event < int(self.start[0]) or event >= max(int(self.stop[-1]), int(self.start[-1]) + 1):
            return None
        return max(int(np.searchsorted(self.start, event, side="right")) - 1, 0)


def window_edges(provider: Provider, start: int, stop: int, width: int, by_time: bool) -> I8:
    """``width + 1`` events that cut ``start:stop`` into columns of equal numbers of events, or of equal time."""
    times = provider.timeline.trace.time_us
    if by_time and times is not None and stop - start > 1:
        clock = np.maximum.accumulate(times[start:stop])  # threads may log a little out of order
        cuts = np.linspace(int(clock[0]), int(clock[-1]) + 1, width + 1)
        edges = start + np.searchsorted(clock, cuts, side="left")
        edges[0], edges[-1] = start, stop
        return edges.astype(np.int64)
    return np.floor(np.linspace(start, stop, width + 1)).astype(np.int64)


def _ranges(edges: I8, start: int) -> list[tuple[int, int]]:
    """The events of each column; an empty one shows the state just before it, or that of the first event."""
    first = np.where(edges[1:] > edges[:-1], edges[:-1], np.maximum(edges[:-1] - 1, start))
    return list(zip(first.tolist(), np.maximum(edges[1:], first + 1).tolist(), strict=True))


@lru_cache(4)
def columns(provider: Provider, start: int, stop: int, width: int, by_time: bool = False) -> Columns:
    """Cut events ``start:stop`` into ``width`` columns; without any event, all are empty."""
    if stop <= start:
        none = np.zeros(width, np.int64)
        return Columns(none, none, none, np.zeros((len(LAYERS), width), np.int64), none, none, none)
    edges = window_edges(provider, start, stop, width, by_time)
    ranges = _ranges(edges, start)
    live, reserved = provider.live_bytes[start:stop], provider.timeline.reserved_bytes[start:stop]
    high_event, low, high, top = (np.zeros(width, dtype=np.int64) for _ in range(4))
    for i, (a, b) in enumerate(ranges):
        piece = live[a - start : b - start]
        at = int(piece.argmax())
        high_event[i] = a + at
        high[i], low[i], top[i] = piece[at], piece.min(), reserved[a - start : b - start].max()
    layers = np.delete(categories_at(provider.analysis, high_event), list(Category).index(Category.FRAGMENTATION), 0)
    return Columns(edges[:-1], edges[1:], high_event, layers, low, high, top)


@lru_cache(4)
def skyline(provider: Provider, width: int) -> tuple[I8, I8, I8]:
    """(first event, event of the most allocated bytes, those bytes) of each of ``width`` columns of the recording.

    Needs no curves by category, which take a while to work out.
    """
    edges = window_edges(provider, 0, provider.count, width, by_time=False)
    curve = provider.timeline.allocated_bytes
    at = np.array([a + int(curve[a:b].argmax()) for a, b in _ranges(edges, 0)])
    return edges[:-1], at.astype(np.int64), curve[at]


@dataclass(frozen=True, slots=True, eq=False)
class Raster:
    """Cells of a stacked area, bottom row first: ``under`` fills ``eighths`` of a cell from below, ``over`` the rest.

    Codes: 0..5 a layer held throughout its column, 8..13 the same only reached within it, ``UNUSED`` reserved but
    not live, ``EMPTY`` nothing.
    """

    under: U1
    over: U1
    eighths: U1

    def ground(self, row: int, x: int) -> int:
        """What most of a cell is."""
        return int((self.under if self.eighths[row, x] >= 4 else self.over)[row, x])


FADED, UNUSED, EMPTY = 8, 20, 21


@lru_cache(4)
def raster(data: Columns, height: int, top_bytes: int) -> Raster:
    """Draw the columns into ``height`` rows with ``top_bytes`` at the upper edge."""
    scale = height * 8 / max(top_bytes, 1)
    levels = np.cumsum(data.layers, axis=0) * scale
    grid = np.arange(height * 8)[:, None] + 0.5
    codes = np.full((height * 8, len(data)), EMPTY, dtype=np.uint8)
    codes[grid < data.reserved[None, :] * scale] = UNUSED
    faded = grid >= data.low[None, :] * scale
    for layer in reversed(range(len(LAYERS))):
        inside = grid < levels[layer][None, :]
        codes[inside] = layer
        codes[inside & faded] = layer + FADED
    return cells_of_codes(codes)


def cells_of_codes(codes: U1) -> Raster:
    """Cells from codes at every eighth of a cell (rows, lowest first): the lowest code and the highest of each."""
    cells = codes.reshape(len(codes) // 8, 8, codes.shape[1])
    under = cells[:, 0, :]
    same = cells == under[:, None, :]
    eighths = np.cumprod(same, axis=1).sum(axis=1).astype(np.uint8)
    return Raster(under, cells[:, 7, :], eighths)


def ticks(top_bytes: int, height: int) -> list[int]:
    """Round sizes for an axis of ``height`` rows, about one every four rows, 0 left out."""
    wanted = max(height // 4, 1)
    step = 1  # powers of two stay round in KiB, MiB and GiB
    while top_bytes / step > wanted:
        step *= 2
    return [step * i for i in range(1, int(top_bytes // step) + 1)]


BOTH, FIRST, SECOND, HELD, HELD_FIRST, HELD_SECOND, NEITHER = range(7)


@lru_cache(4)
def overlay(first: Provider, second: Provider, width: int, height: int) -> tuple[Columns, Columns, Raster, int]:
    """Both recordings cut into ``width`` columns of equal shares of their events, and the cells of the overlay.

    The last value is the size at the upper edge. Codes: BOTH up to the lower of the two curves of live bytes, FIRST or
    SECOND above it up to the higher one; above that, the same for reserved bytes: HELD, HELD_FIRST, HELD_SECOND.
    """
    a, b = (columns(each, 0, each.count, width) for each in (first, second))
    top = max(int(a.reserved.max(initial=1)), int(b.reserved.max(initial=1)), 1)
    scale = height * 8 / (top * 1.03)
    grid = np.arange(height * 8)[:, None] + 0.5
    codes = np.full((height * 8, width), NEITHER, dtype=np.uint8)
    for one, other, names in ((a.reserved, b.reserved, (HELD, HELD_FIRST, HELD_SECOND)),
                              (a.high, b.high, (BOTH, FIRST, SECOND))):  # fmt: skip
        codes[grid < other[None, :] * scale] = names[2]
        codes[grid < one[None, :] * scale] = names[1]
        codes[grid < np.minimum(one, other)[None, :] * scale] = names[0]
    return a, b, cells_of_codes(codes), round(top * 1.03)
