"""Layers repeat: the distance after which a sequence of call sites reads the same again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

I8 = NDArray[np.int64]
_WINDOW = 24  # call sites that must repeat in order for one layer to be recognised as the one before


def period(sites: I8) -> int:
    """Distance between the end of a sequence and the nearest earlier place where it read the same; 0 if none."""
    count = len(sites)
    window = min(_WINDOW, count // 2)
    if window < 4:
        return 0
    tail = sites[count - window :]
    for earlier in np.flatnonzero(sites[: count - 1] == sites[-1])[::-1].tolist():
        distance = count - 1 - earlier
        if count - window - distance < 0:
            return 0
        if np.array_equal(sites[count - window - distance : count - distance], tail):
            return int(distance)
    return 0
