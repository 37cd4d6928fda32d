"""Plans that make a run fit, the lines to change for common trainers, and the ladder as a waterfall."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from memtrace.estimate.fit import FitPlan
from memtrace.estimate.forecast import Forecast
from memtrace.estimate.ladder import Rung
from memtrace.units import format_bytes, format_delta

_BAR = 40
# Option -> trainer -> the line to change; {now} is the new value, {quoted} its names in quotes, {times} by how much M,
# the micro-batches of a step, grows.
LINES: dict[str, dict[str, str]] = json.loads(
    Path(__file__).with_name("trainer_lines.json").read_text(encoding="utf-8")
)


def render_fit(as_is: Forecast, plans: Sequence[FitPlan], rungs: Sequence[Rung], notes: Sequence[str]) -> list[str]:
    """All of it."""
    limit = as_is.config.limit_bytes
    most = "" if limit is None else f" under {format_bytes(limit)}"
    if as_is.fits:
        seen = " in the one step that was looked at" if len(as_is.steps) == 1 else ""
        lines = [f"It fits as it is{seen}{most}: peak reserved {format_bytes(as_is.peak_reserved_bytes)}."]
    else:
        step = as_is.oom.step if as_is.oom is not None else -1
        lines = [f"As it is, the run dies in step {step}{most}." if step >= 0 else f"As it is, loading fails{most}."]
        lines += ["", "No plan was found that fits."] if not plans else []
    for number, plan in enumerate(plans, 1):
        lines += ["", *_plan(number, plan)]
    if rungs:
        lines += ["", *render_ladder(rungs)]
    return [*lines, "", *(f"note: {note}" for note in notes)] if notes else lines


def _plan(number: int, plan: FitPlan) -> list[str]:
    time = f"steps take about {plan.time_share:.0%} longer" if plan.time_share > 0 else "no slower"
    other = "; another training" if any(move.alters for move in plan.moves) else ""
    lines = [
        f"plan {number}: peak reserved {format_bytes(plan.forecast.peak_reserved_bytes)}, "
        f"{format_bytes(plan.margin_bytes)} to spare; {time}{other}"
    ]
    for change in plan.changes:
        lines.append(f"  {change.option}: {change.was} → {change.now}  ({change.why})")
        quoted = ", ".join(f'"{name}"' for name in change.now.split(","))
        times = -(-int(change.was) // int(change.now)) if change.option == "micro-batch" else 1
        for trainer, line in LINES[change.option].items():
            lines.append(f"    {trainer:<14} {line.format(now=change.now, quoted=quoted, times=times)}")
    return lines


def render_ladder(rungs: Sequence[Rung]) -> list[str]:
    """A waterfall: each bar begins where the one above it ended."""
    whole = sum(rung.adds_bytes for rung in rungs)
    top = max(whole, 1)
    lines = ["what each option adds (a fair share over all orders; requested bytes of the longest micro-batch)"]
    at = 0
    for rung in rungs:
        low, high = sorted((at, at + rung.adds_bytes))
        start, stop = (round(_BAR * max(0, min(edge, top)) / top) for edge in (low, high))
        bar = " " * start + "█" * max(stop - start, 1)
        lines.append(f"  {rung.option:<24}{format_delta(rung.adds_bytes):>12}  {bar}")
        at += rung.adds_bytes
    return [*lines, f"  {'the whole':<24}{format_bytes(whole):>12}  {'█' * _BAR}"]
