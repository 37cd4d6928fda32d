"""When was what: the trace cut into phases and steps, by recorded marks where there are any, else by what code ran.

A phase is inferred from the kinds of stacks that allocate and free: module calls are the forward pass; allocations
without Python frames (autograd's threads leave none) or from autograd's engine after it are the backward pass;
optimizer frames or recorded ``Optimizer.step`` ranges are the optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from memtrace.attribution.blind_phases import Cycle, Lives, training_cycles
from memtrace.attribution.stack_facts import Kind, StackFacts
from memtrace.snapshot.model import Action, Annotation, DeviceTrace

I8 = NDArray[np.int64]
U1 = NDArray[np.uint8]


class Phase(IntEnum):
    """What the program was doing."""

    UNKNOWN = 0
    LOAD = 1
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    BETWEEN = 5  # between an optimizer step and the next forward pass
    EVALUATION = 6  # a forward pass that no backward pass follows
    GENERATION = 7

    @property
    def label(self) -> str:
        """Name in outputs."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Phases:
    """Spans that cover the whole trace: span ``i`` is ``start[i] <= event < start[i + 1]``.

    ``step`` counts optimizer steps from 0 (-1 while the model is loaded); ``basis`` says what the cut rests on:
    "recorded" step marks, "annotations", "frames", or "lifetimes".
    """

    start: I8
    phase: U1
    step: I8
    basis: str

    def __len__(self) -> int:
        return len(self.phase)

    def span_of(self, events: I8) -> I8:
        """Span of each event; -1 for events before the trace."""
        return np.searchsorted(self.start, events, side="right") - 1 if len(self) else np.full(len(events), -1)


_KIND_OF = {int(kind): kind for kind in Kind}


class _Cutter:
    """A state machine over runs of equal kinds; ``spans`` collects (start event, phase, step)."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, Phase, int]] = []
        self.phase = Phase.UNKNOWN
        self.step = -1
        self.seen_forward = False

    def enter(self, event: int, phase: Phase) -> None:
        if phase is self.phase:
            return
        if phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER) and self.step < 0:
            self.step = 0
        if self.phase is Phase.OPTIMIZER and phase is not Phase.OPTIMIZER:
            self.step += 1
        self.phase = phase
        if self.spans and self.spans[-1][0] == event:
            self.spans.pop()
        self.spans.append((event, phase, self.step))

    def allocated_by(self, kind: Kind, event: int) -> None:
        """One run of allocations whose stacks have this kind begins at ``event``."""
        phase = self.phase
        if kind is Kind.FORWARD:
            self.seen_forward = True
            self.enter(event, Phase.FORWARD)
        elif kind is Kind.OPTIMIZER:
            self.enter(event, Phase.OPTIMIZER)
        elif kind in (Kind.BACKWARD, Kind.RECOMPUTE):
            self.enter(event, Phase.BACKWARD)
        elif kind is Kind.NONE:
            if phase is Phase.FORWARD:
                self.enter(event, Phase.BACKWARD)
            elif phase is Phase.UNKNOWN:
                self.enter(event, Phase.BACKWARD if self.seen_forward else Phase.UNKNOWN)
        elif kind is Kind.LOAD:
            if not self.seen_forward:
                self.enter(event, Phase.LOAD)
        elif kind is Kind.OTHER and phase is Phase.OPTIMIZER:
            self.enter(event, Phase.BETWEEN)


def _runs(values: U1) -> list[int]:
    """First positions of runs of equal values."""
    return [] if not len(values) else [0, *(np.flatnonzero(np.diff(values)) + 1).tolist()]


def infer_phases(
    trace: DeviceTrace, stacks: StackFacts, annotations: Sequence[Annotation], lives: Callable[[], Lives]
) -> Phases:
    """Cut one device's trace into phases. Linear in events. ``lives`` is asked only where no stacks were recorded."""
    count = len(trace)
    if count == 0:
        return Phases(np.zeros(1, np.int64), np.zeros(0, np.uint8), np.zeros(0, np.int64), "frames")
    allocs = np.flatnonzero((trace.action == Action.ALLOC) | (trace.action == Action.OOM))
    kinds = stacks.kind[trace.stack[allocs]]
    has_frames = bool((kinds != Kind.NONE).any())
    ranges = optimizer_ranges(trace, annotations)
    if ranges:
        for first, last in ranges:
            inside = slice(np.searchsorted(allocs, first), np.searchsorted(allocs, last))
            kinds[inside] = Kind.OPTIMIZER
    cutter = _Cutter()
    if not has_frames:
        ends = [0, *(last for _, last in ranges)]
        windows = [(begin, first) for begin, (first, _) in zip(ends, ranges, strict=False) if first > begin]
        return blind_phases(training_cycles(lives(), windows, count), ranges, count)
    # An allocation without frames before any forward pass may come from any thread: neutral until one is seen, unless
    # the trace begins in the middle of a backward pass, which recomputation gives away.
    starts_late = bool((kinds[: _first(kinds, Kind.FORWARD)] == Kind.RECOMPUTE).any())
    cutter.seen_forward = starts_late
    runs = _runs(kinds)
    marks = sorted(
        list(zip(allocs[runs].tolist(), map(_KIND_OF.__getitem__, kinds[runs].tolist()), strict=True))
        + [(first, Kind.OPTIMIZER) for first, _ in ranges]
        + [(last, Kind.OTHER) for _, last in ranges if last < count]
    )
    for event, kind in marks:
        cutter.allocated_by(kind, event)
    spans = _backdate_backward(trace, stacks, cutter.spans)
    if not spans or spans[0][0] > 0:
        spans.insert(0, (0, Phase.UNKNOWN, -1))
    spans = _evaluations(spans)
    return _phases(spans, count, "annotations" if ranges else "frames")


