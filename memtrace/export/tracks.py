"""A timeline as tracks: counters by category, phases, recorded ranges and OOMs. Both Perfetto formats start here.

Times are nanoseconds since the Unix epoch and strictly increasing over events: several events often share one
microsecond, and a viewer that keeps only the last value of an instant would lose the peaks between them. Where a file
records no times, event N is at N microseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrace.analysis import Analysis
from memtrace.answers.curves import category_curves, pick_events
from memtrace.attribution.categories import Category, category_name
from memtrace.attribution.phases import Phase
from memtrace.errors import NoAnswerError

I8 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Slice:
    """Something that lasts: ``name`` from ``start_ns`` to ``end_ns``, beside or inside the others of its track."""

    name: str
    start_ns: int
    end_ns: int
    event: int | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Tracks:
    """One device. ``levels`` and ``categories`` map a name to bytes at each of ``time_ns``; ``ooms`` are the refused
    requests: (time in ns, event, bytes asked for)."""

    device: int
    device_name: str
    has_times: bool
    time_ns: I8
    events: I8
    levels: dict[str, I8]
    categories: dict[str, I8]
    phases: tuple[Slice, ...]
    ranges: tuple[Slice, ...]
    ooms: tuple[tuple[int, int, int], ...]

    def changes(self, *curves: I8) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(time, values) of each event at which one of the curves has another value than before."""
        before: tuple[int, ...] | None = None
        columns = (curve.tolist() for curve in curves)
        for time_ns, *values in zip(self.time_ns.tolist(), *columns, strict=True):
            if tuple(values) != before:
                before = tuple(values)
                yield time_ns, before


def build_tracks(analysis: Analysis, points: int | None = None) -> Tracks:
    """The tracks of a device at about ``points`` events that keep every curve's extremes (None: all events).

    Raises NoAnswerError without a trace.
    """
    timeline = analysis.timeline
    if not len(timeline):
        raise NoAnswerError(f"{timeline.snapshot.source}: no trace was recorded, so there is no timeline")
    curves = category_curves(analysis, timeline.window)
    events = pick_events(curves, points if points else len(curves))
    place = events - curves.first
    times = event_times_ns(timeline.trace.time_us, len(timeline))
    meaning = analysis.attribution.lora_meaning
    present = [(str(category_name(c, meaning)), i) for i, c in enumerate(Category) if curves.categories[i].any()]
    return Tracks(
        device=timeline.device.device,
        device_name=timeline.device_name,
        has_times=timeline.trace.time_us is not None,
        time_ns=times[events],
        events=events,
        levels={name: getattr(curves, f"{name}_bytes")[place] for name in ("reserved", "allocated", "requested")},
        categories={name: curves.categories[i, place] for name, i in present},
        phases=tuple(_phases(analysis, times)),
        ranges=tuple(_ranges(analysis)),
        ooms=tuple((int(times[event]), event, int(timeline.trace.size[event])) for event in timeline.oom_events),
    )


def event_times_ns(time_us: I8 | None, count: int) -> I8:
    """Strictly increasing nanoseconds of every event (see the module's docstring)."""
    index = np.arange(count, dtype=np.int64)
    if time_us is None:
        return index * 1000
    # time[i] = max over j <= i of (start[j] - j) + i is the smallest increasing series that is nowhere early.
    return np.maximum.accumulate(time_us * 1000 - index) + index


def _phases(analysis: Analysis, times: I8) -> Iterator[Slice]:
    phases, span = analysis.attribution.facts.phases, analysis.timeline.span
    for i in range(len(phases)):
        first = max(int(phases.start[i]), span.first)
        last = min(int(phases.start[i + 1]), span.stop)
        if last > first and phases.phase[i] != Phase.UNKNOWN:
            end = int(times[last]) if last < len(times) else int(times[-1]) + 1
            step = int(phases.step[i])
            name = Phase(int(phases.phase[i])).label
            yield Slice(name, int(times[first]), end, first, step if step >= 0 else None)


def _ranges(analysis: Analysis) -> Iterator[Slice]:
    """Recorded ``record_function`` ranges of this device, properly nested, as far as they lie within the span.

    Annotations have a ring of their own, which may reach further back than the events'.
    """
    device, times = analysis.timeline.device.device, analysis.timeline.trace.time_us
    if times is None:
        return
    first, stop = analysis.timeline.span
    begin_ns = int(times[first]) * 1000
    end_ns = int(times[stop - 1]) * 1000 if analysis.timeline.window else 1 << 63
    open_at: list[tuple[str, int]] = []
    names = Counter[str]()  # of what is open
    for note in analysis.timeline.snapshot.annotations:
        if note.device != device:
            continue
        if note.stage == "START":
            open_at.append((note.name, note.time_us * 1000))
            names[note.name] += 1
        elif names[note.name]:
            while open_at:  # whatever was opened inside it and never closed ends with it
                name, start = open_at.pop()
                names[name] -= 1
                start, end = max(start, begin_ns), max(start, note.time_us * 1000)
                if end >= begin_ns and start <= end_ns:
                    yield Slice(name, start, min(end, end_ns))
                if name == note.name:
                    break
