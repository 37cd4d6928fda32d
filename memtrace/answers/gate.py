"""Limits for continuous integration: how far a peak may grow, or how high it may be.

A growth limit is a share (``2%``) of the baseline or a size (``200MiB``). A check fails when something is *above* its
limit; a byte below or on it passes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memtrace.attribution.categories import Category
from memtrace.errors import NoAnswerError, SnapshotError, UsageError
from memtrace.history.timeline import Timeline
from memtrace.snapshot.model import Action
from memtrace.units import format_bytes, format_delta, parse_size

PEAKS = ("allocated", "reserved")
_SHARE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*%\s*")


@dataclass(frozen=True, slots=True)
class Growth:
    """A limit on growth: ``share`` of the baseline, or ``size_bytes``; exactly one is given."""

    text: str
    share: float | None
    size_bytes: int | None

    def allowed_bytes(self, baseline_bytes: int) -> int:
        """Bytes that a value may grow by from this baseline."""
        if self.size_bytes is not None:
            return self.size_bytes
        return int((self.share or 0.0) * baseline_bytes)


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


def died(timeline: Timeline) -> tuple[str, ...]:
    """A line for a run whose last request was refused: its peaks are not those of a whole run."""
    action = timeline.trace.action
    asked = np.flatnonzero((action == Action.ALLOC) | (action == Action.OOM))
    if not len(asked) or action[asked[-1]] != Action.OOM:
        return ()
    return (
        f"{timeline.snapshot.source} ends with a refused request (event {int(asked[-1]):,}): a run that died early may "
        "pass for that alone",
    )


def parse_growth(text: str) -> Growth:
    """A limit from ``2%`` or ``200MiB``. Raises UsageError on anything else."""
    share = _SHARE.fullmatch(text)
    if share:
        return Growth(text.strip(), float(share[1]) / 100, None)
    try:
        return Growth(text.strip(), None, parse_size(text))
    except UsageError:
        raise UsageError(f"not a limit: {text!r} (write 2% or 200MiB)") from None


def judge(what: str, baseline_bytes: int, current_bytes: int, growth: Growth) -> GateResult:
    """Whether ``current_bytes`` is within ``growth`` of the baseline."""
    limit = baseline_bytes + growth.allowed_bytes(baseline_bytes)
    return GateResult(what, baseline_bytes, current_bytes, limit, current_bytes <= limit)


def judge_peaks(
    baseline: Mapping[str, int], current: Mapping[str, int], growth: Growth, which: Sequence[str] = PEAKS
) -> list[GateResult]:
    """Each chosen peak (``allocated``, ``reserved``) against its baseline; both maps are ``Report.peaks``."""
    return [
        judge(f"peak {name}", baseline[f"{name}_bytes"], current[f"{name}_bytes"], growth)
        for name in which
        if f"{name}_bytes" in baseline
    ]


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a stored report says, as far as a check needs it."""

    peaks: Mapping[str, int]
    categories: Mapping[str, int]


def read_baseline(data: bytes, name: str) -> Baseline:
    """The baseline in the JSON that ``memtrace report --json`` or ``memtrace check --write`` printed.

    Raises SnapshotError with one line if it is anything else.
    """
    import orjson

    try:
        raw: Any = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise SnapshotError(f"{name}: not JSON ({error})") from None
    if not isinstance(raw, dict):
        raise SnapshotError(f"{name}: not a memtrace report (write one with memtrace check FILE --write)")
    peaks = _sizes(raw.get("peaks"), ("allocated_bytes", "reserved_bytes"), name, "peaks")
    known = [str(category) for category in Category]
    categories = _sizes(raw.get("categories"), (), name, "categories", known)
    return Baseline(peaks, categories)


def _sizes(value: Any, needed: Sequence[str], name: str, what: str, known: Sequence[str] = ()) -> dict[str, int]:
    if not isinstance(value, dict):
        raise SnapshotError(f"{name}: has no {what!r}, so it is not a memtrace report")
    sizes = {key: size for key, size in value.items() if not known or key in known}
    for key in needed:
        if key not in sizes:
            raise SnapshotError(f"{name}: {what!r} has no {key!r}")
    for key, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise SnapshotError(f"{name}: {what}[{key!r}] is not a size in bytes")
    return sizes
