"""What changed between two recordings: signed bytes by category, subcategory and call site."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from memtrace.cli.common import add_shared, open_analysis, print_json, say_written, whole_number
from memtrace.errors import UsageError
from memtrace.units import printable, printable_lines
from memtrace.writing import check_target

if TYPE_CHECKING:
    from memtrace.answers.diff.comparison import Difference


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "before", metavar="BEFORE", help="snapshot: .pickle or .json, plain or .gz/.xz/.zst; - is stdin"
    )
    parser.add_argument("after", metavar="AFTER", help="the snapshot to compare with it")
    parser.add_argument("--device", type=int, metavar="N", help="device number in both (default: the one that matters)")
    parser.add_argument("--at", metavar="WHEN", help="oom, peak, end, an event, step 3, peak of step 3, +2s …, in both")
    parser.add_argument("--at-before", metavar="WHEN", help="the same for BEFORE alone")
    parser.add_argument("--at-after", metavar="WHEN", help="the same for AFTER alone")
    add_shared(parser, "rules")
    parser.add_argument(
        "--top", type=whole_number, default=12, metavar="N", help="how many call sites to list (default 12)"
    )
    add_shared(parser, "no-index json")
    parser.add_argument("--md", action="store_true", help="Markdown, for a pull request")
    parser.add_argument("--plot", metavar="OUT.svg|OUT.png", help="also draw both timelines (needs the extra [plot])")
    add_shared(parser, "force")
    parser.add_argument(
        "--fail-on-growth",
        metavar="LIMIT",
        help="exit with 1 if the peak grew by more than LIMIT, 2%% or 200MiB",
    )
    parser.add_argument(
        "--peak",
        choices=("allocated", "reserved", "both"),
        default="both",
        help="which peak --fail-on-growth judges (default: both)",
    )


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
    sides = [
        open_analysis(
            argparse.Namespace(
                file=file, device=args.device, at=at or args.at, rules=args.rules, no_index=args.no_index
            )
        )
        for file, at in ((args.before, args.at_before), (args.after, args.at_after))
    ]
    (before, at_before), (after, at_after) = sides
    answer = compare(
        before, after,
        at_before if args.at_before or args.at else None, at_after if args.at_after or args.at else None,
    )  # fmt: skip
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
        from memtrace.export.diff_plot import plot_difference

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
        from memtrace.render.text import console, print_lines

        print_lines(render_diff(answer, min(console().width, 140), args.top))
