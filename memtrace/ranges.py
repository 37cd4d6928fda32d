"""``--events A:B``, ``--steps A:B`` and ``--at WHEN``: which events a question is about.

A range is half-open, like Python's: A is in it, B is not, and either may be left out. Event numbers stay those of the
whole trace.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from memtrace.errors import NoAnswerError, UsageError
from memtrace.history.timeline import At, Peak, Timeline, Window, choose_event

if TYPE_CHECKING:
    from memtrace.attribution.phases import Phases

PLACES = (
    "an event number, peak, reserved-peak, oom, start, end, 50%, +2s or +300ms, step 3, peak of step 3, end of step 3, "
    "or an address"
)
_PLACE = re.compile(
    r"(?P<share>\d+(\.\d*)?)%|\+(?P<time>\d+(\.\d*)?)(?P<unit>s|ms)|(?P<address>0x[0-9a-f]{1,16})"
    r"|((?P<what>start|end|peak|reserved-peak)( of)? )?step[ :=]*(?P<step>\d{1,9})"
)
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


def find_event(timeline: Timeline, phases: Phases, when: str | None) -> At:
    """The event that somebody names, one of :data:`PLACES`; None as :func:`choose_event` takes it.

    ``+2s`` is the last event within that time of the first one, an address the last event that put something there.
    Raises UsageError for anything else, NoAnswerError for what the recording doesn't have.
    """
    text = " ".join(when.lower().split()) if when is not None else None
    if text is None or text in ("peak", "reserved-peak", "end", "oom") or re.fullmatch(r"-?[\d,]{1,18}", text):
        return choose_event(timeline, text)
    match = _PLACE.fullmatch("start of step " + text[5:] if re.match(r"step\b", text) else text)
    last = len(timeline) - 1
    if text in ("start", "begin", "first"):
        event = min(0, last)
    elif match is None:
        raise UsageError(f"no such place: {when!r}; write {PLACES}")
    elif match["share"]:
        event = max(min(round(float(match["share"]) / 100 * last), last), -1)
    elif match["time"]:
        times = timeline.trace.time_us
        if times is None or not len(times):
            raise NoAnswerError("this recording has no times")
        until = int(times[0]) + float(match["time"]) * (1e6 if match["unit"] == "s" else 1e3)
        event = max(int(times.searchsorted(until, side="right")) - 1, 0)
    elif match["address"]:
        table, address = timeline.allocations, int(match["address"], 16)
        there = (table.address <= address) & (address < table.address + table.block_bytes)
        if address >= 1 << 63 or not there.any():
            raise NoAnswerError(f"nothing was ever at {text} in this recording")
        event = int(table.alloc_event[there].max())
    else:
        event = _of_step(timeline, phases, match["what"] or "start", int(match["step"]))
    first, stop = timeline.span
    if timeline.window and not first <= event < stop:
        raise UsageError(f"{when}: event {event} is outside the events {first}:{stop} in question")
    return At("event", event, timeline.time_us(event))


def _of_step(timeline: Timeline, phases: Phases, what: str, step: int) -> int:
    inside = phases.step == step
    if not inside.any():
        known = phases.step[phases.step >= 0]
        have = f"there are steps {int(known.min())} to {int(known.max())}" if len(known) else "no step was recognised"
        raise UsageError(f"no step {step} in this recording; {have}")
    window = Window(int(phases.start[:-1][inside].min()), int(phases.start[1:][inside].max()))
    if what in ("start", "end"):
        return window.first if what == "start" else window.stop - 1
    return peak_within(timeline, window, what).event


def peak_within(timeline: Timeline, window: Window, what: str = "peak") -> Peak:
    """The highest allocated (``reserved-peak``: reserved) bytes of some events, and the first event that has them."""
    curve = timeline.reserved_bytes if what == "reserved-peak" else timeline.allocated_bytes
    at = window.first + int(curve[window.first : window.stop].argmax())
    return Peak(int(curve[at]), at)
