"""Build and record a QLoRA run on this machine's GPU: memtrace capture --model PRESET --seq-len L [OPTIONS]

MODEL is a local folder with weights, a hub id, or a preset or config.json, which get random weights (nothing is
downloaded; memory does not depend on the values). All options of `memtrace estimate` describe the run.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from memtrace.cli.common import option, usual_signals
from memtrace.cli.estimate import add_setup, options_from
from memtrace.cli.run import add_recording_options
from memtrace.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_setup(parser)
    option(parser, "--out FILE", "the recording (default capture.pickle)", type=Path, default=Path("capture.pickle"))
    option(parser, "--train-steps N", "optimizer steps (default 2)", type=int, default=2)
    option(parser, "--eval-batches N", "evaluate on N batches at the end, keeping logits", type=int, default=0)
    option(parser, "--full", "train all weights, without adapters")
    option(parser, "--layers N", "fewer (or more) layers; random weights only", type=int)
    option(parser, "--late", "begin to record after the model is loaded")
    option(parser, "--limit SIZE", "limit reserved memory, as a smaller card would, e.g. 22GiB")
    option(parser, "--seed N", "seed of weights, tokens and dropout", type=int, default=0)
    add_recording_options(parser)


def run(args: argparse.Namespace) -> int:
    from memtrace.record import backend as backend_module
    from memtrace.record.checkpoint import find_model
    from memtrace.record.qlora import record_run, step_config
    from memtrace.units import parse_capacity

    setup = options_from(args)
    if args.train_steps < 0 or args.eval_batches < 0 or args.train_steps + args.eval_batches == 0:
        raise UsageError("nothing to do: give --train-steps or --eval-batches")
    backend_module.get().require()
    usual_signals()
    step = replace(step_config(setup, args.train_steps, args.eval_batches), lora=not args.full, seed=args.seed)
    with tempfile.TemporaryDirectory(prefix="memtrace-") as scratch:
        device = "cpu" if backend_module.get().device_type == "cpu" else "cuda"
        record_run(
            find_model(args.model, Path(scratch), args.layers, device),
            step,
            args.out,
            late=args.late,
            cap_bytes=parse_capacity(args.limit) if args.limit is not None else None,
            stacks=args.stacks,
            max_entries=args.max_entries,
            deep=args.deep,
            force=args.force,
        )
    return 0
