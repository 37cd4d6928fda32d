"""Align the allocations of two runs of one program, whose sequences differ in a few places.

A global alignment by dynamic programming (Needleman and Wunsch 1970) within a band around the diagonal. Two rows may
pair when their sizes agree, or when the same line of Python asked for both (the size of 8-bit outlier columns depends
on the data). Call site, lifetime and identity break ties: an extra allocation of the same size does not shift its
neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Costs in units of one row left without a partner.
_OTHER_SIZE, _OTHER_SIZE_STEP, _OTHER_SITE, _OTHER_IDENTITY = 0.7, 0.2, 0.5, 0.4
_OTHER_FATE, _OTHER_LIFETIME, _OPTIONAL = 0.2, 0.1, 0.1
_IMPOSSIBLE = 1e6
_DIAGONAL, _UP, _LEFT = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Feature:
    """What the alignment sees of an allocation. ``lifetime`` counts allocations; -1: it outlives the phase.

    ``optional`` rows may lack a partner at no cost: the instrumentation itself may have caused them.
    """

    size: int
    site: str
    lifetime: int
    identity: str
    optional: bool = False


@dataclass(frozen=True, slots=True)
class _Columns:
    size: NDArray[np.int64]
    site: NDArray[np.int64]
    identity: NDArray[np.int64]
    lasting: NDArray[np.bool_]
    octave: NDArray[np.float64]
    optional: NDArray[np.bool_]


def _columns(rows: Sequence[Feature], codes: dict[str, int]) -> _Columns:
    def code(text: str) -> int:
        return codes.setdefault(text, len(codes))

    lifetime = np.array([row.lifetime for row in rows], dtype=np.int64)
    return _Columns(
        np.array([row.size for row in rows], dtype=np.int64),
        np.array([code(row.site) for row in rows], dtype=np.int64),
        np.array([code(row.identity) for row in rows], dtype=np.int64),
        lifetime < 0,
        np.log2(np.maximum(lifetime, 0) + 1.0),
        np.array([row.optional for row in rows], dtype=np.bool_),
    )


def _pair_costs(a: _Columns, i: int, b: _Columns, span: slice) -> NDArray[np.float64]:
    """Cost of pairing row ``i`` of ``a`` with each row of ``b`` in ``span``."""
    same_size = b.size[span] == a.size[i]
    same_site = b.site[span] == a.site[i]
    ratio = np.abs(np.log2((b.size[span] + 1.0) / (a.size[i] + 1.0)))
    by_site = _OTHER_SIZE + _OTHER_SIZE_STEP * np.minimum(ratio, 1.0)
    cost = np.where(same_size, 0.0, by_site if a.site[i] else _IMPOSSIBLE)
    cost += np.where(same_site, 0.0, np.where(same_size, _OTHER_SITE, _IMPOSSIBLE))
    cost += _OTHER_IDENTITY * (b.identity[span] != a.identity[i])
    other_fate = b.lasting[span] != a.lasting[i]
    cost += np.where(other_fate, _OTHER_FATE, _OTHER_LIFETIME * (np.abs(b.octave[span] - a.octave[i]) > 1.0))
    return np.asarray(cost + _OPTIONAL * b.optional[span], dtype=np.float64)


def align(left: Sequence[Feature], right: Sequence[Feature], slack: int = 800) -> list[tuple[int, int]]:
    """Pairs of positions, ascending. Only ``right`` may hold optional rows.

    The band is ``slack`` plus the difference of the lengths to either side of the diagonal, in rows; time and memory
    are its product with ``len(left)``.
    """
    if not left or not right:
        return []
    codes = {"": 0}
    a, b = _columns(left, codes), _columns(right, codes)
    n, m = len(left), len(right)
    skips = np.concatenate(([0.0], np.cumsum(np.where(b.optional, 0.0, 1.0))))
    half = slack + abs(m - n)
    moves: list[NDArray[np.uint8]] = []
    lows: list[int] = []
    previous, previous_low = skips[: min(m, half) + 1].copy(), 0
    for i in range(1, n + 1):
        centre = i * m // n
        low, high = max(0, centre - half), min(m, centre + half)
        width = high - low + 1
        up, diagonal = np.full(width, _IMPOSSIBLE), np.full(width, _IMPOSSIBLE)
        shift = low - previous_low  # the band moves right only
        kept = previous[shift : shift + width]
        up[: len(kept)] = kept + 1.0
        first = max(low, previous_low + 1)
        before = previous[first - 1 - previous_low : high - previous_low]
        reached = slice(first - low, first - low + len(before))
        diagonal[reached] = before + _pair_costs(a, i - 1, b, slice(first - 1, first - 1 + len(before)))
        best = np.minimum(up, diagonal)
        offset = skips[low : high + 1]
        current = offset + np.minimum.accumulate(best - offset)
        move = np.where(diagonal <= up, _DIAGONAL, _UP)
        moves.append(np.where(current < best - 1e-9, _LEFT, move).astype(np.uint8))
        lows.append(low)
        previous, previous_low = current, low
    return _trace_back(moves, lows, n, m)


def _trace_back(moves: Sequence[NDArray[np.uint8]], lows: Sequence[int], n: int, m: int) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []
    i, j = n, m
    while i > 0:
        move = moves[i - 1][j - lows[i - 1]]
        if move == _LEFT:
            j -= 1
            continue
        if move == _DIAGONAL:
            pairs.append((i - 1, j - 1))
            j -= 1
        i -= 1
    return pairs[::-1]
