"""The step at which a run will die, before it starts: memtrace forecast --model M --lengths FILE --limit 22GiB

Takes the options of memtrace estimate without --seq-len, and the lengths of the data's sequences in the order in which
they will come. Known families take seconds; any other model is dry-run, which takes a while.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from memtrace.cli.common import add_shared, option, print_json, progress, say_written, settings, whole_number
from memtrace.cli.estimate import add_setup, analysed, options_from
from memtrace.errors import NoAnswerError, UsageError
from memtrace.units import counted
from memtrace.writing import check_target

if TYPE_CHECKING:
    from memtrace.allocator.config import AllocatorConfig
    from memtrace.analysis import Analysis
    from memtrace.estimate.forecast import OrderOutcome, RunPlan
    from memtrace.estimate.options import RunOptions
    from memtrace.estimate.presets import GpuPreset
    from memtrace.estimate.schedule import Step
    from memtrace.estimate.source import StreamSource

_NEEDS_MICRO_BATCHES = 300  # of so many at most, the least that the run needs is worked out unasked


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add = partial(option, parser)
    add("--seeds N", "also the outcome of N shufflings, on all cores", type=whole_number, default=0)
    add("--needs", "the least that a long run needs, not only enough")
    add("--longest", "work out to how many tokens sequences must be cut for the run to survive")
    add("--trace OUT.pickle", "write the run, up to the refusal, as a snapshot")
    add("--plot OUT.svg|.png", "memory over the steps as a picture")
    add("--fail-on-oom", "exit with 1 if the run does not fit")
    add_shared(parser, "json force")


def add_run(parser: argparse.ArgumentParser) -> None:
    """Everything that describes a whole run and its limit."""
    add_setup(parser, of_one_length=False)
    add = partial(option, parser)
    lengths = "tokens of each sequence: one a line, JSON lines with length, num_tokens or input_ids, Parquet, a folder "
    add("--lengths FILE|N,N,…", f"{lengths}of the datasets library")
    add("--tokenizer DIR|FILE", "a tokenizer.json, for --lengths with texts instead of counts")
    add("--padding HOW", "longest (default), none, multiple:N or max:N", default="longest")
    add("--order HOW", "given (default), longest-first or shuffled", default="given")
    add("--steps N", "so many steps, over as many passes as that takes", type=whole_number)
    add("--clip", "gradients are clipped by their norm, as the Trainer does")
    add("--eval-lengths FILE|N,N,…", "sequences of the evaluation, which runs without gradients")
    add("--eval-batch B", "sequences an evaluation batch (default 1)", type=whole_number, default=1)
    add("--eval-every N", "steps between evaluations (default: one at the end)", type=whole_number)
    add("--conf SETTINGS", 'allocator settings, such as "expandable_segments:True"', type=settings)
    add("--limit SIZE", "the most the process may reserve, as a memory fraction sets it")
    add("--dry-run", "re-enact with the real code even where the shapes are known")


def run(args: argparse.Namespace) -> int:
    from memtrace.estimate.forecast import as_json, forecast, longest, needs_bytes, orders, prepare
    from memtrace.explain.forecaster import judge_forecast

    for target in (args.plot, args.trace):
        if target is not None:
            check_target(Path(target), args.force, args.model, args.like)
    asked, plan = plan_from(args)
    config, notes = limit_from(args, asked)
    with progress("forecasting") as on_progress:
        cells = prepare(plan)
        found = forecast(plan, config, cells, on_progress)
    verdict = judge_forecast(found.oom, config) if found.oom is not None else None
    quick = not args.needs and sum(map(len, plan.steps)) > _NEEDS_MICRO_BATCHES
    needs = needs_bytes(plan, config, found, cells, quick)
    outcomes: tuple[OrderOutcome, ...] = ()
    if args.seeds:
        with progress("shuffling") as on_progress:
            shuffled = [asked.steps(args, "shuffled", seed) for seed in range(args.seeds)]
            outcomes = orders(plan, config, shuffled, on_progress)
    longest_tokens = longest(plan, config) if args.longest else None
    if args.trace is not None:
        from memtrace.estimate.predicted import forecast_snapshot, write_document

        write_document(forecast_snapshot(plan, config, cells), Path(args.trace))
        say_written(args.trace)
    assumptions = [*notes, *asked.notes]
    if args.plot is not None:
        from memtrace.export.plots import plot_forecast

        plot_forecast(found, Path(args.plot))
        say_written(args.plot)
    if args.json:
        print_json(
            as_json(
                found, verdict.verdict if verdict else None, needs, outcomes, assumptions, longest_tokens, not quick
            )
        )
    else:
        from memtrace.render.forecast_text import render_forecast

        print("\n".join(render_forecast(found, verdict, needs, outcomes, assumptions, longest_tokens, not quick)))
    return 1 if args.fail_on_oom and not found.fits else 0


def plan_from(args: argparse.Namespace) -> tuple[Asked, RunPlan]:
    """What the arguments ask for, and the run in the order of --order. Raises UsageError."""
    from memtrace.estimate.forecast import ONE_STEP, RunPlan
    from memtrace.estimate.schedule import parse_padding, read_lengths, steps_of

    given = None if args.lengths is None else read_lengths(args.lengths, args.tokenizer)
    asked = _like(args, given) if args.like is not None else _described(args, given)
    options, steps = replace(asked.options, clips=args.clip), asked.steps(args, args.order)
    plan = RunPlan(asked.source, options, steps, asked.gpu)
    if args.eval_lengths is not None:
        held_out = read_lengths(args.eval_lengths, args.tokenizer)
        batches = steps_of(held_out, batch=max(args.eval_batch, 1), padding=parse_padding(args.padding))
        every = args.eval_every or len(steps)
        plan = replace(plan, evaluation=tuple(batch for step in batches for batch in step), evaluate_every=every)
        if every > len(steps):
            late = f"the first evaluation comes after step {every - 1:,}: none was looked at (--steps {every})"
            asked = replace(asked, notes=(late, *asked.notes))
    whole = options.batch * options.accumulation
    if len(asked.lengths) < whole:
        few = f"--lengths has {counted(len(asked.lengths), 'sequence')}, but a step of this run takes {whole:,}: "
        asked = replace(asked, notes=(f"{few}what was looked at is smaller; give {whole:,} or more", *asked.notes))
    if len(steps) == 1:
        asked = replace(asked, notes=(*asked.notes, f"{ONE_STEP} (--steps 3)"))
    return asked, plan


@dataclass(frozen=True, slots=True)
class Asked:
    """A run before its order: ``settings`` and ``limit_bytes`` are those of a recording, where it is like one."""

    source: StreamSource
    options: RunOptions
    lengths: list[int]
    gpu: GpuPreset | None
    notes: tuple[str, ...] = ()
    settings: AllocatorConfig | None = None
    limit_bytes: int | None = None

    def steps(self, args: argparse.Namespace, order: str, seed: int = 0) -> tuple[Step, ...]:
        """The run's steps in one order."""
        from memtrace.estimate.schedule import parse_padding, steps_of

        return steps_of(
            self.lengths,
            batch=self.options.batch,
            accumulation=self.options.accumulation,
            padding=parse_padding(args.padding),
            order=order,
            seed=seed,
            steps=args.steps,
        )


