"""Set operations on whole numbers, as quick on a column of millions as on one of ten.

numpy's ``isin`` sorts both sides where numbers are far apart, as sizes are; its ``unique`` imports ``numpy.ma``.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

Number = TypeVar("Number", bound=np.generic)
_AT_ONCE = 1 << 16  # what a processor's cache holds
_FEW = 12  # comparing with each is quicker than anything else


def distinct(values: NDArray[Any]) -> NDArray[Any]:
    """The distinct values, ascending."""
    ordered = np.sort(values)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]


def among(values: NDArray[Any], wanted: ArrayLike) -> NDArray[np.bool_]:
    """Which of the values are any of ``wanted``, which may repeat themselves."""
    looked_for: NDArray[Any] = np.asarray(wanted)
    low, high = int(looked_for.min(initial=0)), int(looked_for.max(initial=0))
    if high - low < 4 * len(looked_for) + len(values):
        if len(looked_for) > _FEW:
            table = np.zeros(high - low + 3, dtype=np.bool_)  # an entry below and one above all
            table[looked_for - np.int64(low - 1)] = True
            found = np.empty(len(values), dtype=np.bool_)
            for start in range(0, len(values), _AT_ONCE):
                # As 64 bits, which numpy 1 does not make of smaller numbers: those below are far above all then.
                place = np.subtract(values[start : start + _AT_ONCE], low - 1, dtype=np.int64).view(np.uint64)
                found[start : start + _AT_ONCE] = table[np.minimum(place, np.uint64(len(table) - 1)).view(np.int64)]
            return found
    else:
        looked_for = distinct(looked_for)
    if len(looked_for) > _FEW:
        return looked_for[np.searchsorted(looked_for[:-1], values)] == values
    if not len(looked_for):
        return np.zeros(len(values), dtype=np.bool_)
    first, *others = looked_for.tolist()
    found = np.equal(values, first)
    for value in others:
        found |= values == value
    return found


def places(bounds: NDArray[Any], ascending: NDArray[Any], side: Literal["left", "right"] = "left") -> NDArray[np.int32]:
    """As ``np.searchsorted(bounds, ascending, side)`` for a few bounds and values that ascend, too, and
    whose type can hold the bounds."""
    begins = np.searchsorted(ascending, bounds.astype(ascending.dtype), "right" if side == "left" else "left")
    return np.repeat(np.arange(len(bounds) + 1, dtype=np.int32), np.diff(begins, prepend=0, append=len(ascending)))


def place_of(ascending: NDArray[Any], value: int, side: Literal["left", "right"] = "left") -> int:
    """``np.searchsorted`` of one number that the array's type can hold; numpy makes a wider copy of the array first."""
    return int(np.searchsorted(ascending, ascending.dtype.type(value), side))


def narrowed(values: NDArray[Number]) -> NDArray[Number]:
    """The same, in the room of one value where all are alike."""
    if len(values) and (values == values[0]).all():
        return np.broadcast_to(values[0], values.shape)
    return values
