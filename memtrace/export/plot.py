"""The timeline as a stacked plot (SVG or PNG) through matplotlib, an optional package."""

from __future__ import annotations

from pathlib import Path

from memtrace.analysis import Analysis
from memtrace.answers.curves import Curves, pick_events
from memtrace.attribution.categories import Category
from memtrace.attribution.phases import Phase
from memtrace.export.picture import picture
from memtrace.render.words import COLOUR
from memtrace.units import GIB, printable

_POINTS = 6000


def plain(name: str) -> str:
    """A file's name for a plot, where dollars would begin a formula and what is not text can't be drawn."""
    return printable(name).replace("$", r"\$")


def plot_timeline(analysis: Analysis, curves: Curves, path: Path) -> None:
    """Write the plot. Raises as :func:`picture` does."""
    events = pick_events(curves, _POINTS)
    place = events - curves.first
    names = [c for number, c in enumerate(Category) if curves.categories[number].any()]
    heights = [curves.categories[list(Category).index(c), place] / GIB for c in names]
    source = analysis.timeline.snapshot.source
    with picture(path, (11, 5), source, dpi=130) as (_, axes):
        if names:  # a recording of a refusal at the start holds nothing
            axes.stackplot(
                events,
                heights,
                labels=[c.replace("_", " ") for c in names],
                colors=[COLOUR[c] for c in names],
                step="post",
            )
        axes.plot(
            events,
            curves.reserved_bytes[place] / GIB,
            color="black",
            linewidth=0.9,
            label="reserved",
            drawstyle="steps-post",
        )
        axes.set_xlim(curves.first, curves.first + max(1, len(curves) - 1))
        axes.set_ylim(0, max(float(curves.reserved_bytes.max()) / GIB * 1.08, 0.01))
        axes.set_xlabel("event")
        axes.set_ylabel("GiB")
        _bands(analysis, axes, curves)
        for event in analysis.timeline.oom_events:
            axes.axvline(event, color="red", linewidth=1.2)
            axes.annotate("OOM", (event, axes.get_ylim()[1]), color="red", ha="right", va="top")
        axes.set_title(f"{plain(Path(source).name)} · GPU {analysis.timeline.device.device}", loc="left")
        axes.legend(loc="upper left", fontsize="small", framealpha=0.85, ncols=2)


def _bands(analysis: Analysis, axes: object, curves: Curves) -> None:
    """Thin ticks with step numbers where each step's first forward pass begins."""
    phases = analysis.attribution.facts.phases
    seen: set[int] = set()
    for start, phase, step in zip(phases.start[:-1].tolist(), phases.phase.tolist(), phases.step.tolist(), strict=True):
        if phase == Phase.FORWARD and step not in seen and 0 <= start - curves.first < len(curves):
            seen.add(step)
            axes.axvline(start, color="black", linewidth=0.4, alpha=0.4)  # type: ignore[attr-defined]
            if len(seen) <= 40:
                axes.annotate(  # type: ignore[attr-defined]
                    f"step {step}", (start, 0), xytext=(2, 2), textcoords="offset points", fontsize=6, rotation=90
                )
