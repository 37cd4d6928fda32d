"""Both timelines of a comparison, one above the other on one scale. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import Any

import numpy as np

from memtrace.attribution.categories import Category
from memtrace.curves import category_curves, pick_events
from memtrace.diff import Difference
from memtrace.errors import MissingDependencyError, UsageError
from memtrace.report import Analysis
from memtrace.units import GIB, format_delta

COLOURS: dict[str, str] = {
    Category.BASE_WEIGHTS: "#4878cf",
    Category.LORA: "#b47cc7",
    Category.ACTIVATIONS: "#6acc65",
    Category.TEMPORARY: "#e8c547",
    Category.RUNTIME: "#77bedb",
    Category.FRAGMENTATION: "#d65f5f",
    Category.UNATTRIBUTED: "#9a9a9a",
}
_POINTS = 4000


def plot_difference(before: Analysis, after: Analysis, answer: Difference, target: Path) -> None:
    """Draw BEFORE above AFTER, stacked by category, with the compared events marked. ``target`` names the format."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise MissingDependencyError("plots need matplotlib: pip install 'torch-memtrace[plot]'") from None
    figure, axes = pyplot.subplots(2, 1, sharey=True, figsize=(11, 7), layout="constrained")
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
    try:
        figure.savefig(target)
    except ValueError as error:
        raise UsageError(f"--plot {target}: {error}") from None
    except OSError as error:
        raise UsageError(f"{target}: {error.strerror or error}") from None
    finally:
        pyplot.close(figure)


def _draw(axis: Any, name: str, analysis: Analysis, event: int) -> None:
    curves = category_curves(analysis)
    axis.set_title(f"{name}: {PurePath(analysis.timeline.snapshot.source).name}", loc="left")
    axis.set_xlabel("event")
    axis.set_ylabel("GiB")
    if not len(curves):
        axis.text(0.5, 0.5, "no trace was recorded", ha="center", transform=axis.transAxes)
        return
    events = pick_events(curves, _POINTS)
    layers = [curves.categories[number, events] / GIB for number in range(len(Category))]
    present = [i for i, layer in enumerate(layers) if layer.any()]
    names = [str(category) for category in Category]
    axis.stackplot(
        events,
        np.stack([layers[i] for i in present]) if present else np.zeros((1, len(events))),
        labels=[names[i] for i in present],
        colors=[COLOURS[names[i]] for i in present],
        linewidth=0,
    )
    axis.plot(events, curves.reserved_bytes[events] / GIB, color="black", linewidth=0.8, label="reserved")
    axis.axvline(event, color="black", linestyle=":", linewidth=1)
    axis.set_xlim(0, max(1, len(curves) - 1))
