"""The segment/block layout at an event, as a text map or JSON."""

from __future__ import annotations

import argparse

from memtrace.cli.common import add_shared, open_analysis, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "file device no-index at events steps json rules")
    parser.add_argument("--all", action="store_true", help="every segment, not just those with most free bytes")


def run(args: argparse.Namespace) -> int:
    from memtrace.answers.segment_map import segment_map

    analysis, at = open_analysis(args, of_part=True)
    answer = segment_map(analysis, at)
    if args.json:
        print_json(answer)
        return 0
    from memtrace.render.segments_text import render_segments
    from memtrace.render.text import console, print_lines

    print_lines(render_segments(answer, min(console().width, 160), None if args.all else 40))
    return 0
