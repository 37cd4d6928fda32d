"""A part of a long recording straight from its index: what lies outside is neither read nor held.

Arrays with one entry an event keep their full length, so that event numbers mean the same; outside the part they are
zeros that were never written, which take no memory.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator.replay.initial import InitialBlocks
from memtrace.allocator.replay.replay import Replay
from memtrace.allocator.replay.segments import InitialSegments
from memtrace.analysis import Analysis
from memtrace.attribution.classify import as_known
from memtrace.attribution.phases import Phases
from memtrace.cache.index import UNUSABLE, indexable, open_index, stored_in
from memtrace.cache.sealed import Sealed
from memtrace.history.timeline import Allocations, Timeline, Window, curves_of
from memtrace.ranges import window_of
from memtrace.snapshot.model import Action, Device, DeviceTrace, Snapshot
from memtrace.snapshot.store import Node

_UNUSED = {"context": -1, "user_metadata": 0, "compile_context": 0, "category": 0}  # no answer about a part needs them


def open_part(
    source: str | os.PathLike[str], device: int | None, events: str | None, steps: str | None
) -> Analysis | None:
    """The analysis of one range of events or steps; None where there is no index that tells it.

    It answers what concerns the part: budgets, curves, allocations, layouts. Facts on which rules decide are not whole.
    Raises UsageError or NoAnswerError for a range that the recording does not have.
    """
    path = indexable(source)
    if path is None:
        return None
    sealed = None
    with contextlib.suppress(*UNUSABLE):
        sealed = open_index(path)
        if sealed is not None:
            return _from_index(sealed, str(path), device, events, steps)
    return None


def _from_index(
    sealed: Sealed, source: str, wanted: int | None, events: str | None, steps: str | None
) -> Analysis | None:
    with contextlib.closing(sealed):
        snapshot, replays, known = stored_in(sealed).root.fields().values()
        head = snapshot.fields()
        devices = {each.fields()["device"].value(): each for each in head.pop("devices").fields().values()}
        number = next(iter(devices)) if wanted is None and len(devices) == 1 else wanted
        replay, about = replays.fields().get(number), known.fields().get(number)
        if number not in devices or replay is None or about is None:
            return None  # the choice of a device needs all of them
        values = {name: node.value() for name, node in head.items()}
        if values["memtrace"].get("config"):
            return None  # the estimate beside the report is of the whole
        part = _Part(devices[number].fields(), replay.fields(), about.fields())
        return part.analysis(values | {"source": source}, events, steps)


class _Part:
    """Reads what is needed of one device."""

    def __init__(self, device: dict[Any, Node], replay: dict[Any, Node], known: dict[Any, Node]) -> None:
        self._device, self._replay, self._known = device, replay, known
        self._trace = device["trace"].fields()
        self._points = known["checkpoints"].fields()
        self._count = self._trace["action"].count()

    def analysis(self, head: dict[str, Any], events: str | None, steps: str | None) -> Analysis:
        """``head`` holds the snapshot's fields but its devices."""
        phases: Phases = self._known["phases"].value()
        window = window_of(events, steps, self._count, phases, head["source"])
        at = int(np.searchsorted(self._points["event"].value(), window.first, side="right")) - 1
        start = int(self._points["event"].value()[at])
        self._span = Window(start, window.stop)
        trace = self._make_trace()
        rule, table, replay = self._make_table(at, trace)
        device = Device(
            self._device["device"].value(), trace, self._device["segments"].value(), self._device["blocks"].value()
        )
        snapshot = Snapshot(**head, devices=(device,))
        before = [int(level.value()[at]) for level in self._points["levels"].fields().values()]
        pending = replay.initial_blocks.pending
        requested, allocated, reserved = map(
            self._stretch, curves_of(trace, pending, table, self._span, (before[0], before[1], before[2]))
        )
        timeline = Timeline(snapshot, device, replay, table, replay.pools, requested, allocated, reserved, window)
        attribution = as_known(timeline, rule, self._known["labelled"].value(), phases)
        return Analysis(timeline, attribution, self._known["caveats"].value())

    def _stretch(self, part: NDArray[Any]) -> NDArray[Any]:
        """An array of the trace's length that holds ``part`` at the span."""
        whole = np.zeros(self._count, dtype=part.dtype)
        whole[self._span.first : self._span.stop] = part
        return whole

    def _read(self, node: Node) -> NDArray[Any]:
        return node.part(*self._span)

    def _make_trace(self) -> DeviceTrace:
        values: dict[str, Any] = {}
        for name, node in self._trace.items():
            if name in _UNUSED:
                values[name] = None if node.is_none() else np.broadcast_to(np.int32(_UNUSED[name]), (self._count,))
            elif node.is_array():
                values[name] = self._stretch(self._read(node))
            else:
                values[name] = node.value()
        outside = np.full(self._count, int(Action.UNKNOWN), dtype=np.uint8)  # changes nothing
        outside[self._span.first : self._span.stop] = values["action"][self._span.first : self._span.stop]
        return DeviceTrace(**values | {"action": outside})

    def _make_table(self, at: int, trace: DeviceTrace) -> tuple[NDArray[np.int16], Allocations, Replay]:
        """What is live at the checkpoint and all that is allocated from there on: (rules, table, replay)."""
        points, replay = self._points, self._replay
        live = slice(*points["first_live"].value()[at : at + 2].tolist())
        rows = points["live_row"].part(live.start, live.stop)
        first, stop = self._span
        made = np.flatnonzero(trace.action[first:stop] == Action.ALLOC)
        row = int(points["row"].value()[at])
        rule = self._known["rule"]
        streams = np.array(trace.streams or (0,), dtype=np.int64)
        of_replay = {
            name: self._read(replay[name])
            for name in ("block_bytes", "free_requested_event", "free_completed_event", "is_small", "pool")
        }
        new = {
            "alloc_event": made + first,
            "address": trace.address[first:stop][made],
            "requested_bytes": trace.size[first:stop][made],
            "stream": streams[trace.stream[first:stop][made]],
            "stack": trace.stack[first:stop][made],
            **{name: column[made] for name, column in of_replay.items()},
        }
        old = points["live"].fields()
        table = Allocations(
            **{
                each.name: np.concatenate([old[each.name].part(live.start, live.stop), new[each.name]])
                for each in fields(Allocations)
            }
        )
        rules = np.concatenate([points["live_rule"].part(live.start, live.stop), rule.part(row, row + len(made))])
        return rules, table, self._make_replay(at, rows, trace, of_replay)

    def _make_replay(
        self, at: int, rows: NDArray[np.int64], trace: DeviceTrace, of_replay: dict[str, NDArray[Any]]
    ) -> Replay:
        """As if the trace began at the checkpoint; levels and notes are those of the whole."""
        blocks: InitialBlocks = self._replay["initial_blocks"].value()
        early = rows[rows < len(blocks)]
        low, high = self._points["first_segment"].value()[at : at + 2].tolist()
        values: dict[str, Any] = {
            name: node.value()
            for name, node in self._replay.items()
            if not node.is_array() and name not in ("initial_blocks", "initial_segments")
        }
        values["initial_blocks"] = InitialBlocks(
            **{each.name: getattr(blocks, each.name)[early] for each in fields(InitialBlocks)}
        )
        values["initial_segments"] = InitialSegments(
            **{name: node.part(low, high) for name, node in self._points["segments"].fields().items()}
        )
        values["is_expandable"] = (trace.action == Action.SEGMENT_MAP) | (trace.action == Action.SEGMENT_UNMAP)
        values |= {name: self._stretch(part) for name, part in of_replay.items()}
        return Replay(**values)
