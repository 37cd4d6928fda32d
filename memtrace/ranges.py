"""``--events A:B`` and ``--steps A:B``: which events a question is about.

A range is half-open, like Python's: A is in it, B is not, and either may be left out. Event numbers stay those of the
whole trace.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from memtrace.errors import NoAnswerError, UsageError
from memtrace.history.timeline import Window

if TYPE_CHECKING:
    from memtrace.attribution.phases import Phases

_RANGE = re.compile(r"\s*([\d,_]*)\s*:\s*([\d,_]*)\s*", re.ASCII)
_MAX_DIGITS = 18


def read_range(text: str, what: str) -> tuple[int | None, int | None]:
    """The ends of ``A:B``, ``A:``, ``:B`` or ``:``, None where left out.

    Raises UsageError for anything else and for a range that can't hold anything.
    """
    match = _RANGE.fullmatch(text)
    parts = [re.sub("[,_]", "", part) for part in match.groups()] if match else []
    if match is None or any(len(part) > _MAX_DIGITS for part in parts):
        raise UsageError(f"--{what} takes a range A:B (A up to, not including, B), not {text[:60]!r}")
    first, stop = (int(part) if part else None for part in parts)
    if stop is not None and (first or 0) >= stop:
        raise UsageError(f"--{what} {text}: holds nothing; A:B goes from A up to, not including, B")
    return first, stop


def parse_range(text: str, low: int, high: int, what: str) -> Window:
    """The range within ``low`` to ``high`` (behind the last one). Raises UsageError like :func:`read_range`, and for a
    range that reaches outside."""
    first, stop = read_range(text, what)
    window = Window(low if first is None else first, high if stop is None else stop)
    if not low <= window.first < window.stop <= high:
        raise UsageError(f"--{what} {text}: the recording has {what} {low} to {high - 1}, so A:B lies in {low}:{high}")
    return window


def steps_window(phases: Phases, text: str, source: str) -> Window:
    """The events of steps ``A:B``. Raises NoAnswerError where no step was recognised, UsageError for a bad range."""
    steps = phases.step[phases.step >= 0]
    if not len(steps):
        raise NoAnswerError(f"{source}: no training step was recognised; give the range by --events")
    low, high = parse_range(text, int(steps.min()), int(steps.max()) + 1, "steps")
    inside = (phases.step >= low) & (phases.step < high)
    if not inside.any():
        raise NoAnswerError(f"{source}: holds no events of steps {text}")
    return Window(int(phases.start[:-1][inside].min()), int(phases.start[1:][inside].max()))


def check_ranges(events: str | None, steps: str | None) -> None:
    """Raise UsageError for what is wrong whatever the recording holds, before it is read."""
    if events is not None and steps is not None:
        raise UsageError("--events and --steps exclude each other")
    for text, what in ((events, "events"), (steps, "steps")):
        if text is not None:
            read_range(text, what)


def window_of(events: str | None, steps: str | None, count: int, phases: Phases, source: str) -> Window:
    """The events that either range names in a trace of ``count`` events.

    Raises UsageError for a bad range, NoAnswerError where the recording has no such events.
    """
    if not count:
        raise NoAnswerError(f"{source}: no trace was recorded, so there are no events to choose from")
    if steps is not None:
        return steps_window(phases, steps, source)
    return parse_range(events or ":", 0, count, "events")
