"""Rules over the series of steps that say, while a run lasts, that it will not last: pure functions without a clock.

Memory that stays rises in most runs for a while: states appear, caches fill. So growth counts only where it goes on
through all of a window of steps, is more than what tokens explain, and would use up what is left within twenty such
windows. All sizes are bytes; capacity is the smaller of the process's limit and what others leave of the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from memtrace.answers.steps import StepSeries, explained, trend
from memtrace.units import format_bytes

F8 = NDArray[np.float64]
GROWTH_STEPS = 20  # the shortest window
SOON_STEPS = 50
HEADROOM_SHARE = 0.05
_WARM_UP = 2  # optimizer states appear in the first step, some workspaces in the second
_WINDOWS_AHEAD = 20
_LEAST_RISE_BYTES = 4 << 20
_EVEN_SHARE = 0.15  # of an even rise: each quarter of a window has to bring so much of it
_RECENT_STEPS = 20


@dataclass(frozen=True, slots=True)
class FreePieces:
    """What the next step has to work with. ``obtainable_bytes``: what the driver would give, cached segments given back
    first; ``largest_request_bytes`` is the last step's."""

    largest_request_bytes: int
    largest_free_bytes: int
    obtainable_bytes: int


@dataclass(frozen=True, slots=True)
class Rise:
    """Steady growth of what stays after a step. ``kind`` is growth (it is allocated) or fragmentation (the holes grow).
    ``left_steps``: until the highest recent peak would no longer fit, at this rate."""

    kind: str
    per_step_bytes: float
    steps: int
    total_bytes: int
    left_steps: float


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something to look at now. ``id`` is growth, fragmentation, pieces, headroom, forecast, or in a replay oom;
    ``step`` is the last one seen, ``oom_step`` the step in which the run would die, where that is said."""

    id: str
    step: int
    line: str
    oom_step: int | None = None


def judge(
    series: StepSeries, capacity_bytes: int | None, pieces: FreePieces | None = None, forecast_step: int | None = None
) -> tuple[Alarm, ...]:
    """All alarms that hold after the series' last step. In ``forecast_step`` a forecast of the known lengths dies."""
    if not len(series):
        return ()
    step = int(series.step[-1])
    found = []
    rise = steady_rise(series, capacity_bytes)
    if rise is not None and rise.left_steps < float("inf"):
        end = step + round(max(rise.left_steps, 0))
        what = "allocated memory" if rise.kind == "growth" else "memory that can't be given back (holes with it)"
        grew = f"grew by {format_bytes(rise.total_bytes)} over {rise.steps} steps"
        line = f"{what} {grew}; at this rate the run ends in step {end}"
        found.append(Alarm(rise.kind, step, line, end))
        if rise.left_steps <= SOON_STEPS:
            found.append(Alarm("forecast", step, f"at this rate the run dies in about {end - step} steps", end))
    if forecast_step is not None and step <= forecast_step <= step + SOON_STEPS:
        line = f"by the forecast of its lengths the run dies in step {forecast_step}"
        found.append(Alarm("forecast", step, line, forecast_step))
    if pieces is not None and pieces.largest_request_bytes > max(pieces.largest_free_bytes, pieces.obtainable_bytes):
        line = (
            f"the last step asked for {format_bytes(pieces.largest_request_bytes)} at once; at its end "
            f"the largest free piece has {format_bytes(pieces.largest_free_bytes)}, and "
            f"{format_bytes(pieces.obtainable_bytes)} can still be had"
        )
        found.append(Alarm("pieces", step, line))
    left = headroom_bytes(series, capacity_bytes)
    if left is not None and capacity_bytes and left < HEADROOM_SHARE * capacity_bytes:
        share = f"{left / capacity_bytes:.1%} of {format_bytes(capacity_bytes)}"
        found.append(Alarm("headroom", step, f"{format_bytes(left)} are left above the highest recent peak ({share})"))
    return tuple(found)


def headroom_bytes(series: StepSeries, capacity_bytes: int | None) -> int | None:
    """Capacity less the highest allocated bytes of the last steps; None where either is unknown."""
    if capacity_bytes is None or not len(series):
        return None
    return capacity_bytes - int(series.peak_allocated_bytes[-_RECENT_STEPS:].max())


def steady_rise(series: StepSeries, capacity_bytes: int | None) -> Rise | None:
    """The growth that uses up what is left soonest, over windows of 20, 40, 80 … steps.

    None if nothing rises, or nothing would reach the capacity within twenty such windows: so far no window can see.
    """
    late = slice(_WARM_UP, None)
    step, tokens, allocated = series.step[late], series.tokens[late], series.allocated_bytes[late]
    curves: list[tuple[str, F8]] = [("growth", allocated)]
    if series.holes_bytes is not None:
        curves.append(("fragmentation", allocated + series.holes_bytes[late]))
    left = headroom_bytes(series, capacity_bytes)
    found: list[Rise] = []
    for size in _windows(len(step)):
        for kind, values in curves:
            here = _rise(kind, step[-size:], values[-size:], tokens[-size:])
            if here is not None:
                per_step = here[0]
                steps_left = float("inf") if left is None else left / per_step
                if left is None or steps_left <= _WINDOWS_AHEAD * size:
                    found.append(Rise(kind, per_step, size, here[1], steps_left))
                break  # growing holes are told apart only where what is allocated does not grow
    return min(found, key=lambda rise: rise.left_steps / rise.steps, default=None)


def _windows(count: int) -> Sequence[int]:
    sizes = [GROWTH_STEPS]
    while sizes[-1] * 2 <= count:
        sizes.append(sizes[-1] * 2)
    return sizes if count >= GROWTH_STEPS else ()


def _rise(kind: str, step: F8, values: F8, tokens: F8) -> tuple[float, int] | None:
    """(bytes a step, bytes in all) of a rise that is certain and goes on through all of the window."""
    per_token, _ = explained(tokens, values, step)
    rest = values - per_token * tokens
    found = trend(step, rest)
    if not found.certain or found.total_bytes < _LEAST_RISE_BYTES:
        return None
    levels = [float(np.median(part)) for part in np.array_split(rest, 4)]
    even = (levels[-1] - levels[0]) / 3
    if any(after - before < _EVEN_SHARE * even for before, after in pairwise(levels)):
        return None
    return found.per_step_bytes, found.total_bytes
