"""A part of a long recording straight from the cache: what lies outside is neither read nor held.

Arrays with one entry an event keep their full length, so that event numbers mean the same; outside the part they are
zeros that were never written, which take no memory.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator.replay.initial import InitialBlocks
from memtrace.allocator.replay.replay import Replay
from memtrace.allocator.replay.segments import InitialSegments
from memtrace.analysis import Analysis
from memtrace.attribution.classify import as_known
from memtrace.cache.checkpoints import Known
from memtrace.history.timeline import Allocations, Timeline, Window, curves_of
from memtrace.ranges import window_of
from memtrace.snapshot.model import Action, Device, DeviceTrace, Snapshot

_UNUSED = {"context": -1, "user_metadata": 0, "compile_context": 0, "category": 0}  # no answer about a part needs them
_BY_EVENT = ("block_bytes", "free_requested_event", "free_completed_event", "is_small", "pool")


class Part:
    """Takes what is needed of one device."""

    def __init__(self, device: Device, replay: Replay, known: Known) -> None:
        self._device, self._replay, self._known = device, replay, known
        self._points = known.checkpoints
        self._count = len(device.trace)

    def analysis(self, snapshot: Snapshot, events: str | None, steps: str | None) -> Analysis:
        """What concerns the part: budgets, curves, allocations, layouts. Facts on which rules decide are not whole."""
        phases, points = self._known.phases, self._points
        window = window_of(events, steps, self._count, phases, snapshot.source)
        at = int(np.searchsorted(points.event, window.first, side="right")) - 1
        self._span = Window(int(points.event[at]), window.stop)
        trace = self._make_trace()
        rule, table, replay = self._make_table(at, trace)
        device = replace(self._device, trace=trace)
        before = (int(points.levels[0][at]), int(points.levels[1][at]), int(points.levels[2][at]))
        requested, allocated, reserved = map(
            self._stretch, curves_of(trace, replay.initial_blocks.pending, table, self._span, before)
        )
        part = replace(snapshot, devices=(device,))
        timeline = Timeline(part, device, replay, table, replay.pools, requested, allocated, reserved, window)
        return Analysis(timeline, as_known(timeline, rule, self._known.labelled, phases), self._known.caveats)

    def _stretch(self, part: NDArray[Any]) -> NDArray[Any]:
        """An array of the trace's length that holds ``part`` at the span."""
        whole = np.zeros(self._count, dtype=part.dtype)
        whole[self._span.first : self._span.stop] = part
        return whole

    def _make_trace(self) -> DeviceTrace:
        trace, span = self._device.trace, slice(*self._span)
        values: dict[str, Any] = {}
        for each in fields(DeviceTrace):
            value = getattr(trace, each.name)
            if each.name in _UNUSED and value is not None:
                value = np.broadcast_to(np.int32(_UNUSED[each.name]), (self._count,))
            elif isinstance(value, np.ndarray):
                value = self._stretch(value[span])
            values[each.name] = value
        outside = np.full(self._count, int(Action.UNKNOWN), dtype=np.uint8)  # changes nothing
        outside[span] = values["action"][span]
        return DeviceTrace(**values | {"action": outside})

    def _make_table(self, at: int, trace: DeviceTrace) -> tuple[NDArray[np.int16], Allocations, Replay]:
        """What is live at the checkpoint and all that is allocated from there on: (rules, table, replay)."""
        points, span = self._points, slice(*self._span)
        live = slice(*points.first_live[at : at + 2].tolist())
        made = np.flatnonzero(trace.action[span] == Action.ALLOC)
        row = int(points.row[at])
        streams = np.array(trace.streams or (0,), dtype=np.int64)
        new = {
            "alloc_event": made + self._span.first,
            "address": trace.address[span][made],
            "requested_bytes": trace.size[span][made],
            "stream": streams[trace.stream[span][made]],
            "stack": trace.stack[span][made],
            **{name: getattr(self._replay, name)[span][made] for name in _BY_EVENT},
        }
        table = Allocations(
            **{
                each.name: np.concatenate([getattr(points.live, each.name)[live], new[each.name]])
                for each in fields(Allocations)
            }
        )
        rules = np.concatenate([points.live_rule[live], self._known.rule[row : row + len(made)]])
        return rules, table, self._make_replay(at, points.live_row[live], trace)

    def _make_replay(self, at: int, rows: NDArray[np.int64], trace: DeviceTrace) -> Replay:
        """As if the trace began at the checkpoint; levels and notes are those of the whole."""
        replay, span = self._replay, slice(*self._span)
        blocks, segments = replay.initial_blocks, self._points.segments
        early = rows[rows < len(blocks)]
        mapped = slice(*self._points.first_segment[at : at + 2].tolist())
        changed: dict[str, Any] = {name: self._stretch(getattr(replay, name)[span]) for name in _BY_EVENT}
        return replace(
            replay,
            initial_blocks=InitialBlocks(**{f.name: getattr(blocks, f.name)[early] for f in fields(InitialBlocks)}),
            initial_segments=InitialSegments(
                **{f.name: getattr(segments, f.name)[mapped] for f in fields(InitialSegments)}
            ),
            is_expandable=(trace.action == Action.SEGMENT_MAP) | (trace.action == Action.SEGMENT_UNMAP),
            **changed,
        )
