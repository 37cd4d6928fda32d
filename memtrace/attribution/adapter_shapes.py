"""Adapters recognised by their shapes alone, where neither their creation nor a gradient was recorded.

A low-rank adapter of a weight with n = in × out elements has two matrices of rank r: A with r·in elements and B with
r·out. So for one number c = r × bytes an element, every adapted weight has A = c·in, B = c·out bytes with in·out = n;
and a 4-bit weight of n elements is stored in n/2 bytes. The c that explains most stored weights is the one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

I8 = NDArray[np.int64]
_ELEMENT_BYTES = (4, 2)
_RANKS = tuple(1 << power for power in range(1, 11))
_WIDTH_MULTIPLE = 32  # widths of linear layers are multiples of this in every published architecture
_MAX_SIZES = 64


def adapter_sizes(candidates: I8, packed: I8) -> I8:
    """Sizes among ``candidates`` (bytes, one entry an allocation) that adapters of the ``packed`` weights have.

    Empty unless one c explains at least two different weights, or one weight that is not square: a square weight alone
    fits too many numbers.
    """
    sizes = np.unique(candidates)
    stored = np.unique(packed)
    if not 0 < len(sizes) <= _MAX_SIZES * 4 or not 0 < len(stored) <= _MAX_SIZES:
        return sizes[:0]
    there = set(sizes.tolist())
    best: tuple[int, set[int]] = (0, set())
    for c in sorted({rank * element for rank in _RANKS for element in _ELEMENT_BYTES}):
        found: set[int] = set()
        explained = 0
        for size in stored.tolist():
            pairs = _pairs(size * 2, c, there)
            if pairs:
                explained += 2 if all(a != b for a, b in pairs) else 1
                found.update(size for pair in pairs for size in pair)
        # Of numbers that explain as much, the one that needs fewest sizes: others find pairs by chance.
        if found and (explained, -len(found)) > (best[0], -len(best[1])):
            best = (explained, found)
    return np.array(sorted(best[1]), dtype=np.int64) if best[0] >= 2 else sizes[:0]


def _pairs(elements: int, c: int, there: set[int]) -> list[tuple[int, int]]:
    """(A, B) byte sizes present for a weight of that many elements, A ≤ B."""
    pairs = []
    for a in there:
        width, rest = divmod(a, c)
        if rest or width % _WIDTH_MULTIPLE or width == 0 or width * width > elements:
            continue
        other, rest = divmod(elements, width)
        if not rest and c * other in there:
            pairs.append((a, c * other))
    return pairs
