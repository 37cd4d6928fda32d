"""Memory over the steps of a long run: does it grow, or do only the sequence lengths vary?

FILE is a recording whose steps are recognised, or that carries the light per-step log, or the log itself (.jsonl).
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from memtrace.cli.common import add_shared, open_analysis, option, print_json
from memtrace.units import printable_lines
from memtrace.writing import check_target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "file FILE", "a recording, or a .jsonl step log")
    option(parser, "--plot OUT.svg|OUT.png", "also draw the levels over the steps (needs the extra [plot])")
    add_shared(parser, "device no-index json force")


def run(args: argparse.Namespace) -> int:
    if args.plot:
        check_target(Path(args.plot), args.force, args.file)
    from memtrace.answers.steps import analyse, from_recording, from_snapshot_key, read_log, render

    if Path(args.file).suffix == ".jsonl":
        series = read_log(Path(args.file))
    else:
        analysis, _ = open_analysis(args)
        log = analysis.timeline.snapshot.memtrace.get("steps")
        series = from_snapshot_key(log) if log is not None else from_recording(analysis)
    if args.plot:
        from memtrace.export.plots import plot_steps

        plot_steps(series, Path(args.plot))
    found = analyse(series)
    if args.json:
        return print_json(asdict(found))
    print(printable_lines("\n".join(render(found))))
    return 0
