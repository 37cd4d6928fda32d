"""Limits for continuous integration: how far a peak may grow, or how high it may be.

A growth limit is a share (``2%``) of the baseline or a size (``200MiB``). A check fails when something is *above* its
limit; a byte below or on it passes. It also fails where the two runs can't be compared (another GPU, another model),
unless that is allowed by name, and always where memory ran out: a run that died early needs less for that alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from memtrace.answers.report import Report
from memtrace.attribution.categories import Category
from memtrace.errors import NoAnswerError, SnapshotError, UsageError
from memtrace.frozen import dataclass
from memtrace.history.timeline import Timeline
from memtrace.snapshot.model import Action
from memtrace.units import MIB, format_bytes, format_delta, parse_size, printable

PEAKS = ("allocated", "reserved")
CONDITIONS = ("device", "event", "gpu", "limit", "torch", "packages", "configuration", "model")
_SAME_WEIGHTS = 0.01  # of the base weights: a model with more or fewer is another one
_LONGEST = 200
LARGEST_BYTES = 256 << 20
_SHARE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*%\s*")


@dataclass(frozen=True, slots=True)
class Growth:
    """A limit on growth: a share of the baseline and a size, one of which is 0."""

    share: float = 0.0
    size_bytes: int = 0

    def allowed_bytes(self, baseline_bytes: int) -> int:
        """Bytes that a value may grow by from this baseline."""
        return self.size_bytes + int(self.share * baseline_bytes)


@dataclass(frozen=True, slots=True)
class GateResult:
    """One limit and how it was met. ``baseline_bytes`` is None for a fixed limit."""

    what: str
    baseline_bytes: int | None
    current_bytes: int
    limit_bytes: int
    passed: bool

    @property
    def sentence(self) -> str:
        """``peak_reserved: 5.81 GiB → 6.33 GiB (+538.0 MiB, +9.0%), limit 5.93 GiB: FAILED``."""
        now, limit = format_bytes(self.current_bytes), format_bytes(self.limit_bytes)
        end = f"limit {limit}: {'passed' if self.passed else 'FAILED'}"
        if self.baseline_bytes is None:
            return f"{self.what}: {now}, {end}"
        delta = self.current_bytes - self.baseline_bytes
        percent = f", {delta / self.baseline_bytes:+.1%}" if self.baseline_bytes else ""
        return f"{self.what}: {format_bytes(self.baseline_bytes)} → {now} ({format_delta(delta)}{percent}), {end}"


def must_have_history(timeline: Timeline) -> None:
    """Raise NoAnswerError for a recording of the final state only: it has no peaks to judge."""
    if not len(timeline):
        raise NoAnswerError(f"{timeline.snapshot.source}: no history was recorded, so its peaks are not known")


def ran_out(timeline: Timeline) -> str | None:
    """A line for a recording of a run that ran out of memory: its peaks are not those of a whole run."""
    refused = timeline.oom_events
    if not refused and not timeline.snapshot.memtrace.get("oom"):
        return None
    where = f" (event {refused[-1]:,})" if refused else ""
    return f"{timeline.snapshot.source} ran out of memory{where}: FAILED"


def died(timeline: Timeline) -> bool:
    """Whether the last request of a run was refused."""
    action = timeline.trace.action
    asked = np.flatnonzero((action == Action.ALLOC) | (action == Action.OOM))
    return bool(len(asked)) and bool(action[asked[-1]] == Action.OOM)


def parse_growth(text: str) -> Growth:
    """A limit from ``2%`` or ``200MiB``. Raises UsageError on anything else, and for a number that lacks its unit."""
    share = _SHARE.fullmatch(text)
    if share:
        return Growth(share=float(share[1]) / 100)
    try:
        size_bytes = parse_size(text)
    except UsageError:
        raise UsageError(f"not a limit: {text!r} (write 2% or 200MiB)") from None
    if 0 < size_bytes < MIB and not text.strip()[-1].isalpha():
        number = text.strip()
        raise UsageError(f"{number} is {format_bytes(size_bytes)}: did you mean {number}%, {number}MiB or {number}B?")
    return Growth(size_bytes=size_bytes)


def judge(what: str, baseline_bytes: int, current_bytes: int, growth: Growth) -> GateResult:
    """Whether ``current_bytes`` is within ``growth`` of the baseline."""
    limit = baseline_bytes + growth.allowed_bytes(baseline_bytes)
    return GateResult(what, baseline_bytes, current_bytes, limit, current_bytes <= limit)


def judge_peaks(
    baseline: Mapping[str, int], current: Mapping[str, int], growth: Growth, which: Sequence[str] = PEAKS
) -> list[GateResult]:
    """Each chosen peak (``allocated``, ``reserved``) against its baseline; both maps are ``Report.peaks``."""
    return [judge(f"peak {name}", baseline[f"{name}_bytes"], current[f"{name}_bytes"], growth) for name in which]


def at_most(peak_bytes: int, limit_bytes: int | None) -> list[GateResult]:
    """The peak of reserved memory against a fixed limit, if there is one."""
    if limit_bytes is None:
        return []
    return [GateResult("peak reserved", None, peak_bytes, limit_bytes, peak_bytes <= limit_bytes)]


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a stored report says, as far as a check needs it. ``conditions`` is None where it says nothing of them."""

    peaks: Mapping[str, int]
    categories: Mapping[str, int]
    conditions: Mapping[str, Any] | None = None
    device: int | None = None
    event: str | None = None


