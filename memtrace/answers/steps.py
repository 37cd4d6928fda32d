"""Does memory grow from step to step, or do only the sequence lengths vary? Answered from the light per-step log.

What is allocated when a step has ended doesn't depend on how long its sequences were: growth there is a leak. A step's
peak does depend on them, so what tokens explain is taken out first. Reserved memory only ever rises to new heights;
heights reached together with a new longest sequence are the sequences' doing, the others fragmentation's.
Trends are Theil–Sen slopes, tested by Mann–Kendall on block medians; both stand single spikes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import erfc, sqrt
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memtrace.analysis import Analysis
from memtrace.answers.tokens import tokens_of, vector_bytes
from memtrace.errors import NoAnswerError
from memtrace.frozen import dataclass
from memtrace.units import format_bytes, format_delta

F8 = NDArray[np.float64]
MIN_STEPS = 12
_WARM_UP = 2  # optimizer states appear in the first step, some workspaces in the second
_BLOCKS = 240  # medians of this many blocks go into slope and test
_P_VALUE = 0.001
_SHARE = 0.005  # growth below this share of the peak is nobody's problem
_LEAST_BYTES = 8 << 20
_TOO_MANY = 1 << 62  # no card, and no count of tokens


@dataclass(frozen=True, slots=True)
class StepSeries:
    """The log's columns, one entry a step; bytes and tokens. ``tokens`` is all 0 where shapes weren't seen."""

    step: F8
    allocated_bytes: F8
    reserved_bytes: F8
    peak_allocated_bytes: F8
    tokens: F8
    holes_bytes: F8 | None = None  # free in segments that are partly in use, when the step has ended

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True, slots=True)
class Trend:
    """Growth of one curve after warm-up: bytes a step, over all steps, and the p-value of there being none."""

    per_step_bytes: float
    total_bytes: int
    p_value: float

    @property
    def certain(self) -> bool:
        """Whether chance is ruled out; size is judged elsewhere."""
        return self.p_value < _P_VALUE and self.per_step_bytes > 0


@dataclass(frozen=True, slots=True)
class Drift:
    """The verdict: ``steady``, ``lengths`` (peaks follow the sequence lengths), ``growth`` (allocated memory grows
    step by step), ``fragmentation`` (reserved grows, allocated does not), or ``unclear`` (peaks grow and the lengths
    are unknown).

    ``allocated`` is the trend of what lives after a step, ``peak`` that of the peak with tokens taken out.
    ``explained_share`` of the peak's variance is the tokens'; ``reserved_by_lengths_bytes`` of reserved growth too.
    """

    verdict: str
    steps: int
    allocated: Trend
    peak: Trend
    per_token_bytes: float
    explained_share: float
    reserved_growth_bytes: int
    reserved_by_lengths_bytes: int
    because: tuple[str, ...]


def read_series(rows: Sequence[Mapping[str, Any]]) -> StepSeries:
    """The series of log rows (as mappings by column). Raises NoAnswerError for rows that aren't a step log."""
    try:
        columns = {
            name: np.array([_count(row[name]) for row in rows], dtype=np.float64)
            for name in ("step", "allocated_bytes", "reserved_bytes", "peak_allocated_bytes")
        }
        tokens = np.array([_count(row.get("tokens") or 0) for row in rows], dtype=np.float64)
        holes = [row.get("holes_bytes") for row in rows]
        known = None if None in holes else np.array([_count(size) for size in holes], dtype=np.float64)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NoAnswerError(f"not a per-step log: {str(error)[:100]}") from None
    return StepSeries(**columns, tokens=tokens, holes_bytes=known)


