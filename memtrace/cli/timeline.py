"""Memory over time by category, as a table or a plot. Downsampling keeps every extreme."""

from __future__ import annotations

import argparse
from pathlib import Path

from memtrace.cli.common import (
    add_force,
    add_input,
    add_output,
    add_rules,
    add_window,
    check_target,
    open_analysis,
    output_stream,
    whole_number,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input(parser, at=False)
    add_window(parser)
    add_rules(parser)
    parser.add_argument("--format", choices=("csv", "json"), default="csv", help="default: csv")
    parser.add_argument("--json", dest="format", action="store_const", const="json", help="the same as --format json")
    parser.add_argument("--points", type=whole_number, metavar="N", help="at most about N rows (default: every event)")
    parser.add_argument("--plot", metavar="OUT.svg|OUT.png", help="draw a stacked plot (needs the extra [plot])")
    add_output(parser)
    add_force(parser)


def run(args: argparse.Namespace) -> int:
    from io import TextIOWrapper

    from memtrace.curves import category_curves, pick_events
    from memtrace.errors import NoAnswerError
    from memtrace.export.table import curve_columns, write_csv, write_json

    args.at = None
    if args.plot:
        check_target(Path(args.plot), args.force)
    analysis, _ = open_analysis(args, of_part=True)
    if not len(analysis.timeline):
        raise NoAnswerError(f"{args.file}: no trace was recorded, so there is no timeline")
    curves = category_curves(analysis, analysis.timeline.window)
    if args.plot:
        from memtrace.export.plot import plot_timeline

        plot_timeline(analysis, curves, Path(args.plot))
        return 0
    events = pick_events(curves, args.points or len(curves))
    columns = curve_columns(analysis, curves, events)
    with output_stream(args) as out:
        if args.format == "json":
            write_json(columns, out)
        else:
            text = TextIOWrapper(out, encoding="utf-8", newline="")
            write_csv(columns, text)
            text.flush()
            text.detach()
    return 0
