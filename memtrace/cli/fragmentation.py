"""Reserved but unusable bytes at an event: how much of which kind, per pool and stream, and what pins the holes."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import TYPE_CHECKING

from memtrace.cli.common import add_shared, open_analysis, print_json, print_text

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

    layout = layout_at(analysis.timeline, at.event)
    answer = measure(analysis.timeline, analysis.attribution, at, layout)
    pinned = pins(analysis, layout)
    if as_json:
        return print_json({field.name: getattr(answer, field.name) for field in fields(answer)} | {"pins": pinned})
    from memtrace.render.fragmentation_text import render_fragmentation

    meaning = analysis.attribution.lora_meaning
    return print_text(lambda width: render_fragmentation(answer, meaning, pinned, width), 120)