def _first(values: U1, wanted: int) -> int:
    found = np.flatnonzero(values == wanted)
    return int(found[0]) if len(found) else len(values)


def _phases(spans: list[tuple[int, Phase, int]], count: int, basis: str) -> Phases:
    return Phases(
        start=np.array([start for start, _, _ in spans] + [count], dtype=np.int64),
        phase=np.array([phase for _, phase, _ in spans], dtype=np.uint8),
        step=np.array([step for _, _, step in spans], dtype=np.int64),
        basis=basis,
    )


def optimizer_ranges(trace: DeviceTrace, annotations: Sequence[Annotation]) -> list[tuple[int, int]]:
    """(first event, event after the last) of every recorded ``Optimizer.step`` range on this device."""
    if trace.time_us is None or not len(trace):
        return []
    ranges: list[tuple[int, int]] = []
    open_at: list[int] = []
    for note in annotations:
        if note.device != trace.device or not note.name.startswith("Optimizer.step#"):
            continue
        if note.stage == "START":
            open_at.append(note.time_us)
        elif open_at:
            begin = open_at.pop()
            if not open_at:
                first, last = np.searchsorted(trace.time_us, [begin, note.time_us + 1]).tolist()
                ranges.append((first, last))
    if open_at:  # cut off inside the step, by an out-of-memory error say
        ranges.append((int(np.searchsorted(trace.time_us, open_at[0])), len(trace)))
    return [(first, last) for first, last in sorted(ranges) if first < len(trace)]


