"""Every allocation, one row each: those live at an event, or all of the recording (--all)."""

from __future__ import annotations

import argparse

from memtrace.cli.common import add_format, add_shared, floods_terminal, format_of, open_analysis, option, output_stream
from memtrace.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "file device no-index at events steps rules")
    option(parser, "--all", "all allocations of the recording (of --events or --steps), not just the live ones")
    add_format(parser, "csv", "json", "parquet", default="csv")
    add_shared(parser, "output force")


def run(args: argparse.Namespace) -> int:
    from memtrace.export.table import allocation_columns, write_table

    if args.all and args.at is not None:
        raise UsageError("--all and --at exclude each other")
    form = format_of(args)
    if form == "parquet" and floods_terminal(args):
        raise UsageError("Parquet is binary: give --output FILE or redirect stdout")
    analysis, at = open_analysis(args)
    timeline = analysis.timeline
    rows = timeline.rows_within() if args.all else timeline.live_rows(at.event)
    with output_stream(args) as out:
        write_table(allocation_columns(analysis, rows), form, out)
    return 0
