"""Memory over time by category, as a table or a plot. Downsampling keeps every extreme."""

from __future__ import annotations

import argparse
from pathlib import Path

from memtrace.cli.common import (
    add_format,
    add_shared,
    floods_terminal,
    format_of,
    open_analysis,
    option,
    output_stream,
    print_text,
    say_written,
    whole_number,
)
from memtrace.writing import check_target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "file device no-index events steps rules")
    add_format(parser, "csv", "json", default="csv", text="csv; on a terminal, without --points, a short table")
    points = "about N rows with every extreme (twenty or so at least); default: every event"
    option(parser, "--points N", points, type=whole_number)
    option(parser, "--plot OUT.svg|OUT.png", "draw a stacked plot (needs the extra [plot])")
    add_shared(parser, "output force")


def run(args: argparse.Namespace) -> int:
    from memtrace.answers.curves import category_curves, pick_events
    from memtrace.errors import NoAnswerError
    from memtrace.export.table import curve_columns, write_table

    if args.plot is not None:
        check_target(Path(args.plot), args.force, args.file)
    analysis, _ = open_analysis(args)
    if not len(analysis.timeline):
        raise NoAnswerError(f"{args.file}: no trace was recorded, so there is no timeline")
    curves = category_curves(analysis, analysis.timeline.window)
    if args.plot is not None:
        from memtrace.export.plots import plot_timeline

        plot_timeline(analysis, curves, Path(args.plot))
        say_written(args.plot)
        return 0
    if args.format is None and args.points is None and floods_terminal(args):
        from memtrace.render.timeline_text import render_timeline

        return print_text(lambda width: render_timeline(analysis, curves, width), 120)
    events = pick_events(curves, args.points or len(curves))
    with output_stream(args) as out:
        write_table(curve_columns(analysis, curves, events), format_of(args), out)
    return 0
