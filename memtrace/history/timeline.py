"""A device's history: one row an allocation, and the three curves at every event, exact to the byte.

``Timeline`` is built once from a snapshot by replaying the allocator (block sizes are not in the trace) and is what
everything above reads. "At event E" means the state just after event E; E = -1 is the state before the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator.config import AllocatorConfig, from_snapshot, release_of
from memtrace.allocator.replay.replay import Allocations, Replay, replay_device
from memtrace.errors import NoAnswerError, UsageError
from memtrace.frozen import dataclass
from memtrace.snapshot.devices import device_name
from memtrace.snapshot.model import Action, Device, DeviceTrace, PoolId, Snapshot
from memtrace.snapshot.version import other_backend

I8 = NDArray[np.int64]
I4 = NDArray[np.int32]
Bool = NDArray[np.bool_]
NEVER = np.int32(3 << 29)  # later than any event, which are below 1 << 30, and far from the end of its type
_AT_ONCE = 1 << 18
_FEW = 2
_REFUSALS = 1000  # of so many, the levels are kept
LEVELS_CONTRADICT = (
    "the file contradicts itself: more is allocated than was ever reserved; what is reserved is shown as at least what "
    "is allocated, and fragmentation is not known"
)


class Window(NamedTuple):
    """Events ``first <= event < stop`` of a trace."""

    first: int
    stop: int


class Peak(NamedTuple):
    """Highest value of a curve over the window and the first event that reached it (-1: before the trace)."""

    size_bytes: int
    event: int


@dataclass(frozen=True, slots=True)
class Levels:
    """What is kept of a whole trace's curves (requested, allocated, reserved): their peaks, and ``known``, all three
    just after the events that are asked for first. The curves themselves are quickly made, and large."""

    peaks: tuple[Peak, Peak, Peak]
    known: Mapping[int, tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class Timeline:
    """History of one device.

    With a ``window``, peaks, refusals and the choice of an event are about its events only; indices stay the trace's.
    """

    snapshot: Snapshot
    device: Device
    replay: Replay
    levels: Levels
    window: Window | None = None
    _peaks: list[Peak] = field(default_factory=list, init=False, repr=False, compare=False)  # of the window
    _few: dict[int, tuple[int, int, int]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _curves: dict[int, I8] = field(default_factory=dict, repr=False, compare=False)  # made when first asked for

    @property
    def allocations(self) -> Allocations:
        """One row an allocation."""
        return self.replay.allocations

    @property
    def pools(self) -> tuple[PoolId, ...]:
        """What pool indices stand for."""
        return self.replay.pools

    @property
    def curves(self) -> tuple[I8, I8, I8]:
        """(requested, allocated, reserved) bytes after each event."""
        return self.requested_bytes, self.allocated_bytes, self.reserved_bytes

    def _curve(self, which: int) -> I8:
        if which not in self._curves:
            self._curves[which] = _curve(self.trace, self.replay, which)
        return self._curves[which]

    @property
    def requested_bytes(self) -> I8:
        """What the program asked for and held after each event."""
        return self._curve(0)

    @property
    def allocated_bytes(self) -> I8:
        """The blocks it held after each event."""
        return self._curve(1)

    @property
    def reserved_bytes(self) -> I8:
        """What the allocator held after each event."""
        return self._curve(2)

    @property
    def trace(self) -> DeviceTrace:
        """The recorded events."""
        return self.device.trace

    @property
    def config(self) -> AllocatorConfig:
        """The recorded settings, with the rounding of the back end that wrote the file."""
        return replace(from_snapshot(self.snapshot.settings), padding_bytes=self.replay.padding_bytes)

    @property
    def device_name(self) -> str:
        """``GPU 0``, ``NPU 0``: by the back end that wrote the file."""
        return device_name(self.snapshot, self.device.device, self.replay.padding_bytes > 0)

    @property
    def span(self) -> Window:
        """The events in question: the window, or all."""
        return self.window or Window(0, len(self))

    def __len__(self) -> int:
        return len(self.device.trace)

    def curve_at(self, event: int) -> tuple[int, int, int]:
        """(requested, allocated, reserved) bytes just after ``event``."""
        if event < 0:
            replay = self.replay
            return replay.initial_requested_bytes, replay.initial_allocated_bytes, replay.initial_reserved_bytes
        known = self.levels.known.get(event) or self._few.get(event)
        if known is None and not self._curves and len(self._few) < _FEW:  # whole curves are for who asks often
            requested, allocated, reserved = (self._level(which, event) for which in range(3))
            known = self._few[event] = requested, allocated, reserved
        return known or _levels(self.curves, event)

    def _level(self, which: int, event: int) -> int:
        return int(_curve(self.trace, self.replay, which, Window(event, event + 1))[0])

    def peaks(self) -> tuple[Peak, Peak, Peak]:
        """Peaks of (requested, allocated, reserved) over the span; before a trace's first event counts, too."""
        if self.window is None:
            return self.levels.peaks
        if not self._peaks:
            first, stop = self.window
            for which, before in enumerate(self.curve_at(-1)):
                known = self._curves.get(which)
                curve = _curve(self.trace, self.replay, which, self.window) if known is None else known[first:stop]
                self._peaks.append(_peak(curve, before, first))
        requested, allocated, reserved = self._peaks
        return requested, allocated, reserved

    def live_rows(self, event: int) -> I8:
        """Rows of ``allocations`` that hold memory just after ``event``, pending frees included."""
        table = self.allocations
        done = table.free_completed_event
        return np.flatnonzero((table.alloc_event <= event) & ((done < 0) | (done > event)))

    def held_rows(self, event: int) -> I8:
        """Those of them that the program has not given up."""
        rows = self.live_rows(event)
        return rows[~self.pending(rows, event)]

    def rows_within(self) -> I8:
        """Rows of ``allocations`` that hold memory at any event of the span; without a window, all."""
        table = self.allocations
        if self.window is None:
            return np.arange(len(table))
        first, stop = self.window
        done = table.free_completed_event
        return np.flatnonzero((table.alloc_event < stop) & ((done < 0) | (done > first)))

    def pending(self, rows: I8, event: int) -> Bool:
        """Which of those live rows were given up by the program but not yet taken back by the allocator."""
        requested = self.allocations.free_requested_event[rows]
        return (requested >= 0) & (requested <= event) | ((requested < 0) & self._pending_before(rows))

    def _pending_before(self, rows: I8) -> Bool:
        initial = self.replay.initial_pending
        pending = np.zeros(len(rows), dtype=np.bool_)
        early = rows < len(initial)
        pending[early] = initial[rows[early]]
        return pending

    def time_us(self, event: int) -> int | None:
        """Time of an event in µs since the Unix epoch; None where the file has none."""
        times = self.trace.time_us
        return None if times is None or not 0 <= event < len(times) else int(times[event])

    @property
    def oom_events(self) -> list[int]:
        """Events of the span at which a request was refused."""
        first, stop = self.span
        return (np.flatnonzero(self.trace.action[first:stop] == Action.OOM) + first).tolist()


