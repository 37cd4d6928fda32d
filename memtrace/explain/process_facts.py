"""The facts of a refused request from the process it happened in, at that moment: PyTorch's counters and its own trace.

For the recorder. The verdict is that of ``memtrace explain`` on the file that is saved then, without reading the file:
``judge(facts_of_process(snapshot["memtrace"], trace, snapshot["allocator_settings"]))``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from memtrace.allocator.config import from_snapshot
from memtrace.allocator.rounding import round_size, segment_size
from memtrace.attribution.phases import Phase, Phases
from memtrace.explain.course import Course, forward_progress, still_needed
from memtrace.explain.facts import ByteSpan, FactSource, OomFacts, measured

_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_LEAST_LAYERS = 4
_PHASES = {phase.label: phase for phase in Phase}


def facts_of_process(
    extra: Mapping[str, Any], trace: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]
) -> OomFacts:
    """The facts from the snapshot's ``memtrace`` dictionary, the device's trace and the allocator's settings."""
    stats, config = extra["stats"], from_snapshot(settings)
    asked = round_size(int(extra["oom"]["requested_bytes"]), config)
    allocated = int(stats.get("allocated_bytes.all.current", 0))
    reserved = int(stats.get("reserved_bytes.all.current", 0))
    free, total, limit = (extra.get(f"{name}_bytes") for name in ("device_free", "device_total", "limit"))
    course = _course(extra, trace, int(stats.get("requested_bytes.all.current", allocated)))
    event = len(course.level) - 1
    progress = forward_progress(course, event)
    needed = still_needed(course, event, progress)
    return OomFacts(
        source=FactSource.PROCESS,
        **measured(asked=asked, driver_asked=segment_size(asked, config), total=total, limit=limit),
        **measured(allocated=allocated, reserved=reserved, slack=reserved - allocated),
        free=ByteSpan.exactly(free) if free is not None else ByteSpan(0, segment_size(asked, config)),
        still_needed_bytes=max(needed, asked) if needed is not None else None,
        progress=progress,
    )


def layers_by_name(names: Sequence[str]) -> int | None:
    """How many layers parameters are named after (``model.layers.31.mlp.up_proj.weight``); None below four."""
    numbers: dict[str, set[int]] = {}
    for name in names:
        found = _LAYER_NUMBER.search(name)
        if found is not None:
            numbers.setdefault(name[: found.start()], set()).add(int(found[0]))
    most = max(map(len, numbers.values()), default=0)
    return most if most >= _LEAST_LAYERS else None


def _course(extra: Mapping[str, Any], trace: Sequence[Mapping[str, Any]], live_bytes: int) -> Course:
    """What was recorded up to the refusal, which is the last event."""
    events = list(trace)
    while events and events[-1].get("action") in ("oom", "snapshot"):
        events.pop()
    events.append({"action": "oom", "time_us": events[-1].get("time_us", 0) if events else 0})
    action = [event["action"] for event in events]
    is_alloc = np.array([name == "alloc" for name in action], dtype=np.bool_)
    freed = np.array([name == "free_completed" for name in action], dtype=np.bool_)
    size = np.array([event.get("size", 0) for event in events], dtype=np.int64)
    change = np.cumsum(np.where(is_alloc, size, 0) - np.where(freed, size, 0))
    base = live_bytes - int(change[-1])
    phases = _phases(extra["phases"], [int(event.get("time_us", 0)) for event in events])
    start = int(phases.start[-2]) if len(phases) else 0
    return Course(
        is_alloc=is_alloc,
        site=_sites(events, start),
        level=base + change,
        base_bytes=base,
        phases=phases,
        begins=start > 0,
        layers=layers_by_name([row.get("name") or "" for row in extra["labels"]]),
    )


def _sites(events: Sequence[Mapping[str, Any]], start: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """A number for each distinct stack from ``start`` on; events before it don't matter."""
    numbers: dict[object, int] = {}
    sites = np.zeros(len(events), dtype=np.int64)
    for i in range(start, len(events)):
        if events[i]["action"] == "alloc":
            frames = tuple((f["filename"], f["line"]) for f in events[i].get("frames", ()))
            sites[i] = numbers.setdefault(frames, len(numbers))
    return sites


def _phases(marks: Sequence[Mapping[str, Any]], times: Sequence[int]) -> Phases:
    """The recorder's marks as spans of events; marks between which nothing happened leave none."""
    spans: list[tuple[int, Phase, int]] = []
    for mark, at in zip(marks, np.searchsorted(times, [mark["time_us"] for mark in marks]).tolist(), strict=True):
        phase = _PHASES.get(str(mark["name"]), Phase.UNKNOWN)
        if spans and spans[-1][0] == at:
            spans.pop()
        if not spans or spans[-1][1] is not phase:
            spans.append((at if spans else 0, phase, int(mark["step"])))
    return Phases(
        start=np.array([start for start, _, _ in spans] + [len(times)], dtype=np.int64),
        phase=np.array([phase for _, phase, _ in spans], dtype=np.uint8),
        step=np.array([step for _, _, step in spans], dtype=np.int64),
        basis="recorded",
    )
