"""The memory of a run before it runs, from the real code on tensors without data; no GPU is needed.

  memtrace dryrun [OPTIONS] SCRIPT ARGS… (or -m MODULE ARGS…): an unchanged script on a card that is not there. It dies
      where the run would die, and leaves the file that `memtrace run` would leave, marked as predicted.
  memtrace dryrun --model CONFIG.json|PRESET …: a QLoRA step built by memtrace, with the options of `memtrace estimate`;
      for any causal language model that Transformers can build.
Nothing is downloaded. Needs the extra packages of torch-memtrace[capture], and a C++ compiler once.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from memtrace.cli.common import add_shared, option, print_json, usual_signals, whole_number
from memtrace.cli.estimate import add_setup, answer
from memtrace.cli.leads import check_program
from memtrace.errors import UsageError

_MOST_RANKS = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_setup(parser)
    add_shared(parser, "json")
    option(parser, "--against FILE", "compare with a recording, by category (--model)")
    option(parser, "--trace OUT.pickle", "write the dry run as a snapshot (--model)")
    add = partial(option, parser.add_argument_group("of a script"))
    add("-o,--out FILE", "the recording (default NAME.predicted.pickle)", type=Path)
    add("--world-size N", "be rank 0 (or $RANK) of N, as torchrun would start it", type=whole_number)
    steps = "stop after N optimizer steps; 'repeat': after three that took the same memory (default: run all)"
    add("--steps N", steps, type=_steps)
    assume = "what to take for a value nobody knows: float, integer, boolean, share (of a mask), or FILE:LINE"
    add("--assume NAME=VALUE…", assume)
    add_shared(parser, "force")
    parser.allow_abbrev = False  # a program's own options are no abbreviations of these
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE ARGS…", help="run a module")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT ARGS…", help="script and its arguments")
    for action in parser._actions:
        action.required = False  # either a script, or --model and --seq-len


def _steps(text: str) -> int | str:
    return text if text == "repeat" else whole_number(text)


def run(args: argparse.Namespace) -> int:
    program = args.module if args.module is not None else args.script
    if program:
        return _run_script(args, program)
    if args.model is None or args.seq_len is None:
        raise UsageError("nothing to run: give a script, -m and a module, or --model and --seq-len")
    from memtrace.estimate.dryrun.source import dry_source, snapshot

    return answer(args, lambda: dry_source(args.model), snapshot)


def _run_script(args: argparse.Namespace, program: list[str]) -> int:
    from memtrace.errors import MissingDependencyError
    from memtrace.estimate.dryrun.assumed import Assumptions, parse
    from memtrace.estimate.presets import gpu_preset
    from memtrace.units import parse_capacity

    if args.model is not None:
        raise UsageError("--model and a script: give one of them")
    if args.module is None and program[0].startswith("-"):
        raise UsageError(f"no such option: {program[0]} (see memtrace dryrun --help)")
    if args.module is None:
        check_program(program[0])
    if args.world_size is not None and not 1 <= args.world_size <= _MOST_RANKS:
        raise UsageError(f"--world-size takes 1 to {_MOST_RANKS:,} processes")
    gpu = gpu_preset(args.gpu or "h200")
    capacity = parse_capacity(args.capacity) if args.capacity else gpu.total_bytes
    name = program[0] if args.module is not None else Path(program[0]).stem
    assumed = Assumptions(parse(args.assume))
    try:
        from memtrace.estimate.dryrun import script
    except ImportError as error:
        raise MissingDependencyError.of_extra(f"a dry run needs PyTorch ({error})", "capture") from None
    options = script.output_of(args.out or Path(f"{name}.predicted.pickle"), args.force)
    device = script.DryDevice(gpu, capacity, assumed)
    from memtrace.estimate.dryrun import ranks

    if args.world_size is None:
        ranks.install_alone(assumed, device.kernels.forget)
    else:
        ranks.install(args.world_size, assumed, device.kernels.forget)
    usual_signals(and_path=True)
    repeat = args.steps == "repeat"
    steps = None if repeat else args.steps
    found = script.run_script(program, args.module is not None, options, device, steps, repeat)
    if args.json:
        print_json(found)
    from memtrace.estimate.dryrun.outcome import lines

    print(*lines(found, gpu.name), sep="\n", file=sys.stderr)
    return found.exit_code
