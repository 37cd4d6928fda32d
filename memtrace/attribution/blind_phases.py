"""Phases where no stacks were recorded: from lifetimes alone.

A training step leaves a shape that needs no names. Tensors saved by the forward pass are freed by the backward pass in
the reverse order, so their lifetimes nest around one turning point; between steps next to nothing of them is left.
Steps are therefore found as the stretches between two low points of short-lived memory, and the turning point as the
event that most long lifetimes of the step span.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from memtrace.frozen import dataclass
from memtrace.snapshot.model import I4

I8 = NDArray[np.int64]
Cycle = tuple[int, int, int]  # first event, turning point, event after the last

_LOW_SHARE = 0.08  # short-lived bytes at a low point, as a share of the highest level
_LONG_SHARE = 0.2  # a lifetime is long if it lasts this share of its stretch
_SMALLEST_CYCLE_EVENTS = 200
_FEWEST_LONG_LIVES = 8  # a pass over a model saves at least a few tensors for its way back
_NESTED_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class Lives:
    """Allocations in the order they were made: ``born``, ``died`` (events; ``NEVER``: not freed), ``size`` (bytes)."""

    born: I4
    died: I4
    size: I8

    def chosen(self, which: NDArray[np.bool_]) -> Lives:
        """Some of them."""
        return Lives(self.born[which], self.died[which], self.size[which])


def training_cycles(lives: Lives, windows: Sequence[tuple[int, int]], count: int) -> list[Cycle]:
    """Forward-and-backward stretches of a trace of ``count`` events, in order, none overlapping another.

    ``windows`` are stretches known to hold one step each (between recorded optimizer steps); without any, stretches
    between low points of memory are tried. What has no nested long lifetimes (loading a model, say) is left out.
    """
    if not len(lives.born):
        return []
    stretches = list(windows)
    if not stretches:
        delta = np.zeros(count, dtype=np.int64)
        np.add.at(delta, lives.born, lives.size)
        np.subtract.at(delta, lives.died, lives.size)
        level = np.cumsum(delta)
        above = level > max(1, int(level.max() * _LOW_SHARE))
        edges = np.flatnonzero(np.diff(above.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
        stretches = [(first, last) for first, last in edges.tolist()]
    cycles: list[Cycle] = []
    # Longest first: the humps of single layers inside a step's backward pass must not be taken for steps.
    for first, last in sorted(stretches, key=lambda stretch: stretch[0] - stretch[1]):
        if last - first < _SMALLEST_CYCLE_EVENTS:
            continue
        bounds = (first, last) if windows else (0, count)
        cycle = _cycle(lives, first, last, bounds)
        if cycle is not None and all(cycle[2] <= other[0] or other[2] <= cycle[0] for other in cycles):
            cycles.append(cycle)
    return sorted(cycles)


def _cycle(lives: Lives, first: int, last: int, bounds: tuple[int, int]) -> Cycle | None:
    """The step in a stretch: its turning point, and from the first to the last event of what spans that point."""
    inside = lives.chosen((lives.born >= first) & (lives.died < last))
    long = inside.chosen(inside.died - inside.born > _LONG_SHARE * (last - first))
    if len(long.born) < _FEWEST_LONG_LIVES:
        return None
    spanned = _live_counts(long, first, last)
    plateau = np.flatnonzero(spanned == spanned.max())
    # All long lives span the plateau; shorter ones nest inside it, around the same point.
    low, high = first + int(plateau[0]), first + int(plateau[-1]) + 1
    turn = low + int(np.argmax(_live_counts(inside, first, last)[low - first : high - first]))
    spanning = lives.chosen(
        (lives.born <= turn) & (lives.died > turn) & (lives.born >= bounds[0]) & (lives.died < bounds[1])
    )
    length = spanning.died - spanning.born
    spanning = spanning.chosen(length <= 4 * np.median(length))
    if len(spanning.born) < _FEWEST_LONG_LIVES:
        return None
    order = np.argsort(spanning.born, kind="stable")
    if np.mean(np.diff(spanning.died[order]) <= 0) < _NESTED_SHARE:
        return None
    return int(spanning.born.min()), turn + 1, int(spanning.died.max()) + 1


def _live_counts(lives: Lives, first: int, last: int) -> I8:
    """How many are alive just after each event of [first, last)."""
    delta = np.zeros(last - first + 1, dtype=np.int64)
    np.add.at(delta, lives.born - first, 1)
    np.subtract.at(delta, lives.died - first, 1)
    return np.cumsum(delta)[:-1]
