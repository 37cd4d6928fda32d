"""What to change so that a run of one length fits: the changes of :mod:`memtrace.estimate.moves`, re-estimated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memtrace.allocator.config import AllocatorConfig
from memtrace.estimate.estimate import Estimate, Fit, verdict
from memtrace.estimate.forecast import RunPlan
from memtrace.estimate.moves import FitRun, moves
from memtrace.estimate.options import RunOptions
from memtrace.estimate.schedule import MicroBatch
from memtrace.estimate.source import ShapeSource
from memtrace.frozen import dataclass


@dataclass(frozen=True, slots=True)
class Change:
    """One change of the options: how it is made, what it costs, what it saves, and the proof.

    ``fit`` is the changed run's own verdict, as memtrace estimate gives it with ``flag`` added. ``saves_bytes`` is what
    the device holds less of, ``margin_bytes`` what is left on it; what is missing now plus the margin is the saving.
    ``saves_requested_bytes`` is the difference of the peaks of requested bytes. ``sufficient``: it fits, without the
    allocator having to give anything back.
    """

    change: str
    flag: str
    cost: str
    saves_bytes: int
    saves_requested_bytes: int
    margin_bytes: int
    sufficient: bool
    options: RunOptions
    fit: Fit


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A change that is known to save requested bytes, and not proven yet: a proof takes a hundred times as long."""

    change: str
    cost: str
    options: RunOptions
    requested_bytes: int


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


def _candidate(estimate: Estimate, change: str, cost: str, options: RunOptions) -> _Candidate:
    """A change to ``options``, with its requested peak."""
    assert isinstance(estimate.source, ShapeSource)
    return _Candidate(change, cost, options, estimate.source.requested_peak(options, estimate.gpu.device))


def _may_suffice(estimate: Estimate, candidate: _Candidate) -> bool:
    """Whether what is requested alone would fit; no allocator holds less."""
    return candidate.requested_bytes + estimate.outside_bytes <= estimate.fit.capacity_bytes


def _proven(estimate: Estimate, candidate: _Candidate) -> Change:
    """The changed run's own verdict."""
    options = candidate.options
    *_, fit = verdict(estimate.source, options, estimate.gpu, estimate.fit.capacity_bytes)
    flags = options.flags(estimate.options)
    saves = estimate.fit.device_bytes - fit.device_bytes
    requested = estimate.peak_requested_bytes - candidate.requested_bytes
    cost = candidate.cost
    return Change(candidate.change, flags, cost, saves, requested, fit.margin_bytes, fit.fits, options, fit)


def _alone(estimate: Estimate) -> Iterator[Change]:
    """Every option changed by itself, as far as is needed."""
    runs: dict[str, FitRun] = {}
    best: dict[str, _Candidate] = {}
    proven: dict[str, Change] = {}
    was: dict[str, str] = {}
    for move in moves():
        made = move.make(runs.get(move.option, _start(estimate)))
        before = proven.get(move.option)
        if made is None or move.option == "length" or (before is not None and before.sufficient):
            continue
        run, old, now = made
        told = f"{move.option}: {was.setdefault(move.option, old)} → {now}"
        found = _candidate(estimate, told, f"{move.why}; {move.cost}", run.plan.options)
        least = best[move.option].requested_bytes if move.option in best else estimate.peak_requested_bytes
        if found.requested_bytes < least:
            runs[move.option], best[move.option] = run, found
            proven.pop(move.option, None)
            if _may_suffice(estimate, found):
                proven[move.option] = _proven(estimate, found)
    for option, candidate in best.items():
        yield proven.get(option) or _proven(estimate, candidate)


def _together(estimate: Estimate) -> Iterator[Change]:
    """No single change suffices: the shortest run of them, in order of cost, that does (training unchanged)."""
    run, least, made = _start(estimate), estimate.peak_requested_bytes, 0
    for move in moves():
        changed = move.make(run) if not move.alters else None
        if changed is None:
            continue
        told = f"{made + 1} changes together"
        found = _candidate(estimate, told, "the sum of theirs", changed[0].plan.options)
        if found.requested_bytes < least:
            run, least, made = changed[0], found.requested_bytes, made + 1
            if _may_suffice(estimate, found) and (change := _proven(estimate, found)).sufficient:
                yield change
                return


def _longest(estimate: Estimate) -> Iterator[Change]:
    """The longest sequence that fits, a multiple of 64, by bisection."""
    found: Change | None = None
    low, high = 0, -(-estimate.options.sequence // 64)
    while low + 1 < high:
        middle = (low + high) // 2
        options = replace(estimate.options, sequence=64 * middle)
        told = f"sequences of at most {64 * middle} tokens"
        shorter = _candidate(estimate, told, "shorter texts", options)
        change = _proven(estimate, shorter) if _may_suffice(estimate, shorter) else None
        if change is not None and change.sufficient:
            low, found = middle, change
        else:
            high = middle
    if found is not None:
        yield found