@dataclass(frozen=True, slots=True)
class At:
    """A chosen event and how it was chosen: ``kind`` is oom, peak, reserved-peak, end or event."""

    kind: str
    event: int
    time_us: int | None


def _levels(curves: Sequence[I8], event: int) -> tuple[int, int, int]:
    requested, allocated, reserved = (int(curve[event]) for curve in curves)
    return requested, allocated, reserved


def _peak(curve: I8, before_bytes: int, first: int) -> Peak:
    """Highest value of a curve that begins with event ``first``; before a trace's first event counts, too."""
    if not len(curve):
        return Peak(before_bytes, -1)
    event = int(np.argmax(curve))
    size_bytes = int(curve[event])
    return Peak(size_bytes, first + event) if first > 0 or size_bytes > before_bytes else Peak(before_bytes, -1)


def build(
    snapshot: Snapshot,
    device: Device,
    on_progress: Callable[[float], None] | None = None,
) -> Timeline:
    """Replay one device and work out its curves.

    Never raises on odd traces: ``replay.exact`` says whether to trust sizes. ``on_progress`` gets the share done.
    """
    replay = replay_device(
        device, snapshot.settings, release_of(snapshot), on_progress, is_npu=other_backend(snapshot) == "npu"
    )
    trace = device.trace
    if not replay.exact and _contradicts(trace, replay):
        notes = tuple(dict.fromkeys((LEVELS_CONTRADICT, *replay.notes)))
        first = max(replay.initial_reserved_bytes, replay.initial_allocated_bytes)
        replay = replace(replay, initial_reserved_bytes=first, notes=notes)
    before_bytes = (replay.initial_requested_bytes, replay.initial_allocated_bytes, replay.initial_reserved_bytes)
    asked = {len(trace) - 1, *np.flatnonzero(trace.action == Action.OOM)[-_REFUSALS:].tolist()} - {-1}
    peaks, levels = [Peak(0, -1)] * 3, [dict[int, int]() for _ in range(3)]
    for which in (2, 0, 1):  # a curve is as large as a column: one after the other, those that are quickly made first
        curve = _curve(trace, replay, which)
        peaks[which] = _peak(curve, before_bytes[which], 0)
        asked |= {peaks[which].event} - {-1}
        levels[which] = {event: int(curve[event]) for event in asked}
        del curve
    for which, known in enumerate(levels):
        for event in asked - known.keys():
            known[event] = int(_curve(trace, replay, which, Window(event, event + 1))[0])
    requested, allocated, reserved = levels
    known_levels = {event: (requested[event], allocated[event], reserved[event]) for event in asked}
    return Timeline(snapshot, device, replay, Levels((peaks[0], peaks[1], peaks[2]), known_levels))


