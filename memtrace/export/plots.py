"""Pictures (SVG, PNG) of a timeline, a comparison, a forecast and a sweep, through matplotlib, an optional package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memtrace.analysis import Analysis
from memtrace.answers.curves import Curves, category_curves, pick_events
from memtrace.answers.diff.comparison import Difference
from memtrace.answers.steps import StepSeries
from memtrace.attribution.categories import Category, category_words
from memtrace.attribution.phases import Phase
from memtrace.errors import MissingDependencyError, UsageError
from memtrace.estimate.forecast import Forecast
from memtrace.estimate.sweep import Outcome, fit, increments
from memtrace.render.words import COLOUR
from memtrace.units import GIB, format_delta, printable
from memtrace.writing import whole_file

_POINTS, _DIFF_POINTS = 6000, 4000
_MOST_STEPS = 40  # that are named
_BLUE, _LIGHT, _RED = "#3b6fb6", "#7aa6c2", "#c0504d"


@contextmanager
def _picture(target: Path, *sources: str, size: tuple[float, float], dpi: int = 100) -> Iterator[Any]:
    """A figure to draw on, written at the end, whole or not at all; never over one of its ``sources``.

    Raises UsageError for another ending than .svg and .png, MissingDependencyError without matplotlib.
    """
    if target.suffix.lower() not in (".svg", ".png"):
        raise UsageError(f"{target}: a plot is written as .svg or .png")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError.of_extra("plots need matplotlib", "plot") from None
    figure = Figure(figsize=size, layout="constrained")
    yield figure
    with whole_file(target, *sources) as out:
        figure.savefig(out, dpi=dpi, format=target.suffix.lower().lstrip("."))


def _name(analysis: Analysis) -> str:
    """The file's name, where dollars would begin a formula and what is not text can't be drawn."""
    return printable(PurePath(analysis.timeline.snapshot.source).name).replace("$", r"\$")


def _stack(axes: Any, analysis: Analysis, curves: Curves, events: NDArray[np.int64]) -> None:
    """The categories, one on the other; a recording of a refusal at the start holds nothing."""
    present = [(number, category) for number, category in enumerate(Category) if curves.categories[number].any()]
    place = events - curves.first
    meaning = analysis.attribution.lora_meaning
    if present:
        axes.stackplot(
            events,
            [curves.categories[number, place] / GIB for number, _ in present],
            labels=[category_words(category, meaning) for _, category in present],
            colors=[COLOUR[category] for _, category in present],
            step="post",
        )
    axes.set_xlim(curves.first, curves.first + max(1, len(curves) - 1))
    axes.set(xlabel="event", ylabel="GiB")


def plot_timeline(analysis: Analysis, curves: Curves, target: Path) -> None:
    """One recording: categories, the reserved level, steps, and refused requests. Raises like :func:`_picture`."""
    events = pick_events(curves, _POINTS)
    with _picture(target, analysis.timeline.snapshot.source, size=(11, 5), dpi=130) as figure:
        axes = figure.subplots()
        _stack(axes, analysis, curves, events)
        reserved = curves.reserved_bytes[events - curves.first] / GIB
        axes.plot(events, reserved, color="black", linewidth=0.9, label="reserved", drawstyle="steps-post")
        axes.set_ylim(0, max(float(curves.reserved_bytes.max()) / GIB * 1.08, 0.01))
        _bands(analysis, axes, curves)
        for event in analysis.timeline.oom_events:
            axes.axvline(event, color="red", linewidth=1.2)
            axes.annotate("OOM", (event, axes.get_ylim()[1]), color="red", ha="right", va="top")
        axes.set_title(f"{_name(analysis)} · {analysis.timeline.device_name}", loc="left")
        axes.legend(loc="upper left", fontsize="small", framealpha=0.85, ncols=2)


def _bands(analysis: Analysis, axes: Any, curves: Curves) -> None:
    """Thin ticks with step numbers where each step's first forward pass begins."""
    phases = analysis.attribution.facts.phases
    beside = {"xytext": (2, 2), "textcoords": "offset points", "fontsize": 6, "rotation": 90}
    seen: set[int] = set()
    for start, phase, step in zip(phases.start[:-1].tolist(), phases.phase.tolist(), phases.step.tolist(), strict=True):
        if phase == Phase.FORWARD and step not in seen and 0 <= start - curves.first < len(curves):
            seen.add(step)
            axes.axvline(start, color="black", linewidth=0.4, alpha=0.4)
            if len(seen) <= _MOST_STEPS:
                axes.annotate(f"step {step}", (start, 0), **beside)


