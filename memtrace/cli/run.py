"""Run an unchanged training script with recording on: memtrace run [OPTIONS] SCRIPT ARGS… or -m MODULE ARGS…

The script runs as `python SCRIPT ARGS…` would run it. When it ends, or runs out of memory, the recording lies in the
output folder; `memtrace report FILE` and `memtrace explain FILE` read it. Also under launchers, one file a rank:
torchrun --nproc_per_node 2 -m memtrace run train.py.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from memtrace.cli.common import option, usual_signals
from memtrace.cli.leads import check_program
from memtrace.errors import UsageError


def steps_window(text: str) -> tuple[int, int]:
    """``A:B`` as (A, B)."""
    match = re.fullmatch(r"(\d*):(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST:END, like 10:12")
    return int(match[1] or 0), int(match[2])


def add_recording_options(parser: argparse.ArgumentParser, stacks: Sequence[str] = ("python", "all")) -> None:
    """The options that every verb which records shares."""
    from memtrace.record.recorder import DEFAULT_MAX_ENTRIES

    newest = f"events kept, the newest ones (default {DEFAULT_MAX_ENTRIES})"
    option(parser, "--stacks", "all adds C++ frames (slower dumps)", choices=stacks, default="python")
    option(parser, "--max-entries N", newest, type=int, default=DEFAULT_MAX_ENTRIES)
    option(parser, "--deep", "stamp module names on allocations (PyTorch 2.10+; slower)")
    option(parser, "--force", "replace an existing file instead of adding a number")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "memtrace run [OPTIONS] SCRIPT ARGS…\n       memtrace run [OPTIONS] -m MODULE ARGS…"
    steps = "record steps A up to, not including, B (counted from 0, one a call of optimizer.step)"
    log = "also write every step's levels to NAME.steps.jsonl (resets PyTorch's peak statistics after each step)"
    option(parser, "--out DIR", "folder for recordings (default: .)", type=Path, default=Path())
    option(parser, "--steps A:B", steps, type=steps_window)
    option(parser, "--step-log", log)
    option(parser, "--forecast", "say before step 0 whether the run will fit, where model and data tell enough")
    option(parser, "--live", "let memtrace live watch, and sound alarms")
    option(parser, "--on-alarm HOW", "print (default), warn, or a command that gets it as JSON", default="print")
    each = "each step's numbers to tensorboard:DIR, prometheus:FILE, wandb, mlflow or otel, too"
    option(parser, "--metrics KIND:WHERE…", each)
    add_recording_options(parser, ("python", "all", "none"))
    parser.allow_abbrev = False  # a program's own options are no abbreviations of these
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE ARGS…", help="run a module")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT ARGS…", help="script and its arguments")


def run(args: argparse.Namespace) -> int:
    from memtrace.record.launcher import launch
    from memtrace.record.recorder import RecordOptions

    program = args.module if args.module is not None else args.script
    if not program:
        raise UsageError("nothing to run: give a script, or -m and a module")
    name = program[0] if args.module is not None else Path(program[0]).stem
    options = RecordOptions(
        folder=args.out.absolute(),
        stem=name,
        stacks=args.stacks,
        max_entries=args.max_entries,
        steps=args.steps,
        deep=args.deep,
        force=args.force,
        step_log=args.step_log,
        live=args.live or bool(args.metrics),
        on_alarm=args.on_alarm,
        metrics=tuple(args.metrics),
    )
    if args.module is None:
        check_program(program[0])
    usual_signals(and_path=True)
    if args.forecast:
        from memtrace.record.ahead import watch
        from memtrace.record.launcher import after_import

        after_import("torch", watch)
    return launch(program, args.module is not None, options)
