"""A whole run before it starts: every step's peaks, the step at which it dies, what it would need.

How to call it::

    plan = RunPlan(ShapeSource(model_shape("llama2-7b")), RunOptions(sequence=2048), steps_of(lengths))
    found = forecast(plan, AllocatorConfig(limit_bytes=22 << 30))
    found.fits, found.oom, found.peak_reserved_bytes
    forecast(replace(plan, options=replace(plan.options, checkpointing=True)), …)   # the same run, that option changed
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, field, replace
from multiprocessing import get_all_start_methods, get_context
from typing import Any

from memtrace.allocator.config import AllocatorConfig
from memtrace.errors import UsageError
from memtrace.estimate.cells import Cells, Name, Role
from memtrace.estimate.estimate import kernels_of
from memtrace.estimate.options import RunOptions
from memtrace.estimate.placement import ForecastRefusal, Peaks, Walk
from memtrace.estimate.presets import GpuPreset
from memtrace.estimate.schedule import MicroBatch, Step
from memtrace.estimate.source import StreamSource
from memtrace.estimate.stream import EMPTY_CACHE, Stream, StreamMark, uncollected
from memtrace.frozen import dataclass

_NEEDS_GRAIN = 2 << 20  # limits are told apart by the size of the smallest segment
_WORST_STEPS = 8  # bisected for a quick answer
_LENGTH_GRAIN = 64  # tokens
_MOST_EVENTS = 5_000_000  # of a run that is written down
Progress = Callable[[float], None]
ONE_STEP = "only one step was looked at: optimizer states come at its end, so later steps can need more"


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A run: who re-enacts it, the options (their ``sequence`` and ``batch`` don't count), and its steps in order.

    After every ``evaluate_every`` steps ``evaluation`` is run through without gradients.
    """

    source: StreamSource
    options: RunOptions
    steps: tuple[Step, ...]
    gpu: GpuPreset | None = None
    evaluation: tuple[MicroBatch, ...] = ()
    evaluate_every: int | None = None


@dataclass(frozen=True, slots=True)
class StepPeaks:
    """One step's highest bytes. ``tokens`` are those that it computes, padding included."""

    step: int
    tokens: int
    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """What becomes of a run under one limit. ``steps`` ends with the step that failed."""

    plan: RunPlan = field(repr=False)
    config: AllocatorConfig
    oom: ForecastRefusal | None
    peaks: Peaks
    num_alloc_retries: int
    segment_allocs: int
    segment_frees: int
    steps: tuple[StepPeaks, ...]
    managed_bytes: int

    @property
    def fits(self) -> bool:
        """Whether it runs to its end."""
        return self.oom is None

    @property
    def peak_reserved_bytes(self) -> int:
        """The highest reserved memory of the whole run, loading included."""
        return self.peaks.reserved_bytes


def prepare(plan: RunPlan) -> Cells:
    """The cells of a plan's run, which any number of forecasts of its steps, in any order, can share."""
    batches = [*(batch for step in plan.steps for batch in step), *plan.evaluation]
    options = replace(plan.options, evaluates=bool(plan.evaluation), masked=any(batch.padded for batch in batches))
    cells = Cells(plan.source, options, kernels_of(plan.gpu).device)
    lengths: dict[MicroBatch, set[int]] = defaultdict(set)
    for batch in batches:
        lengths[replace(batch, length=0)].add(batch.length)
    for like, wanted in lengths.items():
        cells.prepare(like, wanted)
    return cells


@uncollected()
def forecast(
    plan: RunPlan,
    config: AllocatorConfig,
    cells: Cells | None = None,
    on_progress: Progress | None = None,
) -> Forecast:
    """Run ``plan`` through an allocator under ``config`` until its end or the first request that is refused.

    ``cells`` saves the time of :func:`prepare`. Raises UsageError for options that no real run has, and what the source
    raises.
    """
    cells = cells or prepare(plan)
    walk = Walk(config)
    found: list[StepPeaks] = []
    total = Peaks(0, 0, 0)
    oom = None
    peaks = Peaks(0, 0, 0)
    for step, micro, role, batch in _cells_of(plan):
        if step == len(found) and micro == 0 and role in (Role.FIRST, Role.MICRO):
            peaks = Peaks(walk.live_bytes, walk.allocated_bytes, walk.reserved_bytes)
        reached, oom = walk.cell(cells.at(role, batch))
        peaks |= reached
        total |= peaks
        if role in (Role.FIRST_OPTIMIZER, Role.OPTIMIZER) or (oom is not None and step >= 0):
            found.append(_step(plan, step, peaks))
            if on_progress is not None:
                on_progress(len(found) / len(plan.steps))
        if oom is not None:
            oom = replace(oom, step=step, micro_batch=micro)
            break
    return Forecast(
        plan=plan,
        config=config,
        oom=oom,
        peaks=total,
        num_alloc_retries=walk.allocator.num_alloc_retries,
        segment_allocs=walk.driver.segment_allocs,
        segment_frees=walk.driver.segment_frees,
        steps=tuple(found),
        managed_bytes=cells.managed_bytes,
    )


