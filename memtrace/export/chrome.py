"""The Trace Event Format (JSON) that chrome://tracing and Perfetto open: counters, phases, ranges, OOMs.

``ts`` is in microseconds since the first event, whose time since the epoch stands in ``otherData``: JSON numbers can't
hold nanoseconds since 1970.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

import orjson

from memtrace._version import __version__
from memtrace.export.tracks import Tracks

_PHASES, _RANGES = 1, 2  # thread numbers


def write_chrome(tracks: Tracks, name: str, out: IO[bytes]) -> None:
    """Write the trace, one event a line."""
    base_ns = int(tracks.time_ns[0])
    since = base_ns if tracks.has_times else 0
    other = {"producer": f"memtrace {__version__}", "file": name, "baseTimeNanoseconds": since}
    out.write(b'{"displayTimeUnit":"ns","otherData":' + orjson.dumps(other) + b',"traceEvents":[')
    for number, event in enumerate(_events(tracks, name, base_ns)):
        out.write((b",\n" if number else b"\n") + orjson.dumps(event))
    out.write(b"\n]}\n")


def _events(tracks: Tracks, name: str, base_ns: int) -> Iterator[dict[str, Any]]:
    pid = tracks.device
    yield _label("process_name", pid, 0, f"{tracks.device_name}: {name}")
    yield _label("thread_name", pid, _PHASES, "phases")
    if tracks.ranges:
        yield _label("thread_name", pid, _RANGES, "recorded ranges")
    for thread, category, slices in ((_PHASES, "phase", tracks.phases), (_RANGES, "range", tracks.ranges)):
        for piece in slices:
            args = {key: value for key in ("event", "step") if (value := getattr(piece, key)) is not None}
            yield {
                "ph": "X", "name": piece.name, "cat": category, "pid": pid, "tid": thread,
                "ts": (piece.start_ns - base_ns) / 1000, "dur": (piece.end_ns - piece.start_ns) / 1000, "args": args,
            }  # fmt: skip
    for time_ns, number, asked_bytes in tracks.ooms:
        args, ts = {"event": number, "asked_bytes": asked_bytes}, (time_ns - base_ns) / 1000
        head = {"ph": "i", "s": "p", "name": "out of memory", "cat": "oom", "pid": pid, "tid": _PHASES}
        yield {**head, "ts": ts, "args": args}
    for title, group in (("memory by category (bytes)", tracks.categories), ("memory (bytes)", tracks.levels)):
        for time_ns, values in tracks.changes(*group.values()):
            args = dict(zip(group, values, strict=True))
            yield {"ph": "C", "name": title, "pid": pid, "ts": (time_ns - base_ns) / 1000, "args": args}


def _label(kind: str, pid: int, tid: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": text}}
