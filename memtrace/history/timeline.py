"""A device's history: one row an allocation, and the three curves at every event, exact to the byte.

``Timeline`` is built once from a snapshot by replaying the allocator (block sizes are not in the trace) and is what
everything above reads. "At event E" means the state just after event E; E = -1 is the state before the trace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator.config import AllocatorConfig, from_snapshot, release_of
from memtrace.allocator.replay.replay import Replay, replay_device
from memtrace.errors import NoAnswerError, UsageError
from memtrace.snapshot.model import Action, Device, DeviceTrace, PoolId, Snapshot
from memtrace.snapshot.version import names_npu

I8 = NDArray[np.int64]
I4 = NDArray[np.int32]
Bool = NDArray[np.bool_]
NEVER = np.int64(1) << 62  # later than any event
LEVELS_CONTRADICT = (
    "the file contradicts itself: more is allocated than was ever reserved; what is reserved is shown as at least what "
    "is allocated, and fragmentation is not known"
)


@dataclass(frozen=True, slots=True)
class Allocations:
    """One row an allocation: first what was live before the trace (``alloc_event`` -1), then in order of events.

    Events are -1 where they never happened. Between ``free_requested_event`` and ``free_completed_event`` the memory
    is pending: no longer the program's, not yet the allocator's. ``stack`` is where it was allocated (-1 unknown).
    """

    alloc_event: I8
    free_requested_event: I8
    free_completed_event: I8
    address: I8
    requested_bytes: I8
    block_bytes: I8
    stream: I8  # raw handles
    is_small: Bool
    pool: I4  # indexes Timeline.pools, -1 unknown
    stack: I4

    def __len__(self) -> int:
        return len(self.address)


class Window(NamedTuple):
    """Events ``first <= event < stop`` of a trace."""

    first: int
    stop: int


class Peak(NamedTuple):
    """Highest value of a curve over the window and the first event that reached it (-1: before the trace)."""

    size_bytes: int
    event: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """History of one device. Curves have one entry an event: bytes just after it.

    With a ``window``, peaks, refusals and the choice of an event are about its events only; indices stay the trace's.
    """

    snapshot: Snapshot
    device: Device
    replay: Replay
    allocations: Allocations
    pools: tuple[PoolId, ...]
    requested_bytes: I8
    allocated_bytes: I8
    reserved_bytes: I8
    window: Window | None = None
    _peaks: list[Peak] = field(default_factory=list, init=False, repr=False, compare=False)  # once they are known

    @property
    def trace(self) -> DeviceTrace:
        """The recorded events."""
        return self.device.trace

    @property
    def config(self) -> AllocatorConfig:
        """The recorded settings, with the rounding of the back end that wrote the file."""
        return replace(from_snapshot(self.snapshot.settings), padding_bytes=self.replay.padding_bytes)

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
        return int(self.requested_bytes[event]), int(self.allocated_bytes[event]), int(self.reserved_bytes[event])

    def peaks(self) -> tuple[Peak, Peak, Peak]:
        """Peaks of (requested, allocated, reserved) over the span; before a trace's first event counts, too."""
        if not self._peaks:
            curves = (self.requested_bytes, self.allocated_bytes, self.reserved_bytes)
            found = [_peak(curve, before, self.span) for curve, before in zip(curves, self.curve_at(-1), strict=True)]
            self._peaks[:] = found
        requested, allocated, reserved = self._peaks
        return requested, allocated, reserved

    def live_rows(self, event: int) -> I8:
        """Rows of ``allocations`` that hold memory just after ``event``, pending frees included."""
        table = self.allocations
        done = table.free_completed_event
        return np.flatnonzero((table.alloc_event <= event) & ((done < 0) | (done > event)))

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
        initial = self.replay.initial_blocks
        pending = np.zeros(len(rows), dtype=np.bool_)
        early = rows < len(initial.address)
        pending[early] = initial.pending[rows[early]]
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


def _peak(curve: I8, before: int, span: Window) -> Peak:
    if span.stop == span.first:
        return Peak(before, -1)
    event = span.first + int(np.argmax(curve[span.first : span.stop]))
    size_bytes = int(curve[event])
    return Peak(size_bytes, event) if span.first > 0 or size_bytes > before else Peak(before, -1)