def _count(value: Any) -> float:
    """Bytes, tokens or a step's number. Raises ValueError for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _TOO_MANY:
        raise ValueError(f"{value!r:.60} is no count")
    return float(value)


def from_snapshot_key(steps: Any) -> StepSeries:
    """The series in a snapshot's extra key (``{"columns": […], "rows": [[…]…]}``). Raises NoAnswerError."""
    if not isinstance(steps, Mapping) or not isinstance(steps.get("rows"), Sequence) or not steps["rows"]:
        raise NoAnswerError("the recording carries no per-step log; memtrace run --step-log keeps one")
    try:
        rows = [dict(zip(steps.get("columns") or (), row, strict=False)) for row in steps["rows"]]
    except TypeError as error:
        raise NoAnswerError(f"not a per-step log: {error}") from None
    return read_series(rows)


def from_recording(analysis: Analysis) -> StepSeries:
    """The series of a recording whose steps were recognised: what is allocated when a step has ended, its peak, and the
    tokens of its largest pass. A step that was not recorded to its end is left out. Raises NoAnswerError."""
    timeline, phases = analysis.timeline, analysis.attribution.facts.phases
    numbers = sorted({int(step) for step in phases.step if step >= 0})
    starts = [int(phases.start[:-1][phases.step == number].min()) for number in numbers]
    if len(numbers) <= MIN_STEPS:
        raise NoAnswerError(
            f"{timeline.snapshot.source}: carries no per-step log (memtrace run --step-log keeps one), and "
            f"{max(len(numbers) - 1, 0)} whole steps are too few to tell growth from noise; {MIN_STEPS} are needed"
        )
    vectors = vector_bytes(analysis, starts[0])
    tokens = [tokens_of(analysis, low, high, vectors) or 0 for low, high in pairwise(starts)]
    allocated, reserved = timeline.allocated_bytes, timeline.reserved_bytes
    return StepSeries(
        step=np.array(numbers[:-1], dtype=np.float64),
        allocated_bytes=np.array([allocated[high - 1] for high in starts[1:]], dtype=np.float64),
        reserved_bytes=np.array([reserved[low:high].max() for low, high in pairwise(starts)], dtype=np.float64),
        peak_allocated_bytes=np.array([allocated[low:high].max() for low, high in pairwise(starts)], dtype=np.float64),
        tokens=np.array(tokens if all(tokens) else [0] * len(tokens), dtype=np.float64),
    )


def read_log(path: Path) -> StepSeries:
    """The series in a ``.jsonl`` step log: rows under a line with their columns. Raises NoAnswerError."""
    try:
        head, *rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        return read_series([dict(zip(head["columns"], row, strict=True)) for row in rows])
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise NoAnswerError(f"{path}: not a per-step log ({error})") from None


def analyse(series: StepSeries) -> Drift:
    """The verdict on a run. Raises NoAnswerError for fewer than a dozen steps."""
    if len(series) < MIN_STEPS:
        raise NoAnswerError(f"{len(series)} steps are too few to tell growth from noise; {MIN_STEPS} are needed")
    late = slice(_WARM_UP, None)
    step, tokens, peak = series.step[late], series.tokens[late], series.peak_allocated_bytes[late]
    per_token, share = explained(tokens, peak, step)
    allocated = trend(step, series.allocated_bytes[late])
    rest = trend(step, peak - per_token * tokens)
    grown, by_lengths = _reserved(series.reserved_bytes[late], tokens)
    least = max(_LEAST_BYTES, _SHARE * float(series.peak_allocated_bytes.max()))
    known = bool(np.ptp(tokens) > 0)
    verdict = _verdict(allocated, rest, grown - by_lengths, least, share, known, bool(tokens.any()))
    return Drift(
        verdict=verdict,
        steps=len(series),
        allocated=allocated,
        peak=rest,
        per_token_bytes=per_token,
        explained_share=share,
        reserved_growth_bytes=grown,
        reserved_by_lengths_bytes=by_lengths,
        because=tuple(_because(verdict, allocated, rest, per_token, share, grown, by_lengths)),
    )


