"""A plain PyTorch snapshot cut to a range of events, at pickle protocol 4, which every viewer opens.

The kept events are the recorded dictionaries, untouched. The segments are rebuilt as they were just after the last of
them, since viewers (and memtrace) work backwards from the final state; what was live before the first is in there.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, Any

import numpy as np

from memtrace.allocator.export import Frames, WrittenBlock, frames_of, segment_of
from memtrace.errors import NoAnswerError
from memtrace.history.layout import State, layout_at
from memtrace.history.timeline import Timeline, build
from memtrace.snapshot.decoder.decode import decode
from memtrace.snapshot.load import decoding, from_raw
from memtrace.snapshot.model import DEFAULT_POOL, Action, Snapshot

_PROTOCOL = 4  # PyTorch's web viewer reads 2 to 4; Python 3.14 would write 5
_STATES = {
    State.FREE: "inactive",
    State.ALLOCATED: "active_allocated",
    State.PENDING_FREE: "active_pending_free",
}


@dataclass(frozen=True, slots=True)
class RawRecording:
    """A snapshot in both forms: as recorded, and as columns."""

    raw: dict[str, Any]
    snapshot: Snapshot


def read_recording(source: str | os.PathLike[str]) -> RawRecording:
    """Read a snapshot and keep what was recorded. Raises SnapshotError like :func:`memtrace.snapshot.load.load`."""
    with decoding(source) as opened:
        raw = decode(opened.stream, opened.head, opened.name)
        if isinstance(raw, list):
            raw = {"segments": raw, "device_traces": []}
        copied = dict(raw) if isinstance(raw, dict) else raw  # from_raw may empty the lists it is given
        if isinstance(copied, dict) and isinstance(copied.get("device_traces"), list):
            copied["device_traces"] = [list(t) if isinstance(t, list) else t for t in copied["device_traces"]]
        return RawRecording(raw, from_raw(copied, opened.name))


def cut(recording: RawRecording, timeline: Timeline, first: int, stop: int) -> dict[str, Any]:
    """The recording's events ``first`` to ``stop - 1`` of the timeline's device, with the state they led to.

    The range is widened where it would cut an operation in two. Other devices are cut to the same span of time, and
    left out where no times were recorded. Raises NoAnswerError where the recording could not be replayed exactly, since
    the state inside it is then not known.
    """
    raw, snapshot = recording.raw, recording.snapshot
    times = timeline.trace.time_us
    span = None if times is None else (int(times[first]), int(times[stop - 1]))
    traces: list[list[Any]] = [[] for _ in raw.get("device_traces") or []]
    segments: list[dict[str, Any]] = []
    stacks = frames_of(snapshot.stacks)
    for device in snapshot.devices:
        if device.device == timeline.device.device:
            line, low, high = timeline, first, stop
        elif span is None or device.trace.time_us is None:
            continue
        else:
            line = build(snapshot, device)
            low, high = np.searchsorted(device.trace.time_us, [span[0], span[1] + 1]).tolist()
        low, high = _whole_operations(line, low, high)
        if not line.replay.exact:
            raise NoAnswerError(
                f"{snapshot.source}: the state at a cut is not known, since the allocator's behaviour could not be "
                f"reproduced ({line.replay.why})"
            )
        segments += _segments(line, high - 1, stacks)
        traces[device.device] = _in_order(raw["device_traces"][device.device])[low:high]
    made = {"segments": segments, "device_traces": traces}
    kept = {key: value for key, value in raw.items() if key not in made}
    if "external_annotations" in raw:
        notes = kept.pop("external_annotations") or []
        kept["external_annotations"] = [note for note in notes if span is None or _within(note, span)]
    return made | kept


def write_snapshot(snapshot: dict[str, Any] | list[Any], out: IO[bytes]) -> None:
    """Pickle at protocol 4."""
    pickle.dump(snapshot, out, protocol=_PROTOCOL)


_SEGMENT = (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE, Action.SEGMENT_MAP, Action.SEGMENT_UNMAP)


def _whole_operations(timeline: Timeline, first: int, stop: int) -> tuple[int, int]:
    """The range widened to whole operations: a free's request and the completion right after it, and the driver calls
    in front of the allocation they were made for."""
    trace = timeline.trace

    def inside(at: int) -> bool:
        if not 0 < at < len(trace):
            return False
        pair = trace.action[at - 1] == Action.FREE_REQUESTED and trace.action[at] == Action.FREE_COMPLETED
        return bool(trace.action[at - 1] in _SEGMENT or (pair and trace.address[at - 1] == trace.address[at]))

    while inside(first):
        first -= 1
    while inside(stop):
        stop += 1
    return first, stop


def _in_order(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events as the columns have them: by time where the ring was rotated wrongly, else as recorded."""
    times = [event.get("time_us", 0) for event in events]
    if all(a <= b for a, b in pairwise(times)):
        return events
    return sorted(events, key=lambda event: int(event["time_us"]))


def _within(note: Any, span: tuple[int, int]) -> bool:
    time_us = note.get("time_us") if isinstance(note, dict) else None
    return isinstance(time_us, int) and span[0] <= time_us <= span[1]


def _segments(timeline: Timeline, event: int, stacks: Frames) -> list[dict[str, Any]]:
    """The device's segments just after ``event``, in the form PyTorch dumps them."""
    layout, table = layout_at(timeline, event), timeline.allocations
    origin = _segment_stacks(timeline, event)

    def block(number: int) -> WrittenBlock:
        row = int(layout.row[number])
        requested, frames = (int(table.requested_bytes[row]), stacks(int(table.stack[row]))) if row >= 0 else (0, [])
        state = _STATES[State(int(layout.block_state[number]))]
        return int(layout.block_address[number]), int(layout.block_bytes[number]), requested, state, frames

    segments = []
    for number in range(len(layout)):
        pool, address = int(layout.pool[number]), int(layout.address[number])
        segments.append(
            segment_of(
                timeline.device.device,
                address,
                int(layout.total_bytes[number]),
                [block(i) for i in range(int(layout.first_block[number]), int(layout.first_block[number + 1]))],
                small=bool(layout.is_small[number]),
                expandable=bool(layout.is_expandable[number]),
                stream=int(layout.stream[number]),
                pool=layout.pools[pool] if 0 <= pool < len(layout.pools) else DEFAULT_POOL,
                frames=stacks(origin.get(address, -1)),
            )
        )
    return segments


def _segment_stacks(timeline: Timeline, event: int) -> dict[int, int]:
    """Address -> stack in which the segment there was made: from its event, or from the file's final segments."""
    trace, segments = timeline.trace, timeline.device.segments
    made = dict(zip(segments.address.tolist(), segments.stack.tolist(), strict=True))
    grown = np.flatnonzero((trace.action == Action.SEGMENT_ALLOC) | (trace.action == Action.SEGMENT_MAP))
    for e in grown[grown <= event].tolist():
        made[int(trace.address[e])] = int(trace.stack[e])
    return made
