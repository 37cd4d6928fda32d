"""Where every reserved byte is, at the peak, at the out-of-memory error or at any event."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from memtrace.attribution.categories import Category
from memtrace.cli.common import add_shared, open_analysis, option, print_answer, print_json, print_text, whole_number

if TYPE_CHECKING:
    from memtrace.analysis import Analysis
    from memtrace.answers.report import Report
    from memtrace.estimate.against import Against
    from memtrace.estimate.recorded import Setup
    from memtrace.history.timeline import At


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "file device no-index at events steps json rules")
    option(parser, "--top N", "how many call sites to list (default 8)", type=whole_number, default=8)
    option(
        parser,
        "--why WHAT",
        "why bytes are where they are: a category, a category/subcategory, or an address (0x…); fragmentation is "
        "answered with what pins it, as memtrace fragmentation does",
    )


def run(args: argparse.Namespace) -> int:
    analysis, at = open_analysis(args)
    if args.why is not None and args.why.partition("/")[0] == Category.FRAGMENTATION:
        from memtrace.answers.why import known_part
        from memtrace.cli.fragmentation import show

        known_part(args.why)
        return show(analysis, at, args.json)
    if args.why is not None:
        from memtrace.answers.why import explain_decision
        from memtrace.render.report_text import render_why

        answer = explain_decision(analysis, at, args.why)
        return print_answer(args.json, answer, lambda _: render_why(answer, analysis.attribution.lora_meaning))
    from memtrace.answers.report import report

    budget = report(analysis, at)
    own = _own_estimate(analysis, at, budget)
    if args.json:
        told = None if own is None else {"against": own[0], "options": own[1].options, "notes": own[1].notes}
        return print_json(budget, estimate=told)
    from memtrace.render.report_text import render_report

    print_text(lambda width: render_report(budget, width, args.top), 120)
    if own is not None:
        from memtrace.estimate.text import render_against

        against, setup = own
        print("\nthe estimate of the recorded configuration")
        print("\n".join([*render_against(against), *(f"  note: {note}" for note in setup.notes)]))
    return 0


def _own_estimate(analysis: Analysis, at: At, budget: Report) -> tuple[Against, Setup] | None:
    """The estimate of the configuration that the recording carries, at its peak; None where it carries none."""
    if not analysis.timeline.snapshot.config:
        return None
    from memtrace.answers.report import report
    from memtrace.estimate.recorded import against_own_estimate
    from memtrace.history.timeline import choose_event

    if analysis.timeline.window is not None:  # the estimate is of the whole run's peak
        analysis = replace(analysis, timeline=replace(analysis.timeline, window=None))
    elif at.kind == "peak":
        return against_own_estimate(analysis, budget)
    at_peak = report(analysis, choose_event(analysis.timeline, "peak"))
    return against_own_estimate(analysis, at_peak)
