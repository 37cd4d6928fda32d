"""Both timelines of a comparison, one above the other on one scale. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import Any

from memtrace.analysis import Analysis
from memtrace.answers.curves import category_curves, pick_events
from memtrace.answers.diff.comparison import Difference
from memtrace.attribution.categories import Category
from memtrace.export.picture import picture
from memtrace.export.plot import plain
from memtrace.render.words import COLOUR
from memtrace.units import GIB, format_delta

_POINTS = 4000


def plot_difference(before: Analysis, after: Analysis, answer: Difference, target: Path) -> None:
    """Draw BEFORE above AFTER, stacked by category, with the compared events marked. ``target`` names the format."""
    sources = [each.timeline.snapshot.source for each in (before, after)]
    with picture(target, (11, 7), *sources, nrows=2, sharey=True) as (figure, axes):
        for axis, name, analysis, event in (
            (axes[0], "before", before, answer.before.at.event),
            (axes[1], "after", after, answer.after.at.event),
        ):
            _draw(axis, name, analysis, event)
        handles, labels = axes[0].get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="outside right upper", frameon=False)
        change = format_delta(answer.delta.peak_reserved_bytes) if answer.delta.peak_reserved_bytes else "unchanged"
        figure.suptitle(f"peak reserved memory: {change}")


def _draw(axis: Any, name: str, analysis: Analysis, event: int) -> None:
    curves = category_curves(analysis)
    axis.set_title(f"{name}: {plain(PurePath(analysis.timeline.snapshot.source).name)}", loc="left")
    axis.set_xlabel("event")
    axis.set_ylabel("GiB")
    if not len(curves):
        axis.text(0.5, 0.5, "no trace was recorded", ha="center", transform=axis.transAxes)
        return
    events = pick_events(curves, _POINTS)
    present = [(category, i) for i, category in enumerate(Category) if curves.categories[i].any()]
    if present:
        axis.stackplot(
            events,
            *(curves.categories[i, events] / GIB for _, i in present),
            labels=[category.replace("_", " ") for category, _ in present],
            colors=[COLOUR[category] for category, _ in present],
            step="post",
        )
    axis.plot(events, curves.reserved_bytes[events] / GIB, color="black", linewidth=0.8, label="reserved")
    axis.plot(events, curves.allocated_bytes[events] / GIB, color="black", linewidth=0.4, label="allocated")
    axis.axvline(event, color="black", linestyle=":", linewidth=1)
    axis.set_xlim(0, max(1, len(curves) - 1))