def _step(plan: RunPlan, step: int, peaks: Peaks) -> StepPeaks:
    tokens = sum(batch.tokens for batch in plan.steps[step])
    return StepPeaks(step, tokens, peaks.requested_bytes, peaks.allocated_bytes, peaks.reserved_bytes)


def _cells_of(plan: RunPlan) -> Iterator[tuple[int, int, Role, MicroBatch]]:
    """Step, micro-batch, kind and batch of every cell of the run, in order."""
    yield -1, -1, Role.LOAD, plan.steps[0][0]
    for step, batches in enumerate(plan.steps):
        first = step == 0
        for micro, batch in enumerate(batches):
            if micro:
                yield step, micro, Role.FIRST_NEXT if first else Role.NEXT, batch
            else:
                yield step, micro, Role.FIRST if first else Role.MICRO, batch
        yield step, len(batches) - 1, Role.FIRST_OPTIMIZER if first else Role.OPTIMIZER, batches[-1]
        if plan.evaluate_every and (step + 1) % plan.evaluate_every == 0:
            for micro, batch in enumerate(plan.evaluation):
                yield step, micro, Role.EVALUATION, batch


def whole_stream(plan: RunPlan, cells: Cells) -> Stream:
    """Every allocation and free of the run, one cell after the other. Raises UsageError where they are too many."""
    whole = Stream([], [], [], [], [], [], [], cells.managed_bytes, "")
    alive: dict[Name, int] = {}
    for step, _, role, batch in _cells_of(plan):
        cell, sizes = cells.at(role, batch)
        base, count, offset = len(whole.sizes), len(cell.kinds), len(whole.events)
        if offset + len(cell.events) > _MOST_EVENTS:
            raise UsageError(f"more than {_MOST_EVENTS:,} events are too many to write down: fewer --steps")
        number = [*range(base, base + count), *(alive.pop(name) for name in cell.taken)]
        for entry in cell.events:
            whole.events.append(entry if entry >= EMPTY_CACHE else number[entry] if entry >= 0 else ~number[~entry])
        whole.sizes.extend(sizes[kind] for kind in cell.kinds)
        for name in ("labels", "ops", "sites", "layers"):
            getattr(whole, name).extend(getattr(cell.stream, name)[cell.start : cell.start + count])
        whole.marks.extend(StreamMark(offset + mark.event, mark.name, step) for mark in cell.marks)
        alive |= {name: base + place for place, name in cell.left}
    return whole