@dataclass(frozen=True, slots=True)
class Comparable:
    """Something that must be alike for two runs to be compared, and how it was met. Values are texts for people."""

    what: str
    baseline: str
    current: str
    allowed: bool

    @property
    def sentence(self) -> str:
        """``gpu: NVIDIA H200 → NVIDIA A100-SXM4-80GB: can't be compared: FAILED (--allow gpu)``."""
        end = "allowed" if self.allowed else f"can't be compared: FAILED (--allow {self.what} compares all the same)"
        return f"{self.what}: {self.baseline} → {self.current}: {end}"


def conditions_of(timeline: Timeline) -> dict[str, Any]:
    """Under what a recording was made, as a baseline carries it; None where the recording does not tell."""
    snapshot, extra = timeline.snapshot, timeline.snapshot.memtrace
    settings = {key: value for key, value in snapshot.config.items() if key != "argv"}
    return {
        "gpu": extra.get("gpu"),
        "limit": extra.get("limit_bytes"),
        "torch": extra.get("torch") or f"{snapshot.torch_at_least or '?'} to {snapshot.torch_below or '?'}",
        "packages": extra.get("packages"),
        "configuration": settings or None,
    }


def differences(
    baseline: Baseline, conditions: Mapping[str, Any], budget: Report, allowed: Collection[str]
) -> list[Comparable]:
    """What keeps two runs from being compared; entries that are allowed by name are among them."""
    found = []

    def compare(what: str, before: Any, now: Any) -> None:
        if before != now:
            found.append(Comparable(what, *_told(before, now), what in allowed))

    compare("device", baseline.device, budget.device)
    compare("event", baseline.event, budget.at.kind)
    for what in ("gpu", "limit", "torch", "packages", "configuration"):
        compare(what, (baseline.conditions or {}).get(what) or None, conditions[what])  # {} of older baselines
    weights = str(Category.BASE_WEIGHTS)
    before, now = baseline.categories.get(weights, 0), budget.categories[weights]
    if abs(now - before) > _SAME_WEIGHTS * before:
        base, current = (f"{format_bytes(size)} of base weights" for size in (before, now))
        found.append(Comparable("model", base, current, "model" in allowed))
    return found


def _told(before: Any, now: Any) -> tuple[str, str]:
    """Two values as short texts: of dictionaries and lists the parts that differ."""
    texts = ["not recorded" if value is None else printable(str(value)) for value in _apart(before, now)]
    first, second = (text if len(text) <= _LONGEST else text[:_LONGEST] + "…" for text in texts)
    return first, second


def _apart(before: Any, now: Any) -> tuple[Any, Any]:
    if isinstance(before, dict) and isinstance(now, dict):
        pairs = {key: _apart(before.get(key), now.get(key)) for key in {**before, **now}}
        pairs = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
        first, second = (
            {key: pair[i] for key, pair in pairs.items() if key in each} for i, each in enumerate((before, now))
        )
        return first, second
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        apart = [_apart(*pair) for pair in zip(before, now, strict=True) if pair[0] != pair[1]]
        return [pair[0] for pair in apart], [pair[1] for pair in apart]
    return before, now


def read_baseline(data: bytes, name: str) -> Baseline:
    """The baseline in the JSON that ``memtrace report --json`` or ``memtrace check --write`` printed.

    Raises SnapshotError with one line if it is anything else.
    """
    import orjson

    try:
        raw: Any = orjson.loads(data)
    except orjson.JSONDecodeError:
        made = "memtrace check RECORDING --write BASE.json makes one of a recording"
        raise SnapshotError(f"{name}: not JSON, so no baseline; {made}") from None
    if not isinstance(raw, dict):
        raise SnapshotError(f"{name}: not a memtrace report (write one with memtrace check FILE --write)")
    peaks = _sizes(raw.get("peaks"), ("allocated_bytes", "reserved_bytes"), name, "peaks")
    known = [str(category) for category in Category]
    categories = _sizes(raw.get("categories"), (), name, "categories", known)
    conditions, device, at = (raw.get(key) for key in ("conditions", "device", "at"))
    under = conditions if isinstance(conditions, dict) else None
    event = at.get("kind") if isinstance(at, dict) else None
    return Baseline(peaks, categories, under, device if isinstance(device, int) else None, event)


def _sizes(value: Any, needed: Sequence[str], name: str, what: str, known: Sequence[str] = ()) -> dict[str, int]:
    if not isinstance(value, dict):
        raise SnapshotError(f"{name}: has no {what!r}, so it is not a memtrace report")
    sizes = {key: size for key, size in value.items() if not known or key in known}
    for key in [key for key in needed if key not in sizes]:
        raise SnapshotError(f"{name}: {what!r} has no {key!r}")
    for key in [key for key, size in sizes.items() if type(size) is not int or size < 0]:
        raise SnapshotError(f"{name}: {what}[{key!r}] is not a size in bytes")
    return sizes


def read_forecast(file: str) -> dict[str, Any] | None:
    """What ``memtrace forecast --json`` wrote; None if ``file`` is anything else."""
    import orjson

    path = Path(file)
    if path.suffix != ".json" or not path.is_file() or path.stat().st_size > LARGEST_BYTES:
        return None
    try:
        found = orjson.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or not {"fits", "oom", "basis", "steps"} <= found.keys():
        return None
    peak, oom = found.get("peak_reserved_bytes"), found["oom"]
    whole = isinstance(peak, int) and (oom is None or (isinstance(oom, dict) and isinstance(oom.get("step"), int)))
    if not whole:
        raise SnapshotError(f"{file}: not a forecast as memtrace writes it")
    return found