def _described(args: argparse.Namespace, lengths: list[int] | None) -> Asked:
    """The run that --model and the other options describe."""
    from memtrace.estimate.presets import gpu_preset

    if lengths is None:
        raise UsageError("--lengths says how long the data's sequences are: a file, or N,N,…")
    gpu = gpu_preset(args.gpu) if args.gpu is not None else None
    notes = tuple(getattr(args, "config_notes", ()))
    return Asked(source_of(args.model, args.dry_run), options_from(args), lengths, gpu, notes)


def _like(args: argparse.Namespace, lengths: list[int] | None) -> Asked:
    """The configuration of a recording; its own lengths where none are given. Raises NoAnswerError if it has none."""
    from memtrace.allocator.config import from_snapshot, release_of
    from memtrace.estimate.presets import gpu_preset
    from memtrace.estimate.recorded import recorded_gpu, recorded_tokens, setup_of
    from memtrace.estimate.source import ShapeSource

    analysis = analysed(args.like)
    setup = setup_of(analysis)
    if setup is None:
        raise NoAnswerError(f"{args.like}: {_what_is_missing(analysis)}")
    options, notes = setup.options, list(setup.notes)
    if lengths is None:
        found = recorded_tokens(analysis, setup.shape, options.hidden_bytes)
        lengths = [tokens // options.batch for tokens in found for _ in range(options.batch)]
        if not lengths:
            raise NoAnswerError(f"{args.like}: the lengths of its batches can't be told; give --lengths")
        notes.append(f"{len(found):,} micro-batches with the lengths that were recorded")
    snapshot = analysis.timeline.snapshot
    gpu = gpu_preset(args.gpu) if args.gpu is not None else recorded_gpu(snapshot.memtrace)
    settings, limit = from_snapshot(snapshot.settings, release_of(snapshot)), snapshot.noted_bytes("limit_bytes")
    return Asked(ShapeSource(setup.shape), options, lengths, gpu, tuple(notes), settings, limit)


_DECISIVE = (
    "checkpointing", "attention matrices", "tokens of the peak's pass", "trained parameters", "optimizer states",
    "quantised weights", "allocator settings", "limit",
)  # fmt: skip


def _what_is_missing(analysis: Analysis) -> str:
    """Why a recording's run can't be forecast, and what its tensors tell of it all the same."""
    from memtrace.explain.traits import RunSide

    why = "the recording carries no configuration of a run, since it was not memtrace that recorded it"
    if analysis.timeline.snapshot.memtrace:
        why = "the recording names no model with adapters: the run had none yet, or trains all weights"
    traits = RunSide(analysis).traits() if len(analysis.timeline) else {}
    known = ", ".join(f"{name} {traits[name]}" for name in _DECISIVE if name in traits)
    told = f" (its tensors tell: {known})" if known else ""
    return f"{why}; model, batch and lengths are missing: describe the run with --model, --batch, --lengths …{told}"


def source_of(model: str, dry: bool = False) -> StreamSource:
    """The shape engine where it knows the model, else a dry run. Raises UsageError and MissingDependencyError."""
    from memtrace.estimate.presets import model_shape
    from memtrace.estimate.source import ShapeSource

    if not dry:
        try:
            return ShapeSource(model_shape(model))
        except UsageError as error:
            if "not covered" not in str(error):
                raise
            print(f"memtrace: {error}; dry-running it", file=sys.stderr)
    from memtrace.estimate.dryrun.source import dry_source

    return dry_source(model)


def limit_from(args: argparse.Namespace, asked: Asked) -> tuple[AllocatorConfig, list[str]]:
    """The allocator's settings with the limit on reserved bytes, and what is assumed of the card."""
    from memtrace.allocator.conf_text import ConfError, parse_conf
    from memtrace.estimate.estimate import card_notes, kernels_of
    from memtrace.estimate.presets import DEFAULT_CAPACITY_BYTES
    from memtrace.units import format_bytes, parse_capacity

    card = kernels_of(asked.gpu)
    if args.conf is None and asked.settings is not None:
        config = asked.settings
    else:
        try:
            config = parse_conf(args.conf or "", device_total_bytes=card.total_bytes)
        except ConfError as error:
            raise ConfError(f"--conf {error}") from None
    kernels = card_notes(asked.gpu) if asked.gpu is not None else ["no --gpu: kernels as on an H200"]
    outside = card.outside_bytes
    kernels.append(f"the limit is on what the allocator reserves; {format_bytes(outside)} outside it come on top")
    if args.limit is not None:
        return config.with_limit(parse_capacity(args.limit)), kernels
    if args.gpu is None and args.capacity is None and asked.limit_bytes is not None:
        return config.with_limit(asked.limit_bytes), kernels
    capacity = parse_capacity(args.capacity) if args.capacity is not None else None
    capacity = capacity or (card.total_bytes if asked.gpu is not None else DEFAULT_CAPACITY_BYTES)
    notes = [f"{format_bytes(outside)} of {format_bytes(capacity)} left for what lies outside the allocator"]
    return config.with_limit(max(capacity - outside, 1)), [*notes, *card_notes(asked.gpu)]
