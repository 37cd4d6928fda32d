"""A gate for continuous integration: fails (exit code 1) when a recording needs more memory than allowed.

FILE may also be a forecast (memtrace forecast --json): then it fails where the run would die, or by --max-peak.

Compare with a stored baseline (--baseline, made with --write or memtrace report --json), with a fixed limit
(--max-peak), or both.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from memtrace.answers import gate
from memtrace.answers.report import Report
from memtrace.attribution.categories import Category
from memtrace.cli.common import add_shared, open_analysis, option, print_json, to_json
from memtrace.errors import UsageError
from memtrace.snapshot.container import read_at_most
from memtrace.units import printable
from memtrace.writing import check_target, whole_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "file device no-index at rules")
    option(parser, "--baseline BASE.json", "report of the run to compare with")
    option(
        parser,
        "--max-growth [WHAT=]LIMIT…",
        "how much more than the baseline is allowed, 2%% or 200MiB (default 0%%). WHAT is allocated or reserved "
        "(the peaks; both by default) or a category, which is compared at the event. May be repeated",
    )
    allow = "compare with a baseline that differs in this all the same; may be repeated. Otherwise that fails"
    option(parser, "--allow", allow, action="append", choices=gate.CONDITIONS, default=[])
    option(parser, "--max-peak SIZE", "how high the peak of reserved memory may be, 22GiB")
    option(parser, "--write BASE.json", "write this recording's report as a baseline")
    add_shared(parser, "json force")


def run(args: argparse.Namespace) -> int:
    from memtrace.answers.report import report
    from memtrace.units import parse_capacity

    if args.baseline is None and args.max_peak is None and args.write is None:
        raise UsageError("nothing to check: give --baseline BASE.json, --max-peak SIZE or --write BASE.json")
    if args.max_growth and args.baseline is None:
        raise UsageError("--max-growth needs --baseline BASE.json to grow from")
    limits = _limits(args.max_growth or ["0%"])
    max_peak_bytes = parse_capacity(args.max_peak) if args.max_peak is not None else None
    baseline = _read(args.baseline) if args.baseline is not None else None
    if args.write is not None:
        check_target(Path(args.write), args.force, args.file)
    forecast = gate.read_forecast(args.file)
    if forecast is not None:
        if args.baseline is not None or args.write is not None:
            raise UsageError(f"{args.file} is a forecast: it is checked by --max-peak, not against a baseline")
        return _check_forecast(args, forecast, max_peak_bytes)
    analysis, at = open_analysis(args)
    gate.must_have_history(analysis.timeline)
    budget = report(analysis, at)
    verdicts: list[gate.GateResult] = []
    unlike: list[gate.Comparable] = []
    conditions = gate.conditions_of(analysis.timeline)
    if baseline is not None:
        unlike = gate.differences(baseline, conditions, budget, args.allow)
        for what, growth in limits.items():
            if what in budget.categories:
                before, now, name = baseline.categories.get(what, 0), budget.categories[what], what
            else:
                before, now, name = baseline.peaks[f"{what}_bytes"], budget.peaks[f"{what}_bytes"], f"peak {what}"
            verdicts.append(gate.judge(name, before, now, growth))
    verdicts += gate.at_most(budget.peaks["reserved_bytes"], max_peak_bytes)
    refused = gate.ran_out(analysis.timeline)
    passed = refused is None and all(each.allowed for each in unlike) and all(verdict.passed for verdict in verdicts)
    args.exit_code = 0 if passed else 1  # also when nobody reads the output
    warnings = [*([refused] if refused else []), *budget.warnings]
    for warning in warnings:
        print(f"memtrace: {printable(warning)}", file=sys.stderr)
    if args.write is not None and passed:
        _write(Path(args.write), budget, conditions)
    if args.json:
        found = {"checks": verdicts, "unlike": unlike, "out_of_memory": bool(refused), "warnings": warnings}
        print_json({"file": budget.file, "device": budget.device, "at": budget.at, "passed": passed, **found})
    else:
        for sentence in [*(each.sentence for each in unlike), *(verdict.sentence for verdict in verdicts)]:
            print(printable(sentence))
    if args.write is not None:
        what = f"baseline written to {args.write}" if passed else "the check failed: no baseline was written"
        print(f"memtrace: {printable(what)}", file=sys.stderr)
    return 0 if passed else 1


def _check_forecast(args: argparse.Namespace, forecast: dict[str, Any], max_peak_bytes: int | None) -> int:
    """A forecast in place of a recording: it must fit, and stay below the limit."""
    oom, verdicts = forecast["oom"], gate.at_most(forecast["peak_reserved_bytes"], max_peak_bytes)
    passed = oom is None and all(verdict.passed for verdict in verdicts)
    args.exit_code = 0 if passed else 1
    if args.json:
        print_json({"file": args.file, "passed": passed, "checks": verdicts, "out_of_memory": oom is not None})
        return args.exit_code
    if oom is not None:
        print(f"the forecast run dies in step {oom['step']}: FAILED")
    for verdict in verdicts:
        print(verdict.sentence)
    return args.exit_code


def _limits(texts: list[str]) -> dict[str, gate.Growth]:
    """What is compared -> its limit. A bare limit is for both peaks; a named one overrides it."""
    known = [*gate.PEAKS, *map(str, Category)]
    bare = [text for text in texts if "=" not in text]
    named = [(what.strip(), limit) for what, told, limit in (text.partition("=") for text in texts) if told]
    if len(bare) > 1:
        raise UsageError("--max-growth: only one limit without WHAT=")
    limits = dict.fromkeys(gate.PEAKS, gate.parse_growth(bare[0])) if bare else {}
    seen: set[str] = set()
    for what, limit in named:
        if what not in known:
            raise UsageError(f"--max-growth {what}=…: WHAT is one of {', '.join(known)}")
        if what in seen:
            raise UsageError(f"--max-growth: two limits for {what}")
        seen.add(what)
        limits[what] = gate.parse_growth(limit)
    return limits


def _read(source: str) -> gate.Baseline:
    return gate.read_baseline(read_at_most(Path(source), gate.LARGEST_BYTES, "baseline"), source)


def _write(target: Path, budget: Report, conditions: dict[str, Any]) -> None:
    import orjson

    with whole_file(target, budget.file) as out:
        plain = orjson.loads(to_json(budget, conditions=conditions))
        out.write(orjson.dumps(plain, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
