"""A recording, or a step log, played as if it ran: the same messages and the same state. For demos and tests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from memtrace.analysis import Analysis
from memtrace.answers.fragmentation import measure
from memtrace.answers.report import report
from memtrace.answers.steps import StepSeries, read_log, read_series
from memtrace.answers.tokens import tokens_of, vector_bytes
from memtrace.attribution.phases import Phase
from memtrace.errors import NoAnswerError
from memtrace.history.timeline import At
from memtrace.live.alarms import Alarm, FreePieces, judge
from memtrace.live.protocol import VERSION, Message
from memtrace.live.state import LiveState
from memtrace.snapshot.model import Action
from memtrace.units import format_bytes

_COLUMNS = ("step", "time_us", "allocated_bytes", "reserved_bytes", "peak_allocated_bytes", "tokens", "holes_bytes")


class PlayedRun:
    """Plays one step a ``poll``. ``capacity_bytes`` overrides the limit that the recording tells, if any;
    ``capacity_is`` says in words where it is from. Raises NoAnswerError for a recording without steps."""

    def __init__(self, analysis: Analysis | None, log: Path | None = None, capacity_bytes: int | None = None,
                 capacity_is: str = "the limit given") -> None:  # fmt: skip
        self.analysis = analysis
        self.state = LiveState(str(log) if analysis is None else analysis.timeline.snapshot.source)
        self._capacity, self._capacity_is = capacity_bytes, capacity_is
        self._rows: list[dict[str, int]] = []
        if analysis is not None and not (analysis.attribution.facts.phases.step >= 0).any():
            why = "no step was recorded, so there is nothing to play; memtrace explain says what happened"
            raise NoAnswerError(f"{self.state.name}: {why}")
        self._messages = self._of_log(log) if analysis is None and log is not None else self._of_recording()

    def poll(self, timeout_s: float) -> bool:
        """The next step, after waiting that long."""
        time.sleep(timeout_s)
        for message in self._messages:
            self.state.take(message)
            if message["type"] == "now":
                return True
        self.state.take({"type": "bye"})
        return False

    def order(self, do: str, **details: Any) -> None:
        """A recording can't be asked for more than it holds: a snapshot is the recording itself."""
        answer = {"file": self.state.name} if do == "snapshot" and self.analysis is not None else {}
        self.state.take({"type": "done", "do": do} | (answer or {"error": "a recording is played; nothing runs"}))

    def close(self) -> None:
        """Nothing to do."""

    def _hello(self, extra: dict[str, Any]) -> Message:
        kept = {key: extra.get(key) for key in ("torch", "gpu", "device", "pid", "rank", "world_size")}
        return (
            {"type": "hello", "version": VERSION, "columns": [*_COLUMNS], "peaks_are_of_steps": True}
            | kept
            | ({} if self._capacity is None else {"capacity_is": self._capacity_is})
        )

    def _of_log(self, log: Path) -> Iterator[Message]:
        yield self._hello({})
        series = read_log(log)
        for number in range(len(series)):
            holes = series.holes_bytes
            row = {name: int(getattr(series, name)[number]) for name in ("step", "allocated_bytes", "reserved_bytes")}
            row |= {"peak_allocated_bytes": int(series.peak_allocated_bytes[number])}
            row |= {"tokens": int(series.tokens[number]), "time_us": number * 1_000_000}
            row |= {"holes_bytes": int(holes[number])} if holes is not None else {}
            yield from self._step(row, None, {"capacity_bytes": self._capacity})

    def _of_recording(self) -> Iterator[Message]:
        assert self.analysis is not None
        timeline, phases = self.analysis.timeline, self.analysis.attribution.facts.phases
        snapshot = timeline.snapshot
        yield self._hello({**snapshot.memtrace, "device": timeline.device.device})
        limits = [snapshot.noted_bytes(name) for name in ("limit_bytes", "device_total_bytes")]
        capacity = self._capacity or min((size for size in limits if size is not None), default=None)
        numbers, stop = sorted({int(step) for step in phases.step if step >= 0}), len(timeline)
        if timeline.oom_events:
            stop = timeline.oom_events[-1] + 1
        elif len(numbers) > 1 and Phase.BACKWARD not in phases.phase[phases.step == numbers[-1]]:
            stop = int(phases.start[:-1][phases.step == numbers.pop()].min())  # what came after the last step
        starts = [int(phases.start[:-1][phases.step == number].min()) for number in numbers] + [stop]
        vectors = vector_bytes(self.analysis, starts[0])
        for number, (low, high) in zip(numbers, pairwise(starts), strict=True):
            if high <= low:
                continue
            last = At("event", high - 1, timeline.time_us(high - 1))
            pieces = measure(timeline, self.analysis.attribution, last)
            asked = timeline.trace.size[low:high][timeline.trace.action[low:high] == Action.ALLOC]
            room = 1 << 62 if capacity is None else capacity - pieces.reserved_bytes + pieces.cached_segments_bytes
            free = FreePieces(int(asked.max(initial=0)), pieces.largest_free_block_bytes, room)
            peak = low + int(np.argmax(timeline.allocated_bytes[low:high]))
            at_peak = report(self.analysis, At("event", peak, timeline.time_us(peak)))
            died = bool(timeline.oom_events) and high == stop
            if not died:  # what a step that was broken off holds is no growth
                self.state.look(self.analysis, report(self.analysis, last), "step", number)
            self.state.look(self.analysis, at_peak, "peak", number)
            row = {
                "step": number, "time_us": last.time_us or number, "allocated_bytes": pieces.allocated_bytes,
                "reserved_bytes": int(timeline.reserved_bytes[low:high].max()),
                "peak_allocated_bytes": int(timeline.allocated_bytes[peak]),
                "tokens": tokens_of(self.analysis, low, high, vectors) or 0, "holes_bytes": pieces.holes_bytes,
            }  # fmt: skip
            names = ("requested", "allocated", "reserved")
            levels = dict(zip(names, timeline.curve_at(high - 1), strict=True))
            curves = (timeline.requested_bytes, timeline.allocated_bytes, timeline.reserved_bytes)
            highest = {f"peak_{n}_bytes": int(c[:high].max()) for n, c in zip(names, curves, strict=True)}
            says: dict[str, Any] = {f"{name}_bytes": size for name, size in levels.items()} | highest
            says |= {"inactive_split_bytes": pieces.holes_bytes, "capacity_bytes": capacity, "stacks": True}
            says["active_bytes"] = levels["allocated"] + pieces.pending_free_bytes
            says["phases"] = self._phases(low, high)
            refused_bytes = int(timeline.trace.size[high - 1]) if died else None
            yield from self._step(row, free, says, refused_bytes)

    def _phases(self, low: int, high: int) -> list[dict[str, Any]]:
        """Allocated bytes at each phase's end and its peak, within a step."""
        assert self.analysis is not None
        phases, level = self.analysis.attribution.facts.phases, self.analysis.timeline.allocated_bytes
        found: dict[str, dict[str, Any]] = {}
        for index in range(len(phases)):
            start, stop = max(int(phases.start[index]), low), min(int(phases.start[index + 1]), high)
            if start < stop:
                name, peak = Phase(int(phases.phase[index])).label, int(level[start:stop].max())
                before = found.get(name, {"peak_bytes": 0})["peak_bytes"]
                found[name] = {"name": name, "end_bytes": int(level[stop - 1]), "peak_bytes": max(peak, before)}
        return list(found.values())

    def _step(self, row: dict[str, int], free: FreePieces | None, says: dict[str, Any],
              refused_bytes: int | None = None) -> Iterator[Message]:  # fmt: skip
        self._rows.append(row)
        series: StepSeries = read_series(self._rows)
        if not all("holes_bytes" in each for each in self._rows):
            series = replace(series, holes_bytes=None)
        alarms = judge(series, says.get("capacity_bytes"), free)
        if refused_bytes is not None:
            line = (
                f"step {row['step']} asked for {format_bytes(refused_bytes)} and was refused; memtrace explain says why"
            )
            alarms = (Alarm("oom", row["step"], line, row["step"]), *alarms)
        yield {"type": "rows", "rows": [[row.get(name, 0) for name in _COLUMNS]]}
        levels = {
            name: row[name] for name in _COLUMNS if name.endswith("_bytes") and name != "holes_bytes" and name in row
        }
        says = levels | {"step": row["step"], "time_us": row["time_us"]} | says
        yield says | {"type": "now", "phase": "between", "alarms": [asdict(alarm) for alarm in alarms]}
