"""Reserved but unusable bytes at an event: how much of which kind, per pool and stream, and what pins the holes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from memtrace.cli.common import add_shared, open_analysis, print_answer

if TYPE_CHECKING:
    from memtrace.analysis import Analysis
    from memtrace.history.timeline import At


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "file device no-index at events steps json rules")


def run(args: argparse.Namespace) -> int:
    return show(*open_analysis(args), args.json)


def show(analysis: Analysis, at: At, as_json: bool) -> int:
    """Print the answer about an event."""
    from memtrace.answers.fragmentation import measure
    from memtrace.answers.pins import pins
    from memtrace.history.layout import layout_at
    from memtrace.render.fragmentation_text import render_fragmentation

    layout = layout_at(analysis.timeline, at.event)
    answer = measure(analysis.timeline, analysis.attribution, at, layout)
    pinned = pins(analysis, layout)
    meaning = analysis.attribution.lora_meaning
    return print_answer(
        as_json, answer, lambda width: render_fragmentation(answer, meaning, pinned, width), 120, pins=pinned
    )
