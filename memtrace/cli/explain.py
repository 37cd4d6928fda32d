"""Why did this run out of memory, and what to change: from a snapshot, a log, or both.

Each FILE may be a memory snapshot or a training log; which is which is decided by content. With both, the snapshot
is measured and the log adds the limit, the card and other processes.
"""

from __future__ import annotations

import argparse
import sys

from memtrace.cli.common import add_shared, open_analysis, option, print_json
from memtrace.errors import NoAnswerError, UsageError
from memtrace.explain.answer import Explanation
from memtrace.units import printable_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "files FILE", "a snapshot, logs, or both; - reads from stdin", nargs="+")
    add_shared(parser, "device at")
    option(parser, "--capacity SIZE", "what the process may reserve at most (24GiB), where the file doesn't tell")
    add_shared(parser, "events steps no-index rules json")
    option(parser, "--md", "Markdown for an issue thread, everything included")
    option(parser, "--all", "everything as text, not only what fits 20 lines")
    option(parser, "--lang LANG", "en or zh: verdict, findings and advice in Chinese, too (default: as LANG says)")
    option(parser, "--overheads", "all that is not parameters × bytes, ranked down to the naive figure")


def _answer(args: argparse.Namespace) -> Explanation:
    from memtrace.explain.explain import explain_log, explain_snapshot
    from memtrace.explain.inputs import Logs, is_snapshot, refuse_foreign
    from memtrace.units import parse_capacity

    capacity = parse_capacity(args.capacity) if args.capacity is not None else None
    if args.files.count("-") > 1:
        raise UsageError("- (stdin) can be given once")
    snapshots = [file for file in args.files if is_snapshot(file)]
    logs = [file for file in args.files if file not in snapshots]
    if len(snapshots) > 1:
        raise UsageError("one snapshot at a time; memtrace diff compares two, memtrace ranks compares ranks")
    read = Logs(logs) if logs else None
    reading = read.reading if read is not None else None
    if not snapshots:
        assert read is not None and reading is not None
        if not reading.messages:
            refuse_foreign(logs)
            raise NoAnswerError(f"{', '.join(logs)}: nothing here says that memory ran out")
        from memtrace.explain.log_answer import principal

        return explain_log(reading, logs, *read.around(principal(reading.messages)))
    analysis, at = open_analysis(args, file=snapshots[0])
    return explain_snapshot(analysis, at, capacity_bytes=capacity, reading=reading, files=args.files)


def _overheads(args: argparse.Namespace) -> int:
    from memtrace.explain.inputs import is_snapshot
    from memtrace.explain.overheads import overheads
    from memtrace.render.explain_text import render_overheads

    if len(args.files) > 1 or not is_snapshot(args.files[0]):
        raise UsageError("--overheads takes one snapshot")
    analysis, at = open_analysis(args, file=args.files[0])
    found = overheads(analysis, at)
    if args.json:
        return print_json(found)
    sys.stdout.write("\n".join(render_overheads(found, analysis.attribution.lora_meaning)) + "\n")
    return 0


def run(args: argparse.Namespace) -> int:
    if args.lang is not None and args.lang.lower()[:2] not in ("en", "zh"):
        raise UsageError(f"--lang takes en or zh, not {args.lang!r}")
    if args.overheads:
        return _overheads(args)
    answer = _answer(args)
    if args.json:
        return print_json(answer)
    from memtrace.render.chinese import render_chinese, wants_chinese
    from memtrace.render.explain_text import render_explanation, render_markdown

    lines = render_markdown(answer) if args.md else render_explanation(answer, everything=args.all)
    if wants_chinese(args.lang):
        lines = [*render_chinese(answer, None if args.all or args.md else 3), "", *lines]
    sys.stdout.write(printable_lines("\n".join(lines)) + "\n")
    return 0
