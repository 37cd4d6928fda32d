"""Disjoint address ranges with tags: which pages of expandable segments are mapped, and to whom they belong."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple


class Owner(NamedTuple):
    """Whom a segment belongs to. ``small`` is None while unknown; ``pool`` is an index, -1 while unknown.

    ``segment`` is the address of an ordinary segment, which never joins a neighbour; None for expandable ones.
    """

    stream: int
    small: bool | None
    pool: int
    segment: int | None = None


class RangeMap:
    """Sorted disjoint ranges; every operation costs a bisection and the ranges it touches."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self._end: dict[int, int] = {}
        self._owner: dict[int, Owner] = {}

    def add(self, start: int, size: int, owner: Owner) -> bool:
        """Add a range. False (and what was there is replaced) if it overlaps another. An empty one adds nothing."""
        if size <= 0:
            return True
        clean = not self.cut(start, size)
        self._put(start, start + size, owner)
        return clean

    def _put(self, start: int, end: int, owner: Owner) -> None:
        self.starts.insert(bisect_left(self.starts, start), start)
        self._end[start] = end
        self._owner[start] = owner

    def cut(self, start: int, size: int) -> list[tuple[int, int, Owner]]:
        """Remove what lies in a range; returns the removed pieces (start, end, owner)."""
        if size <= 0:
            return []
        end = start + size
        pieces: list[tuple[int, int, Owner]] = []
        place = max(bisect_right(self.starts, start) - 1, 0)
        last = place
        while last < len(self.starts) and self.starts[last] < end:
            last += 1
        kept: list[tuple[int, int, Owner]] = []
        touched = self.starts[place:last]
        for low in touched:
            high, owner = self._end[low], self._owner[low]
            if high <= start:
                kept.append((low, high, owner))
                continue
            pieces.append((max(low, start), min(high, end), owner))
            if low < start:
                kept.append((low, start, owner))
            if high > end:
                kept.append((end, high, owner))
        if not pieces:
            return pieces
        for low in touched:
            del self._end[low], self._owner[low]
        self.starts[place:last] = [low for low, _, _ in kept]
        for low, high, owner in kept:
            self._end[low] = high
            self._owner[low] = owner
        return pieces

    def merged(self) -> list[tuple[int, int, Owner]]:
        """All ranges (start, end, owner), neighbours with one owner joined."""
        result: list[tuple[int, int, Owner]] = []
        for start in self.starts:
            end, owner = self._end[start], self._owner[start]
            if result and result[-1][1] == start and result[-1][2] == owner:
                result[-1] = (result[-1][0], end, owner)
            else:
                result.append((start, end, owner))
        return result
