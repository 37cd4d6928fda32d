"""Every allocation, one row each: those live at an event, or all of the recording (--all)."""

from __future__ import annotations

import argparse

from memtrace.cli.common import (
    add_force,
    add_input,
    add_output,
    add_rules,
    add_window,
    floods_terminal,
    open_analysis,
    output_stream,
)
from memtrace.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input(parser)
    add_window(parser)
    add_rules(parser)
    parser.add_argument(
        "--all",
        action="store_true",
        help="all allocations of the recording (of --events or --steps), not just the live ones",
    )
    parser.add_argument("--format", choices=("csv", "json", "parquet"), default="csv", help="default: csv")
    parser.add_argument("--json", dest="format", action="store_const", const="json", help="the same as --format json")
    add_output(parser)
    add_force(parser)


def run(args: argparse.Namespace) -> int:
    from memtrace.export.table import allocation_columns, write_csv, write_json, write_parquet

    if args.all and args.at is not None:
        raise UsageError("--all and --at exclude each other")
    if args.format == "parquet" and floods_terminal(args):
        raise UsageError("Parquet is binary: give --output FILE or redirect stdout")
    analysis, at = open_analysis(args, of_part=True)
    timeline = analysis.timeline
    rows = timeline.rows_within() if args.all else timeline.live_rows(at.event)
    columns = allocation_columns(analysis, rows)
    with output_stream(args) as out:
        if args.format == "csv":
            from io import TextIOWrapper

            text = TextIOWrapper(out, encoding="utf-8", newline="", write_through=False)
            write_csv(columns, text)
            text.flush()
            text.detach()
        elif args.format == "json":
            write_json(columns, out)
        else:
            write_parquet(columns, out)
    return 0