def longest(plan: RunPlan, config: AllocatorConfig) -> int | None:
    """The most tokens to which sequences can be cut so that the run survives, a multiple of 64; None where none do.

    The longest that there is where the run survives as it is.
    """

    def cut(most: int) -> RunPlan:
        steps = tuple(tuple(replace(b, length=min(b.length, most)) for b in step) for step in plan.steps)
        return replace(plan, steps=steps)

    top = max(batch.length for step in plan.steps for batch in step)
    if forecast(plan, config).fits:
        return top
    low, high = 0, -(-top // _LENGTH_GRAIN)
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if forecast(cut(middle * _LENGTH_GRAIN), config).fits else (low, middle)
    return low * _LENGTH_GRAIN or None


def needs_bytes(
    plan: RunPlan, config: AllocatorConfig, found: Forecast, cells: Cells, quick: bool = False
) -> int | None:
    """The smallest limit under which the run survives, to 2 MiB; ``found`` is its forecast under ``config``.

    By bisection between what it allocates at least and what it reserves where nothing limits it, whatever ``config``
    allows. A run that survives under a limit is taken to survive under a higher one, which flushes at other moments can
    belie: never more than a limit under which it did survive. None where even no limit helps. ``quick``: the steps with
    most tokens are bisected alone, and the whole run is tried under what they need; else what is known to be enough.
    """
    limit = found.config.limit_bytes if found.fits else None
    if not found.fits or found.num_alloc_retries:
        found = forecast(plan, config.with_limit(None), cells)
    if not found.fits:
        return None
    enough = limit if limit is not None and config.gc_threshold else found.peak_reserved_bytes

    def survives(plan: RunPlan, units: int) -> bool:
        return forecast(plan, config.with_limit(units * _NEEDS_GRAIN), cells).fits

    def least(plan: RunPlan, low: int, high: int) -> int:
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (low, middle) if survives(plan, middle) else (middle, high)
        return high

    low, high = found.peaks.allocated_bytes // _NEEDS_GRAIN - 1, -(-enough // _NEEDS_GRAIN)
    survived = limit if limit is not None else high * _NEEDS_GRAIN
    if not quick:
        return min(least(plan, low, high) * _NEEDS_GRAIN, survived)
    heavy = sorted(range(len(plan.steps)), key=lambda i: -max(batch.tokens for batch in plan.steps[i]))
    worst = tuple(plan.steps[i] for i in sorted({0, *heavy[:_WORST_STEPS]}))
    low = least(replace(plan, steps=worst, evaluate_every=plan.evaluate_every and len(worst)), low, high)
    return min((low if survives(plan, low) else high) * _NEEDS_GRAIN, survived)


# ---- other orders ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class OrderOutcome:
    """One shuffling of the same data."""

    seed: int
    fits: bool
    oom_step: int | None
    peak_reserved_bytes: int


def orders(
    plan: RunPlan,
    config: AllocatorConfig,
    shuffled: Sequence[tuple[Step, ...]],
    on_progress: Progress | None = None,
) -> tuple[OrderOutcome, ...]:
    """The outcome of each of these orders of the steps, on all cores."""
    everything = replace(plan, steps=tuple(step for steps in (plan.steps, *shuffled) for step in steps))
    cells = prepare(everything)
    context = get_context("fork" if "fork" in get_all_start_methods() and sys.platform != "darwin" else "spawn")
    found: list[OrderOutcome] = []
    workers = min(os.cpu_count() or 1, len(shuffled))
    with ProcessPoolExecutor(workers, context, _adopt, (plan, config, cells)) as pool:
        for outcome in pool.map(_one_order, enumerate(shuffled)):
            found.append(outcome)
            if on_progress is not None:
                on_progress(len(found) / len(shuffled))
    return tuple(found)


_adopted: list[tuple[RunPlan, AllocatorConfig, Cells]] = []


def _adopt(plan: RunPlan, config: AllocatorConfig, cells: Cells) -> None:
    """In a worker: keep what all its orders share."""
    _adopted[:] = [(plan, config, cells)]


def _one_order(numbered: tuple[int, tuple[Step, ...]]) -> OrderOutcome:
    seed, steps = numbered
    plan, config, cells = _adopted[0]
    found = forecast(replace(plan, steps=steps), config, cells)
    return OrderOutcome(seed, found.fits, found.oom.step if found.oom else None, found.peak_reserved_bytes)


# ---- for programs ----------------------------------------------------------------------------------------------------
_OOM_KEYS = (
    "step", "phase", "micro_batch", "requested_bytes", "tensor_bytes", "allocated_bytes", "reserved_bytes",
    "largest_free_block_bytes",
)  # fmt: skip
_FOUND_KEYS = ("num_alloc_retries", "segment_allocs", "segment_frees", "managed_bytes", "steps")


def as_json(
    found: Forecast,
    verdict: str | None,
    needs: int | None,
    outcomes: Sequence[OrderOutcome],
    assumptions: Sequence[str],
    longest_tokens: int | None = None,
    is_least: bool = True,
) -> dict[str, Any]:
    """Keys as the contract has them, and more; sizes in bytes. ``verdict`` is the judge's word on the refusal;
    ``is_least``: less than ``needs`` bytes are known not to suffice."""
    oom = found.oom and {name: getattr(found.oom, name) for name in _OOM_KEYS} | {"verdict": verdict}
    return {
        "model": found.plan.source.model,
        "options": found.plan.options,
        "limit_bytes": found.config.limit_bytes,
        "fits": found.fits,
        "oom": oom,
        **{f"peak_{level}": size for level, size in asdict(found.peaks).items()},
        **{name: getattr(found, name) for name in _FOUND_KEYS},
        "needs_bytes": needs,
        "needs_is_least": is_least and needs is not None,
        "longest_tokens": longest_tokens,
        "orders": outcomes,
        "basis": found.plan.source.basis,
        "assumptions": assumptions,
    }
