"""The raw material of truth labels: allocations, phases, stamps and call sites of one recorded run."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

Marks = Sequence[tuple[int, str]]
Trace = Sequence[dict[str, Any]]

# Python frames between C++ and the code that asked: dispatch modes, and the custom operators' plumbing.
_PLUMBING = (
    *("_python_dispatch", "/_ops.py", "/_stats.py", "/_compile.py", "/_dynamo/", "/_library/", "/stamps.py"),
    "/capture_standin.py",
)


@dataclass(frozen=True, slots=True)
class Allocation:
    """One allocation of a trace; ``free`` is its ``free_completed`` event or -1."""

    event: int
    free: int
    address: int
    size: int
    time_us: int


@dataclass(frozen=True, slots=True)
class Run:
    """One recorded run. ``identity`` holds (time µs, [(address, truth label)]) in order of time."""

    trace: Trace
    marks: Marks
    identity: Sequence[tuple[int, Sequence[tuple[int, str]]]]


@dataclass(frozen=True, slots=True)
class Stamp:
    """What the stamped run wrote on an event: the calling thread's last operator, and recomputations ended so far."""

    number: int
    inside: bool
    ended: int


class Phases:
    """Phase of a time; ``index`` counts the marks, -1 before the first."""

    def __init__(self, marks: Marks) -> None:
        self.times = [time_us for time_us, _ in marks]
        self.names = [name for _, name in marks]

    def index(self, time_us: int) -> int:
        """Position of the last mark at or before a time (µs)."""
        return bisect.bisect_right(self.times, time_us) - 1

    def name(self, index: int) -> str:
        """The phase's name; what comes before the first mark is loading."""
        return self.names[index] if index >= 0 else "load"

    def is_complete_forward(self, index: int) -> bool:
        """Whether the phase is a forward pass that came to its end: another follows, and no error ended it."""
        return self.name(index) == "forward" and index + 1 < len(self.names) and self.names[index + 1] != "oom"

    def ends(self, trace: Trace) -> list[int]:
        """First event after each phase."""
        times = [entry.get("time_us", 0) for entry in trace]
        later = [bisect.bisect_left(times, time_us) for time_us in self.times[1:]]
        return [*later, len(trace)] if self.times else []


def allocations(trace: Trace) -> list[Allocation]:
    """Every allocation of one device's trace, in order."""
    open_at: dict[int, int] = {}
    rows: list[list[int]] = []
    for event, entry in enumerate(trace):
        action = entry["action"]
        if action == "alloc":
            open_at[entry["addr"]] = len(rows)
            rows.append([event, -1, entry["addr"], entry["size"], entry.get("time_us", 0)])
        elif action == "free_completed":
            row = open_at.pop(entry["addr"], None)
            if row is not None:
                rows[row][1] = event
    return [Allocation(*row) for row in rows]


def stamp(entry: dict[str, Any]) -> Stamp:
    """The stamp of an event: ``"17"`` inside operator 17, ``"17+3"`` after it with three recomputations ended."""
    number, plus, ended = (entry.get("user_metadata") or "-1+").partition("+")
    return Stamp(int(number), not plus, int(ended or 0))


def site(entry: dict[str, Any]) -> str:
    """``file:line:function`` of the innermost Python frame that is not plumbing; empty where there is none."""
    if "site" in entry:
        return str(entry["site"])
    for frame in entry.get("frames") or ():
        path = frame["filename"]
        if path.endswith(".py") and not any(part in path for part in _PLUMBING):
            return f"{PurePosixPath(path).name}:{frame['line']}:{frame['name']}"
    return ""
