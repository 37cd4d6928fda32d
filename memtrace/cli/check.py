"""A gate for continuous integration: fails (exit code 1) when a recording needs more memory than allowed.

Compare with a stored baseline (--baseline, made with --write or memtrace report --json), with a fixed limit
(--max-peak), or both.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from memtrace.attribution.categories import Category
from memtrace.cli.common import add_force, add_input, add_json, add_rules, check_target, open_analysis, print_json
from memtrace.errors import SnapshotError, UsageError
from memtrace.gate import PEAKS, Baseline, Growth, Verdict, judge, parse_growth, read_baseline
from memtrace.report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input(parser)
    add_rules(parser)
    parser.add_argument("--baseline", metavar="BASE.json", help="report of the run to compare with")
    parser.add_argument(
        "--max-growth",
        action="append",
        metavar="[WHAT=]LIMIT",
        help="how much more than the baseline is allowed, 2%% or 200MiB (default 0%%). WHAT is allocated or reserved "
        "(the peaks; both by default) or a category, which is compared at the event. May be repeated",
    )
    parser.add_argument("--max-peak", metavar="SIZE", help="how high the peak of reserved memory may be, 22GiB")
    parser.add_argument("--write", metavar="BASE.json", help="write this recording's report as a baseline")
    add_json(parser)
    add_force(parser)


def run(args: argparse.Namespace) -> int:
    from memtrace.report import report
    from memtrace.units import parse_capacity

    if not (args.baseline or args.max_peak or args.write):
        raise UsageError("nothing to check: give --baseline BASE.json, --max-peak SIZE or --write BASE.json")
    if args.max_growth and not args.baseline:
        raise UsageError("--max-growth needs --baseline BASE.json to grow from")
    limits = _limits(args.max_growth or ["0%"])
    max_peak_bytes = parse_capacity(args.max_peak) if args.max_peak else None
    baseline = _read(args.baseline) if args.baseline else None
    if args.write:
        check_target(Path(args.write), args.force)
    analysis, at = open_analysis(args)
    budget = report(analysis, at)
    verdicts: list[Verdict] = []
    if baseline is not None:
        for what, growth in limits.items():
            if what in budget.categories:
                before, now, name = baseline.categories.get(what, 0), budget.categories[what], what
            else:
                before, now, name = baseline.peaks[f"{what}_bytes"], budget.peaks[f"{what}_bytes"], f"peak {what}"
            verdicts.append(judge(name, before, now, growth))
    if max_peak_bytes is not None:
        peak = budget.peaks["reserved_bytes"]
        verdicts.append(Verdict("peak reserved", None, peak, max_peak_bytes, peak <= max_peak_bytes))
    if args.write:
        _write(Path(args.write), budget)
    passed = all(verdict.passed for verdict in verdicts)
    if args.json:
        print_json(
            {"file": budget.file, "device": budget.device, "at": budget.at, "passed": passed, "checks": verdicts}
        )
    else:
        for verdict in verdicts:
            print(verdict.sentence)
        if args.write:
            print(f"memtrace: baseline written to {args.write}", file=sys.stderr)
    return 0 if passed else 1


def _limits(texts: list[str]) -> dict[str, Growth]:
    """What is compared -> its limit. A bare limit is for both peaks; a named one overrides it."""
    known = [*PEAKS, *map(str, Category)]
    bare = [text for text in texts if "=" not in text]
    named = [text.partition("=") for text in texts if "=" in text]
    if len(bare) > 1:
        raise UsageError("--max-growth: only one limit without WHAT=")
    limits = dict.fromkeys(PEAKS, parse_growth(bare[0])) if bare else {}
    for what, _, limit in named:
        if what.strip() not in known:
            raise UsageError(f"--max-growth {what}=…: WHAT is one of {', '.join(known)}")
        limits[what.strip()] = parse_growth(limit)
    return limits


def _read(source: str) -> Baseline:
    try:
        return read_baseline(Path(source).read_bytes(), source)
    except OSError as error:
        raise SnapshotError(f"{source}: {error.strerror or error}") from None


def _write(target: Path, budget: Report) -> None:
    import orjson

    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(orjson.dumps(budget, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
        partial.replace(target)
    except OSError as error:
        raise UsageError(f"{target}: {error.strerror or error}") from None
    finally:
        partial.unlink(missing_ok=True)
