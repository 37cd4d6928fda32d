"""What to change so that a run of one length fits: the changes of :mod:`memtrace.estimate.moves`, re-estimated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from memtrace.allocator.config import AllocatorConfig
from memtrace.estimate.depth import requested_peak
from memtrace.estimate.estimate import Estimate
from memtrace.estimate.forecast import RunPlan
from memtrace.estimate.moves import FitRun, Move, moves
from memtrace.estimate.options import RunOptions
from memtrace.estimate.schedule import MicroBatch
from memtrace.estimate.source import ShapeSource


@dataclass(frozen=True, slots=True)
class Change:
    """One change of the options: how it is made, what it costs, and what it saves.

    All sizes are of device memory, which decides: ``saves_bytes`` is what the device would hold less of and
    ``margin_bytes`` what would be left on it, if the share of memory lost to the allocator stays as it is, so that what
    is missing now plus the margin is the saving. ``saves_requested_bytes`` is the difference of the re-estimated peaks
    of requested bytes, which is exact. ``sufficient``: the margin is not negative.
    """

    change: str
    flag: str
    cost: str
    saves_bytes: int
    saves_requested_bytes: int
    margin_bytes: int
    sufficient: bool
    options: RunOptions


def advise(estimate: Estimate) -> tuple[Change, ...]:
    """Changes that save memory, sufficient ones first, in order of what they cost. Empty if the run fits."""
    if estimate.fit.fits or not isinstance(estimate.source, ShapeSource):
        return ()
    found = [*_alone(estimate)]
    if not any(change.sufficient for change in found):
        found += _together(estimate)
    return tuple(sorted([*found, *_longest(estimate)], key=lambda change: not change.sufficient))


def _start(estimate: Estimate) -> FitRun:
    """The estimate's run as one of a single micro-batch."""
    options = estimate.options
    steps = ((MicroBatch(options.batch, options.sequence),),)
    return FitRun(RunPlan(estimate.source, options, steps, estimate.gpu), AllocatorConfig())


def _priced(estimate: Estimate, change: str, cost: str, options: RunOptions) -> Change:
    """A change to ``options``, re-estimated."""
    assert isinstance(estimate.source, ShapeSource)
    peak = requested_peak(estimate.source, options, estimate.gpu.device)
    loss = estimate.peak_reserved_bytes / estimate.peak_requested_bytes  # what the allocator adds
    missing = estimate.fit.device_bytes - estimate.fit.capacity_bytes
    saves = estimate.fit.device_bytes - estimate.outside_bytes - round(peak * loss)
    requested = estimate.peak_requested_bytes - peak
    flags = options.flags(estimate.options)
    return Change(change, flags, cost, saves, requested, saves - missing, saves >= missing, options)


def _alone(estimate: Estimate) -> Iterator[Change]:
    """Every option changed by itself, as far as is needed."""
    runs: dict[str, FitRun] = {}
    found: dict[str, Change] = {}
    was: dict[str, str] = {}
    for move in moves():
        made = move.make(runs.get(move.option, _start(estimate)))
        before = found.get(move.option)
        if made is None or move.option == "length" or (before is not None and before.sufficient):
            continue
        run, old, now = made
        told = f"{move.option}: {was.setdefault(move.option, old)} → {now}"
        change = _priced(estimate, told, f"{move.why}; {move.cost}", run.plan.options)
        if change.saves_requested_bytes > (before.saves_requested_bytes if before is not None else 0):
            runs[move.option], found[move.option] = run, change
    yield from found.values()


def _together(estimate: Estimate) -> Iterator[Change]:
    """No single change suffices: the shortest run of them, in order of cost, that does (training unchanged)."""
    run, best, made = _start(estimate), 0, list[Move]()
    for move in moves():
        changed = move.make(run) if not move.alters else None
        if changed is None:
            continue
        change = _priced(estimate, f"{len(made) + 1} changes together", "the sum of theirs", changed[0].plan.options)
        if change.saves_requested_bytes > best:
            run, best = changed[0], change.saves_requested_bytes
            made.append(move)
            if change.sufficient:
                yield change
                return


def _longest(estimate: Estimate) -> Iterator[Change]:
    """The longest sequence that fits, a multiple of 64, by bisection."""

    def of(units: int) -> Change:
        options = replace(estimate.options, sequence=64 * units)
        return _priced(estimate, f"sequences of at most {64 * units} tokens", "shorter texts", options)

    low, high = 0, estimate.options.sequence // 64
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if of(middle).sufficient else (low, middle)
    if low:
        yield of(low)