def build(
    snapshot: Snapshot,
    device: Device,
    replay: Replay | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> Timeline:
    """Replay one device (unless its ``replay`` is known) and tabulate it.

    Never raises on odd traces: ``replay.exact`` says whether to trust sizes. ``on_progress`` gets the share done.
    """
    replay = replay or replay_device(
        device, snapshot.settings, release_of(snapshot), on_progress, is_npu=names_npu(snapshot)
    )
    trace, initial = device.trace, replay.initial_blocks
    events = np.flatnonzero(trace.action == Action.ALLOC)
    before = len(initial.address)
    streams = np.array(trace.streams or (0,), dtype=np.int64)

    def joined(first: NDArray[Any], then: NDArray[Any], kind: type) -> NDArray[Any]:
        return np.concatenate([first.astype(kind, copy=False), then.astype(kind, copy=False)])

    table = Allocations(
        alloc_event=joined(np.full(before, -1), events, np.int64),
        free_requested_event=joined(initial.free_requested_event, replay.free_requested_event[events], np.int64),
        free_completed_event=joined(initial.free_completed_event, replay.free_completed_event[events], np.int64),
        address=joined(initial.address, trace.address[events], np.int64),
        requested_bytes=joined(initial.requested_bytes, trace.size[events], np.int64),
        block_bytes=joined(initial.block_bytes, replay.block_bytes[events], np.int64),
        stream=joined(initial.stream, streams[trace.stream[events]], np.int64),
        is_small=joined(initial.is_small, replay.is_small[events], np.bool_),
        pool=joined(initial.pool, replay.pool[events], np.int32),
        stack=joined(initial.stack, trace.stack[events], np.int32),
    )
    before_bytes = (replay.initial_requested_bytes, replay.initial_allocated_bytes, replay.initial_reserved_bytes)
    requested, allocated, reserved = curves_of(trace, initial.pending, table, Window(0, len(trace)), before_bytes)
    if not replay.exact and (bool((reserved < allocated).any()) or before_bytes[2] < before_bytes[1]):
        reserved = np.maximum(reserved, allocated)
        first = max(replay.initial_reserved_bytes, replay.initial_allocated_bytes)
        notes = tuple(dict.fromkeys((LEVELS_CONTRADICT, *replay.notes)))
        replay = replace(replay, initial_reserved_bytes=first, notes=notes)
    return Timeline(snapshot, device, replay, table, replay.pools, requested, allocated, reserved)


def curves_of(
    trace: DeviceTrace, pending: Bool, table: Allocations, window: Window, before_bytes: tuple[int, int, int]
) -> tuple[I8, I8, I8]:
    """(requested, allocated, reserved) after each event of the window: running sums of what each adds or takes away.

    ``before_bytes`` are the levels just before it; ``pending`` tells of the table's first rows which were no longer
    allocated when the trace began.
    """
    first, stop = window

    def running(start: int, *changes: tuple[I8, I8]) -> I8:
        delta = np.zeros(stop - first, dtype=np.int64)
        for events, amounts in changes:
            happened = (events >= first) & (events < stop)
            np.add.at(delta, events[happened] - first, amounts[happened])
        np.cumsum(delta, out=delta)
        delta += start
        return delta

    action, size = trace.action[first:stop], trace.size[first:stop]
    grown = np.flatnonzero((action == Action.SEGMENT_ALLOC) | (action == Action.SEGMENT_MAP))
    shrunk = np.flatnonzero((action == Action.SEGMENT_FREE) | (action == Action.SEGMENT_UNMAP))
    requested, block = table.requested_bytes, table.block_bytes
    return (
        running(
            before_bytes[0],
            (table.alloc_event, requested),
            (table.free_completed_event, -requested),
        ),
        running(
            before_bytes[1],
            (table.alloc_event, block),
            (_allocated_until(table, pending), -block),
        ),
        running(before_bytes[2], (grown + first, size[grown]), (shrunk + first, -size[shrunk])),
    )


def _allocated_until(table: Allocations, pending: Bool) -> I8:
    """Event at which a row stops counting as allocated: its free request, or its completion if none is recorded."""
    requested = table.free_requested_event
    until = np.where(requested >= 0, requested, table.free_completed_event)
    until[: len(pending)][pending] = -1  # was no longer allocated when the trace began
    return until


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
