"""Measure on this machine's GPU what each option adds, one thing at a time: memtrace sweep --model M --seq-len L

The options describe the configuration that you want. The smallest one is measured first (short, batch 1, checkpointing,
paged 8-bit optimizer), then the smallest plus one thing at a time, then everything. Each run is a fresh process; out of
memory is a result like any other. Results go to --out as they come, and a sweep that was stopped goes on from there.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from memtrace.cli.common import add_shared, option, print_json, usual_signals
from memtrace.cli.estimate import add_setup, options_from
from memtrace.errors import MemtraceError, NoAnswerError, UsageError

if TYPE_CHECKING:
    from memtrace.estimate.shapes import ModelShape
    from memtrace.estimate.sweep import Outcome, Trial

_MOST_RUNS = 64  # of a measured ladder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from memtrace.estimate.sweep import THINGS

    add_setup(parser)
    add_shared(parser, "json")
    add = partial(option, parser)
    add("--out DIR", "where results are kept (default ./sweep)", type=Path, default=Path("sweep"))
    add("--lengths L,L,…", "sequence lengths to measure (default: L/8, L/4, L/2, L)")
    add("--batches B,B,…", "batch sizes to measure (default: 2 and --batch)")
    add("--things NAMES", f"what to add back (default: {','.join(THINGS)})", default=",".join(THINGS))
    add("--layers N", "fewer (or more) layers; random weights only", type=int)
    add("--train-steps N", "optimizer steps a run (default 2)", type=int, default=2)
    add("--limit SIZE", "limit reserved memory, as a smaller card would, e.g. 22GiB")
    add("--timeout S", "seconds after which a run has failed (default 1800)", type=float, default=1800)
    add("--plot OUT.svg|.png", "increments and the fitted line as a picture", type=Path)
    add("--ladder", "measure every combination instead: each option's fair share, as memtrace fit")
    add("--plan", "list the runs and measure nothing")


def run(args: argparse.Namespace) -> int:
    from memtrace.estimate.sweep import plan
    from memtrace.units import parse_capacity

    if args.train_steps < 1:
        raise UsageError("--train-steps must be at least 1")
    names = [name.strip() for name in args.things.split(",") if name.strip()]
    if args.ladder:
        trials = _combinations(args)
    else:
        trials = plan(options_from(args), _numbers(args.lengths), _numbers(args.batches), names)
    if args.plan:
        print("\n".join(f"{number:>3}  {trial.name}" for number, trial in enumerate(trials, 1)))
        return 0
    usual_signals()
    outcomes = _measure(args, trials, parse_capacity(args.limit) if args.limit is not None else None)
    _show(args, outcomes)
    return 0


def _combinations(args: argparse.Namespace) -> list[Trial]:
    """A trial for every choice of options. Raises UsageError for more than 64."""
    from memtrace.estimate.ladder import rungs_of
    from memtrace.estimate.sweep import Trial

    options = options_from(args)
    combined = rungs_of(options)
    if len(combined) > _MOST_RUNS:
        things = ", ".join(sorted(frozenset[str]().union(*combined)))
        raise UsageError(f"--ladder: {len(combined)} combinations of {things}; at most {_MOST_RUNS} are measured")
    return [Trial(" + ".join(sorted(chosen)) or "smallest", "ladder", o) for chosen, o in combined.items()]


def _numbers(text: str | None) -> list[int]:
    try:
        found = [int(word) for word in (text or "").split(",") if word.strip()]
    except ValueError:
        raise UsageError(f"not a list of whole numbers: {text!r}") from None
    if any(number < 1 for number in found):
        raise UsageError(f"lengths and batches are at least 1: {text!r}")
    return found


def _measure(args: argparse.Namespace, trials: list[Trial], limit_bytes: int | None) -> list[Outcome]:
    from memtrace.estimate.sweep import Store
    from memtrace.record import backend as backend_module
    from memtrace.record.checkpoint import find_model
    from memtrace.record.sweep import in_fresh_process, sweep

    backend = backend_module.get()
    backend.precheck()
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"can't write to {args.out}: {error.strerror}") from None
    identity = f"{args.model}|{args.layers}|{limit_bytes}"
    store = Store(args.out)
    missing = [trial for trial in trials if store.get(trial.key(identity, args.train_steps), trial) is None]
    device = "cpu" if backend.device_type == "cpu" else "cuda"
    folder = args.out / "checkpoint" if not missing else Path(find_model(args.model, args.out, args.layers, device))
    measure = in_fresh_process(str(folder), args.train_steps, limit_bytes, args.timeout)
    return sweep(trials, store, lambda trial: trial.key(identity, args.train_steps), measure, _progress)


def _progress(number: int, total: int, trial: Trial, outcome: Outcome | None) -> None:
    from memtrace.units import format_bytes

    head = f"{number}/{total} {trial.name}"
    if outcome is None:
        print(f"{head} …", end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
        return
    clear = "\r\033[K" if sys.stderr.isatty() else ""
    result = {
        "ok": f"{format_bytes(outcome.peak_allocated_bytes)} ({outcome.seconds:.0f} s)",
        "oom": f"out of memory after {format_bytes(outcome.peak_allocated_bytes)}",
    }.get(outcome.status, f"failed: {outcome.message}")
    print(f"{clear}{head}: {result}", file=sys.stderr, flush=True)


def _show(args: argparse.Namespace, outcomes: list[Outcome]) -> None:
    from memtrace.estimate.presets import gpu_preset
    from memtrace.estimate.sweep import as_json, predicted, render

    if args.ladder:
        _show_ladder(args, outcomes)
        return
    shape = _shape(args)
    gpu = gpu_preset(args.gpu) if args.gpu is not None else None
    estimates = [predicted(shape, outcome.trial, gpu) for outcome in outcomes]
    if args.plot is not None:
        from memtrace.export.plots import plot_sweep

        plot_sweep(outcomes, args.plot)
    if args.json:
        print_json(as_json(outcomes, estimates))
    else:
        print("\n".join(render(outcomes, estimates)))


def _show_ladder(args: argparse.Namespace, outcomes: list[Outcome]) -> None:
    """Each option's share of the measured peaks of training, beside that of the estimates."""
    from memtrace.estimate.ladder import shares
    from memtrace.estimate.presets import gpu_preset
    from memtrace.estimate.source import ShapeSource
    from memtrace.render.fit_text import render_ladder

    failed = [outcome for outcome in outcomes if outcome.status != "ok"]
    if failed:
        raise NoAnswerError(f"{len(failed)} of {len(outcomes)} runs did not finish, {failed[0].trial.name} say: "
                            f"{failed[0].status} {failed[0].message}")  # fmt: skip
    peaks, guessed = dict[frozenset[str], int](), dict[frozenset[str], int]()
    shape = _shape(args)
    for outcome in outcomes:
        chosen = frozenset(outcome.trial.name.split(" + ")) - {"smallest"}
        trained = [levels["requested_bytes"] for phase, levels in outcome.phases.items() if phase != "load"]
        peaks[chosen] = max(trained)
        if shape is not None:
            from memtrace.estimate.estimate import kernels_of

            card = kernels_of(gpu_preset(args.gpu) if args.gpu is not None else None)
            guessed[chosen] = ShapeSource(shape).requested_peak(outcome.trial.options, card.device)
    measured, estimated = shares(peaks), shares(guessed) if guessed else ()
    if args.json:
        whole = sum(rung.adds_bytes for rung in measured)
        print_json({"ladder": measured, "ladder_bytes": whole, "estimated": estimated})
        return
    print("\n".join(render_ladder(measured)))
    for rung in estimated:
        print(f"  estimated: {rung.option:<24}{rung.adds_bytes:>16,} B")


def _shape(args: argparse.Namespace) -> ModelShape | None:
    """The shape for the estimates beside the measurements; None where the estimate doesn't cover the model."""
    from dataclasses import replace

    from memtrace.estimate.presets import model_shape

    try:
        shape = model_shape(args.model)
    except MemtraceError:
        return None
    return shape if args.layers is None else replace(shape, layers=args.layers)