def _backdate_backward(
    trace: DeviceTrace, stacks: StackFacts, spans: list[tuple[int, Phase, int]]
) -> list[tuple[int, Phase, int]]:
    """Begin each backward pass at its first free rather than its first allocation.

    The first nodes of a backward pass free saved tensors before they allocate. Frees carry their own stacks under
    the default ``context="all"``; where they share the allocation's stack they say nothing and nothing moves.
    """
    frees = np.flatnonzero(trace.action == Action.FREE_REQUESTED)
    if not len(frees):
        return spans
    kinds = stacks.kind[trace.stack[frees]]
    by_autograd = (kinds == Kind.NONE) | (kinds == Kind.BACKWARD) | (kinds == Kind.RECOMPUTE)
    shared = frees_share_stacks(trace)
    allocs = np.flatnonzero(trace.action == Action.ALLOC)
    moved = []
    for i, (start, phase, step) in enumerate(spans):
        if phase is Phase.BACKWARD and i and spans[i - 1][1] is Phase.FORWARD and not shared:
            before = np.searchsorted(allocs, start) - 1
            last_forward = int(allocs[before]) if before >= 0 else -1
            window = slice(np.searchsorted(frees, last_forward), np.searchsorted(frees, start))
            early = np.flatnonzero(by_autograd[window])
            if len(early):
                start = int(frees[window][early[0]])
        moved.append((start, phase, step))
    return moved


def frees_share_stacks(trace: DeviceTrace) -> bool:
    """Whether frees were recorded with the stack of the allocation (``context="alloc"``): no stack is free-only."""
    alloc_stacks = np.unique(trace.stack[trace.action == Action.ALLOC])
    free_stacks = np.unique(trace.stack[trace.action == Action.FREE_REQUESTED])
    return len(free_stacks) > 1 and bool(np.isin(free_stacks, alloc_stacks).all())


def with_recorded_steps(phases: Phases, trace: DeviceTrace, marks: object) -> Phases:
    """The same phases, with the step numbers that memtrace's recorder stored (``[{"time_us", "name", "step"}, …]``).

    A recording that began late knows nothing of the steps before it; the recorder does.
    """
    if trace.time_us is None or not isinstance(marks, list) or not len(phases):
        return phases
    known = sorted(
        (mark["time_us"], mark["step"])
        for mark in marks
        if isinstance(mark, dict) and isinstance(mark.get("time_us"), int) and isinstance(mark.get("step"), int)
    )
    if not known:
        return phases
    last_of_span = np.maximum(phases.start[1:] - 1, 0)
    at = np.searchsorted([time_us for time_us, _ in known], trace.time_us[last_of_span], side="right") - 1
    recorded = np.array([step for _, step in known], dtype=np.int64)[np.maximum(at, 0)]
    step = np.where((at >= 0) & (phases.step >= 0), recorded, phases.step)
    return Phases(phases.start, phases.phase, step, "recorded")


def _evaluations(spans: list[tuple[int, Phase, int]]) -> list[tuple[int, Phase, int]]:
    """Forward spans that end in something other than a backward pass (and not with the trace) are evaluation."""
    renamed = []
    has_backward = any(phase is Phase.BACKWARD for _, phase, _ in spans)
    for i, (start, phase, step) in enumerate(spans):
        following = spans[i + 1][1] if i + 1 < len(spans) else None
        if phase is Phase.FORWARD and has_backward and following not in (Phase.BACKWARD, None):
            phase = Phase.EVALUATION
        renamed.append((start, phase, step))
    return renamed


def blind_phases(cycles: Sequence[Cycle], ranges: Sequence[tuple[int, int]], count: int) -> Phases:
    """Phases of a trace without stacks, from lifetimes (``cycles``) and recorded optimizer ``ranges``."""
    marks = [(first, Phase.FORWARD) for first, _, _ in cycles]
    marks += [(turn, Phase.BACKWARD) for _, turn, _ in cycles]
    marks += [(last, Phase.BETWEEN) for _, _, last in cycles if last < count]
    marks += [(first, Phase.OPTIMIZER) for first, _ in ranges]
    marks += [(last, Phase.BETWEEN) for _, last in ranges if last < count]
    spans: list[tuple[int, Phase, int]] = [(0, Phase.UNKNOWN, -1)]
    step, stepped = 0, False
    for event, phase in sorted(marks):
        if phase is Phase.FORWARD and stepped:
            step, stepped = step + 1, False
        stepped |= phase is Phase.OPTIMIZER or (phase is Phase.BETWEEN and not ranges)
        if spans[-1][0] == event:
            spans.pop()
        spans.append((event, phase, step))
    return _phases(spans, count, "lifetimes")