def _contradicts(trace: DeviceTrace, replay: Replay) -> bool:
    """Whether more is allocated than reserved at any time."""
    if replay.initial_reserved_bytes < replay.initial_allocated_bytes:
        return True
    return bool((_curve(trace, replay, 2) < _curve(trace, replay, 1)).any())


def _curve(trace: DeviceTrace, replay: Replay, which: int, span: Window | None = None) -> I8:
    """Requested (0), allocated (1) or reserved (2) bytes after each event of a span, or of all: a running sum of what
    each adds or takes.

    Where the file contradicts itself, reserved is at least allocated.
    """
    table, span = replay.allocations, span or Window(0, len(trace))
    requested, block, born = table.requested_bytes, table.block_bytes, table.alloc_event
    if which == 0:
        start = replay.initial_requested_bytes
        return _from_start(span, start, (born, requested), (table.free_completed_event, -requested))
    if which == 1:
        # A row stops counting as allocated at its free request, or at its completion if none is recorded.
        until = np.where(table.free_requested_event >= 0, table.free_requested_event, table.free_completed_event)
        until[: len(replay.initial_pending)][replay.initial_pending] = -1  # not allocated any more when the trace began
        return _from_start(span, replay.initial_allocated_bytes, (born, block), (until, -block))
    events = replay.segment_events
    kind, size = trace.action[events], trace.size[events]
    grows = (kind == Action.SEGMENT_ALLOC) | (kind == Action.SEGMENT_MAP)
    start = int(replay.initial_segments.total_size.sum())
    reserved = _from_start(span, start, (events, np.where(grows, size, -size)))
    contradicts = LEVELS_CONTRADICT in replay.notes
    return np.maximum(reserved, _curve(trace, replay, 1, span), out=reserved) if contradicts else reserved


def _from_start(span: Window, start: int, *changes: tuple[I4 | I8, I8]) -> I8:
    """:func:`running`, where ``start`` is the level before the trace."""
    if span.first > 0:
        sums = [amounts[(events >= 0) & (events < span.first)].sum() for events, amounts in changes]
        start = int(np.array([start, *sums], np.int64).sum())
    return running(span, start, *changes)


def running(span: Window, start: int, *changes: tuple[I4 | I8, I8]) -> I8:
    """A level just after each event of the span: ``start``, and what each (events, amounts) adds; events outside the
    span are left out."""
    first, stop = span
    level = np.zeros(stop - first, dtype=np.int64)
    for events, amounts in changes:
        for low in range(0, len(events), _AT_ONCE):  # other threads, a screen's say, run in between
            some, sizes = events[low : low + _AT_ONCE], amounts[low : low + _AT_ONCE]
            inside = (some >= first) & (some < stop)
            np.add.at(level, some[inside] - first, sizes[inside])
    for low in range(0, len(level), _AT_ONCE):
        part = level[low : low + _AT_ONCE]
        part[0] += start
        start = int(np.cumsum(part, out=part)[-1])
    return level


def choose_event(timeline: Timeline, at: str | None) -> At:
    """The event that ``--at`` names: peak, reserved-peak, end, oom or a number; None means oom if there is one.

    Else it means the peak, or, where no history was recorded, the end. Raises UsageError for an event out of range,
    NoAnswerError for ``oom`` where none was recorded.
    """
    first, stop = timeline.span
    ooms = timeline.oom_events
    kind = ("oom" if ooms else "peak" if len(timeline) else "end") if at is None else at
    if kind == "peak":
        event = timeline.peaks()[1].event
    elif kind == "reserved-peak":
        event = timeline.peaks()[2].event
    elif kind == "end":
        event = stop - 1
    elif kind == "oom":
        if not ooms:
            where = f" in events {first}:{stop}" if timeline.window else ""
            raise NoAnswerError(f"no out-of-memory event was recorded{where}; use --at peak, end or an event number")
        event = ooms[-1]  # a program that went on after an earlier refusal died, if at all, of the last one
    else:
        try:
            event = int(kind.replace(",", ""))  # as it is printed
        except ValueError:
            raise UsageError(f"not an event: {kind!r}") from None
        if timeline.window and not first <= event < stop:
            raise UsageError(f"event {event}: outside the events {first}:{stop} in question")
        if not -1 <= event < stop:
            raise UsageError(f"no event {event}: the trace has events 0 to {stop - 1} (-1 is the state before them)")
        kind = "event"
    return At(kind, event, timeline.time_us(event))
