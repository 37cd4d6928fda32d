"""What changed between two recordings: signed bytes by category, subcategory and call site."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from memtrace.cli.common import add_shared, open_analysis, option, print_json, print_text, say_written, whole_number
from memtrace.errors import UsageError
from memtrace.units import printable, printable_lines
from memtrace.writing import check_target

if TYPE_CHECKING:
    from memtrace.answers.diff.comparison import Difference


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "before BEFORE", "snapshot: .pickle or .json, plain or .gz/.xz/.zst; - is stdin")
    option(parser, "after AFTER", "the snapshot to compare with it")
    option(parser, "--device N", "device number in both (default: the one that matters)", type=int)
    option(parser, "--at WHEN", "oom, peak, end, an event, step 3, peak of step 3, +2s …, in both")
    option(parser, "--at-before WHEN", "the same for BEFORE alone")
    option(parser, "--at-after WHEN", "the same for AFTER alone")
    add_shared(parser, "rules")
    option(parser, "--top N", "how many call sites to list (default 12)", type=whole_number, default=12)
    add_shared(parser, "no-index json")
    option(parser, "--md", "Markdown, for a pull request")
    option(parser, "--plot OUT.svg|OUT.png", "also draw both timelines (needs the extra [plot])")
    add_shared(parser, "force")
    option(parser, "--fail-on-growth LIMIT", "exit with 1 if the peak grew by more than LIMIT, 2%% or 200MiB")
    which = ("allocated", "reserved", "both")
    option(parser, "--peak", "which peak --fail-on-growth judges (default: both)", choices=which, default="both")


def run(args: argparse.Namespace) -> int:
    from memtrace.answers.gate import PEAKS, GateResult, judge_peaks, must_have_history, parse_growth, ran_out
    from memtrace.explain.causes import compare

    if args.json and args.md:
        raise UsageError("--json and --md exclude each other")
    if args.before == "-" and args.after == "-":
        raise UsageError("only one of BEFORE and AFTER can be stdin")
    growth = parse_growth(args.fail_on_growth) if args.fail_on_growth is not None else None
    if args.plot is not None:
        check_target(Path(args.plot), args.force, args.before, args.after)
    at_before, at_after = args.at_before or args.at, args.at_after or args.at
    before, first = open_analysis(args, file=args.before, at=at_before)
    after, second = open_analysis(args, file=args.after, at=at_after)
    answer = compare(before, after, first if at_before else None, second if at_after else None)
    verdicts: list[GateResult] = []
    if growth is not None:
        for side in (before, after):
            must_have_history(side.timeline)
        which = PEAKS if args.peak == "both" else (args.peak,)
        verdicts = judge_peaks(answer.before.peaks, answer.after.peaks, growth, which)
    refused = ran_out(after.timeline) if growth is not None else None
    passed = refused is None and all(verdict.passed for verdict in verdicts)
    args.exit_code = 0 if passed else 1  # also when nobody reads the output
    if args.plot is not None:
        from memtrace.export.plots import plot_difference

        plot_difference(before, after, answer, Path(args.plot))
        say_written(args.plot)
    try:
        _print(args, answer, {"passed": passed, "checks": verdicts} if growth is not None else None)
        sys.stdout.flush()
    finally:
        for verdict in verdicts:
            print(f"memtrace: {verdict.sentence}", file=sys.stderr)
        if refused is not None:
            print(f"memtrace: {printable(refused)}", file=sys.stderr)
    return 0 if passed else 1


def _print(args: argparse.Namespace, answer: Difference, gate: dict[str, object] | None) -> None:
    if args.json:
        print_json(answer.to_json() | ({} if gate is None else {"gate": gate}))
    elif args.md:
        from memtrace.render.diff_text import diff_markdown

        sys.stdout.write(printable_lines(diff_markdown(answer, args.top)))
    else:
        from memtrace.render.diff_text import render_diff

        print_text(lambda width: render_diff(answer, width, args.top), 140)