def plot_difference(before: Analysis, after: Analysis, answer: Difference, target: Path) -> None:
    """BEFORE above AFTER on one scale, with the compared events marked. Raises like :func:`_picture`."""
    sources = (each.timeline.snapshot.source for each in (before, after))
    with _picture(target, *sources, size=(11, 7)) as figure:
        axes = figure.subplots(2, 1, sharey=True)
        sides = (("before", before, answer.before.at.event), ("after", after, answer.after.at.event))
        for axis, (name, analysis, event) in zip(axes, sides, strict=True):
            axis.set_title(f"{name}: {_name(analysis)}", loc="left")
            curves = category_curves(analysis)
            if not len(curves):
                axis.text(0.5, 0.5, "no trace was recorded", ha="center", transform=axis.transAxes)
                continue
            events = pick_events(curves, _DIFF_POINTS)
            _stack(axis, analysis, curves, events)
            axis.plot(events, curves.reserved_bytes[events] / GIB, color="black", linewidth=0.8, label="reserved")
            axis.plot(events, curves.allocated_bytes[events] / GIB, color="black", linewidth=0.4, label="allocated")
            axis.axvline(event, color="black", linestyle=":", linewidth=1)
        handles, labels = axes[0].get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="outside right upper", frameon=False)
        change = answer.delta.peak_reserved_bytes
        figure.suptitle(f"peak reserved memory: {format_delta(change) if change else 'unchanged'}")


def plot_forecast(found: Forecast, target: Path) -> None:
    """Reserved and allocated memory over the steps, the limit, the step of death. Raises like :func:`_picture`."""
    with _picture(target, size=(10, 4.5)) as figure:
        axes = figure.subplots()
        at = [step.step for step in found.steps]
        axes.step(at, [s.peak_reserved_bytes / GIB for s in found.steps], where="mid", color=_BLUE, label="reserved")
        axes.step(at, [s.peak_allocated_bytes / GIB for s in found.steps], where="mid", color=_LIGHT, label="allocated")
        if found.config.limit_bytes is not None:
            axes.axhline(found.config.limit_bytes / GIB, color=_RED, linestyle="--", label="limit")
        if found.oom is not None and found.oom.step >= 0:
            needed = found.oom.reserved_bytes + found.oom.requested_bytes
            axes.plot([found.oom.step], [needed / GIB], "x", color=_RED, markersize=10, label="out of memory")
        _of_steps(axes, "highest bytes of the step, GiB")


def plot_steps(series: StepSeries, target: Path) -> None:
    """What is allocated after each step, its peak, and what is reserved. Raises like :func:`_picture`."""
    with _picture(target, size=(10, 4.5)) as figure:
        axes = figure.subplots()
        axes.plot(series.step, series.reserved_bytes / GIB, color=_BLUE, label="reserved")
        axes.plot(series.step, series.peak_allocated_bytes / GIB, color=_LIGHT, label="peak of the step")
        axes.plot(series.step, series.allocated_bytes / GIB, color=_RED, label="allocated after the step")
        _of_steps(axes, "GiB")


def _of_steps(axes: Any, what: str) -> None:
    axes.set(xlabel="step", ylabel=what)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def plot_sweep(outcomes: Sequence[Outcome], target: Path) -> None:
    """What each thing adds, and the peaks over tokens with the fitted line. Raises like :func:`_picture`."""
    with _picture(target, size=(11, 4.5)) as figure:
        left, right = figure.subplots(1, 2)
        increased = increments(outcomes).items()
        added = [(name, size / GIB) for name, size in increased if size is not None and name != "smallest"]
        left.barh([name for name, _ in added], [size for _, size in added], color=_BLUE)
        left.invert_yaxis()
        left.set_xlabel("added to the allocated peak, GiB")
        found = fit(outcomes)
        if found is not None:
            tokens = [residual.tokens for residual in found.residuals]
            right.plot(tokens, [r.measured_bytes / GIB for r in found.residuals], "o", color=_BLUE, label="measured")
            t = np.linspace(min(tokens), max(tokens), 200)
            line = found.constant_bytes + found.per_token_bytes * t + found.per_token_squared_bytes * t * t
            right.plot(t, line / GIB, "-", color=_RED, label="fitted, at batch 1")
            right.legend(frameon=False)
        right.set(xlabel="tokens a micro-batch", ylabel="requested peak, GiB")