def _verdict(
    allocated: Trend, rest: Trend, loose_bytes: int, least: float, share: float, varied: bool, seen: bool
) -> str:
    if allocated.certain and allocated.total_bytes > least:
        return "growth"
    if rest.certain and rest.total_bytes > least:
        return "growth" if seen else "unclear"
    if loose_bytes > 4 * least:
        return "fragmentation" if seen else "unclear"
    return "lengths" if varied and share > 0.5 else "steady"


def _because(
    verdict: str, allocated: Trend, rest: Trend, per_token: float, share: float, grown: int, by_lengths: int
) -> list[str]:
    lines = [
        f"{what}: {trend.per_step_bytes:+,.0f} B a step ({format_delta(trend.total_bytes)} in all, "
        f"p = {trend.p_value:.2g})"
        for what, trend in (("after a step", allocated), ("peak, tokens taken out", rest))
    ]
    if per_token:
        lines.append(f"tokens explain {share:.0%} of the peak's variance, {per_token:,.0f} B a token")
    lines.append(f"reserved rose by {format_bytes(grown)}, {format_bytes(by_lengths)} of it with a new longest batch")
    if verdict == "unclear":
        lines.append("batch shapes weren't seen: longer sequences or growth, the log can't say")
    return lines


def trend(step: F8, values: F8) -> Trend:
    """Theil–Sen slope and two-sided Mann–Kendall p-value of ``values`` over ``step``, on block medians."""
    x, y = _blocks(step, values)
    first, second = np.triu_indices(len(x), 1)
    rise = y[second] - y[first]
    slope = float(np.median(rise / (x[second] - x[first])))
    score = float(np.sign(rise).sum())
    n = len(x)
    ties = np.unique(y, return_counts=True)[1].astype(np.float64)
    variance = (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    p_value = erfc(max(abs(score) - 1, 0) / sqrt(2 * variance)) if variance > 0 else 1.0
    return Trend(slope, round(slope * float(step[-1] - step[0])), p_value)


def _blocks(step: F8, values: F8) -> tuple[F8, F8]:
    """Medians of consecutive blocks, so that a long run costs no more than a short one."""
    if len(step) <= _BLOCKS:
        return step, values
    edges = np.linspace(0, len(step), _BLOCKS + 1).astype(np.int64).tolist()
    # Of so few numbers at a time numpy's median takes ten times as long, beside a program's steps (memtrace live).
    x, y = ([median(part[a:b]) for a, b in pairwise(edges)] for part in (step.tolist(), values.tolist()))
    return np.array(x), np.array(y)


def explained(tokens: F8, peak: F8, step: F8) -> tuple[float, float]:
    """Bytes a token, step held constant, and the share of the peak's variance that tokens explain."""
    if not np.ptp(tokens) > 0 or not np.ptp(peak) > 0:
        return 0.0, 0.0
    columns = np.array([np.ones_like(step), tokens / tokens.max(), (step - step[0]) / max(step[-1] - step[0], 1)]).T
    solution = np.linalg.lstsq(columns, peak, rcond=None)[0]
    per_token = float(solution[1] / tokens.max())
    left = float(np.var(peak - per_token * tokens))
    return per_token, max(0.0, 1 - left / float(np.var(peak)))


def _reserved(reserved: F8, tokens: F8) -> tuple[int, int]:
    """(growth of reserved memory to new heights, the part of it in steps whose batch was the longest so far)."""
    rises = np.diff(np.maximum.accumulate(reserved))
    longer = np.diff(np.maximum.accumulate(tokens)) > 0
    return int(rises.sum()), int(rises[longer].sum())


def render(found: Drift) -> list[str]:
    """The verdict in words."""
    words = {
        "steady": "steady: no growth",
        "lengths": "no growth: the peaks follow the sequence lengths",
        "growth": "GROWTH: memory rises from step to step",
        "fragmentation": "FRAGMENTATION: reserved memory rises, allocated memory does not",
        "unclear": "unclear",
    }
    return [f"{words[found.verdict]} ({found.steps} steps)", *(f"  {line}" for line in found.because)]
