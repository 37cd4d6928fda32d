"""Where every reserved byte is, at the peak, at the out-of-memory error or at any event."""

from __future__ import annotations

import argparse

from memtrace.cli.common import add_input, add_json, add_rules, open_analysis, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input(parser)
    add_json(parser)
    add_rules(parser)
    parser.add_argument("--top", type=int, default=8, metavar="N", help="how many call sites to list (default 8)")
    parser.add_argument(
        "--why",
        metavar="WHAT",
        help="why bytes are where they are: a category, a category/subcategory, or an address (0x…)",
    )


def run(args: argparse.Namespace) -> int:
    analysis, at = open_analysis(args)
    if args.why is not None:
        from memtrace.why import explain_decision

        answer = explain_decision(analysis, at, args.why)
        if args.json:
            print_json(answer)
        else:
            from memtrace.export.text import print_lines
            from memtrace.export.why_text import render_why

            print_lines(render_why(answer))
        return 0
    from memtrace.report import report

    budget = report(analysis, at)
    if args.json:
        print_json(budget)
        return 0
    from memtrace.export.report_text import render_report
    from memtrace.export.text import console, print_lines

    print_lines(render_report(budget, width=min(console().width, 120), sites=max(0, args.top)))
    return 0
