"""The segment/block layout at an event, as a text map or JSON."""

from __future__ import annotations

import argparse

from memtrace.cli.common import add_shared, open_analysis, option, print_answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "file device no-index at events steps json rules")
    option(parser, "--all", "every segment, not just those with most free bytes")


def run(args: argparse.Namespace) -> int:
    from memtrace.answers.segment_map import segment_map
    from memtrace.render.segments_text import render_segments

    analysis, at = open_analysis(args)
    answer = segment_map(analysis, at)
    meaning, most = analysis.attribution.lora_meaning, None if args.all else 40
    return print_answer(args.json, answer, lambda width: render_segments(answer, meaning, width, most), 160)
