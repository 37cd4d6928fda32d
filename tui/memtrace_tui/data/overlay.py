"""Two timelines on top of each other: what both reach, and which of the two is higher where."""

from __future__ import annotations

import numpy as np

from memtrace_tui.data.buckets import Columns, Raster, cells_of_codes, columns
from memtrace_tui.provider import Provider

BOTH, FIRST, SECOND, HELD, HELD_FIRST, HELD_SECOND, NEITHER = range(7)


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
