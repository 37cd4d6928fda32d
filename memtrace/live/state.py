"""What is known of a watched program, and the view of it that text, JSON and terminal show."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from memtrace.analysis import Analysis
from memtrace.answers.report import Report, top_sites
from memtrace.answers.steps import StepSeries, read_series, trend
from memtrace.attribution.categories import Category
from memtrace.history.timeline import At
from memtrace.live.alarms import headroom_bytes, steady_rise
from memtrace.live.metrics import GAUGES
from memtrace.live.protocol import Message

HOUR_US = 3_600_000_000
_ROWS, _SECONDS = 20_000, 3_600
_RATE_STEPS = 40
_GROWING = 8  # call sites
_LEAST_COLUMNS = {"step", "time_us", "allocated_bytes", "reserved_bytes", "peak_allocated_bytes"}
_COLUMNS = {*_LEAST_COLUMNS, *GAUGES}
_MOST = 1 << 62  # no card has so many bytes, no run so many steps
_MOST_CHARACTERS = 200
# What is taken from a program, by the kind it must have: it may be none of memtrace's at all.
_ABOUT: Mapping[str, type] = {
    "version": int, "pid": int, "rank": int, "world_size": int, "device": int, "device_total_bytes": int,
    "limit_bytes": int, "started_us": int, "torch": str, "gpu": str, "capacity_is": str, "peaks_are_of_steps": bool,
    "argv": list,
}  # fmt: skip
_PHASE: Mapping[str, type] = {"name": str, "end_bytes": int, "peak_bytes": int}
_ALARM: Mapping[str, type] = {"id": str, "step": int, "line": str, "oom_step": int}
_DONE: Mapping[str, type] = {"do": str, "error": str, "file": str, "wait_s": float, "stacks": bool, "phase": str}
_COUNTERS = (
    "requested_bytes", "allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes",
    "peak_requested_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "device_free_bytes", "device_total_bytes",
    "limit_bytes", "capacity_bytes", "time_us", "step", "retries",
)  # fmt: skip
_JSON_KEYS = (  # of a view, beside those of a report
    "pid", "step", "phase", "rate_bytes_per_step", "headroom_bytes", "forecast_oom_step", "seconds_per_step", "now",
    "looked_at", "looked_step", "growing", "alarms", "outside", "ended",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Growing:
    """A call site that holds more after each step. ``per_step_bytes`` between the two steps looked at."""

    category: str
    subcategory: str
    frame: str
    per_step_bytes: float
    bytes: int


@dataclass(frozen=True, slots=True)
class LiveView:
    """A running program at a glance. Bytes, µs, steps; None where unknown.

    ``headroom_bytes`` is the capacity less the highest allocated bytes of the last steps; ``forecast_oom_step`` where a
    steady rise would end. ``report`` is of the moment at which the blocks were last looked at.
    ``curves`` has (time_us, allocated, reserved, peak allocated) of the last hour.
    """

    pid: int
    name: str
    about: Mapping[str, Any]
    now: Mapping[str, Any]
    step: int
    phase: str
    series: StepSeries
    curves: Sequence[tuple[int, int, int, int]]
    rate_bytes_per_step: int
    headroom_bytes: int | None
    forecast_oom_step: int | None
    seconds_per_step: float | None
    report: Report | None
    looked_at: str
    looked_step: int
    growing: Sequence[Growing]
    alarms: Sequence[Mapping[str, Any]]
    outside: Sequence[Mapping[str, Any]]
    ended: bool

    def as_json(self) -> dict[str, Any]:
        """One object: the keys of ``report``, and those of a program that runs."""
        own = {name: getattr(self, name) for name in _JSON_KEYS} | {"rank": self.about.get("rank")}
        if self.report is None:
            return self._from_counters() | own
        levels = ("requested_bytes", "allocated_bytes", "reserved_bytes")
        peaks = {name: self.now.get(f"peak_{name}", self.report.peaks[name]) for name in levels}
        return asdict(self.report) | {"peaks": peaks} | own

    def _from_counters(self) -> dict[str, Any]:
        """The keys of ``report`` where nothing was looked at: what is allocated has no category then."""
        now = {name: int(self.now.get(name) or 0) for name in _COUNTERS}
        allocated, reserved = now["allocated_bytes"], now["reserved_bytes"]
        categories = dict.fromkeys(map(str, Category), 0)
        categories |= {Category.UNATTRIBUTED: allocated, Category.FRAGMENTATION: reserved - allocated}
        reason = {"reason": "only counters were read", "bytes": allocated, "count": 1}
        levels = ("requested_bytes", "allocated_bytes", "reserved_bytes")
        return {
            "file": self.name, "device": self.about.get("device", 0), "at": At("end", -1, now["time_us"] or None),
            **{name: now[name] for name in levels}, "categories": categories,
            "subcategories": {f"{name}/unknown": size for name, size in categories.items() if size},
            "outside_allocator": None, "peaks": {name: now[f"peak_{name}"] for name in levels},
            "attribution": {"attributed_bytes": 0, "unattributed_bytes": allocated, "unattributed": [reason]},
            "top": [], "fragmentation": None, "warnings": [],
        }  # fmt: skip


@dataclass
class LiveState:
    """Takes messages in and gives views. Values of the wrong kind in a message are left out."""

    name: str
    about: dict[str, Any] = field(default_factory=dict)
    now: dict[str, Any] = field(default_factory=dict)
    phase: str = ""
    rows: deque[dict[str, int]] = field(default_factory=lambda: deque(maxlen=_ROWS))
    seconds: deque[tuple[int, int, int, int]] = field(default_factory=lambda: deque(maxlen=_SECONDS))
    alarms: list[dict[str, Any]] = field(default_factory=list)
    outside: list[dict[str, Any]] = field(default_factory=list)
    done: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=20))  # answers to orders
    report: Report | None = None
    looked: tuple[str, int] = ("", -1)  # at which moment of which step
    after_steps: deque[tuple[int, dict[tuple[str, str, str], int]]] = field(default_factory=lambda: deque(maxlen=60))
    ended: bool = False
    _columns: list[str] = field(default_factory=list)

    def take(self, message: Message) -> None:
        """One message of the program's."""
        kind = message.get("type")
        if kind == "hello":
            self.about = _known(message, _ABOUT)
            self.about["argv"] = [word for word in self.about["argv"] or () if type(word) is str]
            self._columns = list(map(str, _list(message.get("columns"))))
        elif kind == "rows":
            for row in _list(message.get("rows")):
                found = {name: cell for name, cell in zip(self._columns, _list(row), strict=False) if name in _COLUMNS}
                if found.keys() >= _LEAST_COLUMNS and all(_fits(cell, int) and cell >= 0 for cell in found.values()):
                    self.rows.append(found)
        elif kind == "now":
            self.now = {key: message[key] for key in _COUNTERS if _fits(message.get(key), int)}
            self.now["stacks"] = message.get("stacks") is True
            self.now["phases"] = [_known(each, _PHASE) for each in _list(message.get("phases"))]
            self.phase = str(message.get("phase", ""))[:_MOST_CHARACTERS]
            alarms = [_known(each, _ALARM) for each in _list(message.get("alarms"))]
            self.alarms = [alarm for alarm in alarms if alarm["id"] and alarm["line"]]
            counters = ("time_us", "allocated_bytes", "reserved_bytes", "peak_allocated_bytes")
            time_us, allocated, reserved, peak = (self.now.get(name, 0) for name in counters)
            self.seconds.append((time_us, allocated, reserved, peak))
        elif kind == "done":
            self.done.append({key: value for key, value in _known(message, _DONE).items() if value is not None})
        elif kind == "bye":
            self.ended = True

    def take_answers(self) -> list[dict[str, Any]]:
        """Answers to orders that nobody has seen yet."""
        answers: list[dict[str, Any]] = []
        with contextlib.suppress(IndexError):  # another thread may take them, too
            while True:
                answers.append(self.done.popleft())
        return answers

    def look(self, analysis: Analysis, report: Report, moment: str, step: int) -> None:
        """What the blocks were at a moment of a step."""
        self.report, self.looked = report, (moment, step)
        if moment == "step":
            sizes = Counter[tuple[str, str, str]]()
            for site in top_sites(analysis, analysis.timeline.live_rows(report.at.event)):
                sizes[site.category, site.subcategory, site.frame] += site.bytes
            self.after_steps.append((step, sizes))

    def view(self) -> LiveView:
        """As things are."""
        series = read_series(self.rows)
        capacity = self.now.get("capacity_bytes")
        rise = steady_rise(series, capacity)
        rate = 0.0
        if len(series) > 2:
            rate = trend(series.step[-_RATE_STEPS:], series.allocated_bytes[-_RATE_STEPS:]).per_step_bytes
        headroom = headroom_bytes(series, capacity)
        if not len(series) and capacity is not None:
            headroom = capacity - self.now.get("peak_allocated_bytes", 0)
        end = None
        if rise is not None and rise.left_steps < float("inf"):
            end = int(series.step[-1]) + round(max(rise.left_steps, 0))
        times = [row["time_us"] for row in list(self.rows)[-_RATE_STEPS:] if "time_us" in row]
        took = [after - before for before, after in pairwise(times)]
        return LiveView(
            pid=self.about.get("pid") or 0,
            name=self.name,
            about=self.about,
            now=self.now,
            step=int(self.now.get("step", 0)),
            phase=self.phase,
            series=series,
            curves=self._curves(),
            rate_bytes_per_step=round(rise.per_step_bytes if rise is not None else rate),
            headroom_bytes=headroom,
            forecast_oom_step=end,
            seconds_per_step=median(took) / 1e6 if took else None,
            report=self.report,
            looked_at=self.looked[0],
            looked_step=self.looked[1],
            growing=growing(self.after_steps),
            alarms=self.alarms,
            outside=self.outside,
            ended=self.ended,
        )

    def _curves(self) -> list[tuple[int, int, int, int]]:
        """Step by step where there are steps, else second by second; the last hour."""
        names = ("time_us", "allocated_bytes", "reserved_bytes", "peak_allocated_bytes")
        rows = [tuple(row.get(name, 0) for name in names) for row in self.rows] if len(self.rows) > 1 else self.seconds
        since = (rows[-1][0] if rows else time.time_ns() // 1000) - HOUR_US
        return [row for row in rows if row[0] >= since]  # type: ignore[misc]


def _list(value: Any) -> list[Any]:
    return value if type(value) is list else []


def _fits(value: Any, kind: type) -> bool:
    return type(value) is kind and (type(value) is not int or -_MOST < value < _MOST)


def _known(found: Any, kinds: Mapping[str, type]) -> dict[str, Any]:
    """The values of a dictionary that are of their kind; None in the place of others, texts cut."""
    known = {}
    for name, kind in kinds.items():
        value = found.get(name) if isinstance(found, dict) else None
        value = value[:_MOST_CHARACTERS] if type(value) is str else value
        known[name] = value if _fits(value, kind) else None
    return known


def growing(after_steps: Sequence[tuple[int, dict[tuple[str, str, str], int]]]) -> list[Growing]:
    """Call sites that hold more after the last step looked at than after the first one, most a step first."""
    if len(after_steps) < 2 or after_steps[-1][0] <= after_steps[0][0]:
        return []
    (first, before), (last, after) = after_steps[0], after_steps[-1]
    found = [
        Growing(*key, (size - before.get(key, 0)) / (last - first), size)
        for key, size in after.items()
        if size > before.get(key, 0)
    ]
    return sorted(found, key=lambda site: -site.per_step_bytes)[:_GROWING]
