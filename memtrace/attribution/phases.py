"""When was what: the trace cut into phases and steps, by recorded marks where there are any, else by what code ran.

A phase is inferred from the kinds of stacks that allocate and free: module calls are the forward pass; allocations
without Python frames (autograd's threads leave none) or from autograd's engine after it are the backward pass;
optimizer frames or recorded ``Optimizer.step`` ranges are the optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from memtrace.arrays import among, distinct, place_of
from memtrace.attribution.blind_phases import Cycle, Lives, training_cycles
from memtrace.attribution.frame_tags import Tag
from memtrace.attribution.inner_calls import without_inner_calls
from memtrace.attribution.stack_facts import AUTOGRAD, Kind, Mark, StackFacts
from memtrace.frozen import dataclass
from memtrace.history.timeline import NEVER
from memtrace.snapshot.model import Action, Annotation, DeviceTrace

I8 = NDArray[np.int64]
U1 = NDArray[np.uint8]
Bool = NDArray[np.bool_]
_PART = 1 << 18  # events
_MARKED = ("time_us", "step")
_SMALLEST_BYTES = 64  # scalars that outlive a backward pass are losses and norms


class Phase(IntEnum):
    """What the program was doing."""

    UNKNOWN = 0
    LOAD = 1
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    BETWEEN = 5  # between an optimizer step and the next forward pass
    EVALUATION = 6  # a forward pass that no backward pass follows
    GENERATION = 7  # known from an error's text alone

    @property
    def label(self) -> str:
        """Name in outputs."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Phases:
    """Spans that cover the whole trace: span ``i`` is ``start[i] <= event < start[i + 1]``.

    ``step`` counts optimizer steps from 0 (-1 while the model is loaded, and where nothing is trained); ``basis`` says
    what the cut rests on: "recorded" step marks, "annotations", "frames", or "lifetimes".
    """

    start: I8
    phase: U1
    step: I8
    basis: str

    def __len__(self) -> int:
        return len(self.phase)

    def span_of(self, events: NDArray[np.int32] | I8) -> I8:
        """Span of each event; -1 for events before the trace."""
        return np.searchsorted(self.start, events, side="right") - 1 if len(self) else np.full(len(events), -1)


_KIND_OF = {int(kind): kind for kind in Kind}
_ERROR = -1


class _Cutter:
    """A state machine over runs of equal kinds; ``spans`` collects (start event, phase, step)."""

    def __init__(self, seen_forward: bool) -> None:
        self.spans: list[tuple[int, Phase, int]] = []
        self.phase = Phase.UNKNOWN
        self.step = -1
        self.seen_forward = seen_forward

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

    def allocated_by(self, kind: Kind | None, event: int) -> None:
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
        elif kind is None:
            if phase in (Phase.FORWARD, Phase.BACKWARD):
                self.enter(event, Phase.BETWEEN)
        elif kind is Kind.OTHER and phase is Phase.OPTIMIZER:
            self.enter(event, Phase.BETWEEN)


def _runs(values: U1) -> I8:
    """First positions of runs of equal values."""
    return np.flatnonzero(np.append(True, values[1:] != values[:-1]))[: len(values)]


def _marks(events: I8, kinds: NDArray[np.int8]) -> list[Mark]:
    """Marks in order, without those that tell nothing new: in a backward pass, stacks of autograd's thread and of its
    Python functions alternate ten thousands of times."""
    order = np.lexsort((kinds, events))
    events, kinds = events[order], kinds[order]
    place = np.arange(len(kinds))
    is_autograd = among(kinds, AUTOGRAD)
    last_other = np.maximum.accumulate(np.where(is_autograd, -1, place))
    last_told = np.maximum.accumulate(np.where(is_autograd & (kinds != Kind.NONE), place, -1))
    known = is_autograd & (np.append(-1, last_told[:-1]) > last_other)
    return list(zip(events[~known].tolist(), map(_KIND_OF.get, kinds[~known].tolist()), strict=True))


def infer_phases(
    trace: DeviceTrace,
    stacks: StackFacts,
    annotations: Sequence[Annotation],
    lives: Lives,
    stray: Bool,
    older: U1,
    shared: bool,
) -> Phases:
    """Cut one device's trace into phases. Linear in events. ``lives`` are those of every allocation in the trace,
    ``stray`` which of them say nothing, ``older`` the kinds of the stacks of what is older than it, ``shared`` whether
    frees have the stacks of what they free."""
    count = len(trace)
    if count == 0:
        return Phases(np.zeros(1, np.int64), np.zeros(0, np.uint8), np.zeros(0, np.int64), "frames")
    asked = (trace.action == Action.ALLOC) | (trace.action == Action.OOM)
    asked[lives.born[stray]] = False
    allocs = np.flatnonzero(asked)
    stack = trace.stack[allocs]
    kinds = stacks.kind[stack]
    has_frames = bool((kinds != Kind.NONE).any())
    ranges = optimizer_ranges(trace, annotations)
    if not has_frames:
        ends = [0, *(last for _, last in ranges)]
        windows = [(begin, first) for begin, (first, _) in zip(ends, ranges, strict=False) if first > begin]
        freed = lives.chosen(lives.died < NEVER)
        return blind_phases(training_cycles(freed, windows, count), ranges, count)
    ranges = [_own_part(*r, allocs, kinds) for r in ranges]
    ranges = [own for own in ranges if own[1] < count or own[0] <= allocs[-1:]]  # not a closure cut short
    for first, last in ranges:
        kinds[slice(np.searchsorted(allocs, first), np.searchsorted(allocs, last))] = Kind.OPTIMIZER
    # An allocation without frames before any forward pass may come from any thread: neutral until one is seen, unless
    # the trace begins in the middle of a backward pass, which recomputation gives away, or a step ahead of any pass, or
    # is a ring that lost its beginning: of what is still there, the final state has the stacks.
    starts_late = bool((kinds[: _first(kinds, Kind.FORWARD)] == Kind.RECOMPUTE).any())
    starts_late |= _first(kinds, Kind.OPTIMIZER) < _first(kinds, Kind.FORWARD)
    starts_late |= bool(among(older, [Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.OPTIMIZER]).any())
    errors = _errors(trace, allocs)
    runs = distinct(np.concatenate([_runs(kinds), np.searchsorted(allocs, errors)]))
    begins, ends = ([first for first, _ in ranges], [last for _, last in ranges if last < count])
    events = np.concatenate([allocs[runs], np.array([*errors, *begins, *ends], dtype=np.int64)])
    codes = [_ERROR] * len(errors) + [int(Kind.OPTIMIZER)] * len(begins) + [int(Kind.OTHER)] * len(ends)
    marks = _marks(events, np.concatenate([kinds[runs].astype(np.int8), np.array(codes, dtype=np.int8)]))
    cutter = _Cutter(starts_late)
    # What is freed behind the last request of all, an error or the program's end took away.
    died = np.where(lives.died > allocs[-1], NEVER, lives.died)
    lives = Lives(lives.born, died, lives.size)
    marks = without_inner_calls(marks, trace, stacks, lives, shared)
    for event, kind in _updates(_whole_backward(marks), trace, stacks, lives):
        cutter.allocated_by(kind, event)
    spans = cutter.spans if shared else _backdated(trace, stacks, cutter.spans, lives.born)
    if not spans or spans[0][0] > 0:
        spans.insert(0, (0, Phase.UNKNOWN, -1))
    spans = _evaluations(_with_step_before(spans, stack, allocs, kinds), {*errors})
    trains = Tag.ADAPTER_INIT | Tag.CHECKPOINT
    if not any(p in (Phase.BACKWARD, Phase.OPTIMIZER) for _, p, _ in spans) and not stacks.has(trains).any():
        spans = [(start, phase, -1) for start, phase, _ in spans]  # no step where nothing is trained
    return _phases(spans, count, "annotations" if ranges else "frames")


def _with_step_before(
    spans: list[tuple[int, Phase, int]], stack: NDArray[np.int32], allocs: NDArray[np.signedinteger], kinds: U1
) -> list[tuple[int, Phase, int]]:
    """The spans of a trace that begins in or before an optimizer step written by hand, with that step: what its call
    sites make is made in later steps, and nowhere else. What autograd's thread made before it is a backward pass."""
    count = int(np.searchsorted(allocs, spans[1][0])) if len(spans) > 1 else 0  # in the first span
    ahead = kinds[:count] == Kind.OTHER
    if spans[0][1] is not Phase.UNKNOWN or not ahead.any():
        return spans
    at = np.searchsorted([start for start, _, _ in spans], allocs, side="right") - 1
    in_step = np.array([phase is Phase.OPTIMIZER for _, phase, _ in spans])[at]
    elsewhere = stack[~in_step & (at > 0)]
    ahead &= among(stack[:count], stack[in_step]) & ~among(stack[:count], elsewhere)
    if not ahead.any():
        return spans
    allocs, kinds = allocs[:count], kinds[:count]
    first, last = allocs[ahead][[0, -1]].tolist()
    later = [(start, phase, step + (step >= 0)) for start, phase, step in spans[1:]]
    behind = int(np.append(allocs, spans[1][0])[place_of(allocs, last, "right")])  # what it frees is its own
    step = [(first, Phase.OPTIMIZER, 0), *[(behind, Phase.BETWEEN, 1)][: behind < spans[1][0]]]
    backward = [(event, Phase.BACKWARD, 0) for event in allocs[(allocs < first) & (kinds == Kind.NONE)][:1].tolist()]
    step = backward + step
    return [*spans[: step[0][0] > 0], *step, *later]


def _own_part(first: int, last: int, allocs: I8, kinds: U1) -> tuple[int, int]:
    """The optimizer's own part of a recorded step: what lies behind the closure that it called, if it called one."""
    low, high = np.searchsorted(allocs, [first, last]).tolist()
    inside = kinds[low:high]
    if not among(inside, [Kind.FORWARD, Kind.RECOMPUTE]).any():
        return first, last
    closure = np.flatnonzero(~among(inside, [Kind.OPTIMIZER, Kind.OTHER, Kind.LOAD]))
    return int(allocs[low + closure[-1]]) + 1, last


def _errors(trace: DeviceTrace, allocs: I8) -> list[int]:
    """Events just behind a refused request that the pass did not survive, where the program went on.

    Code that asks for less after a refusal (cuDNN, say) does so at the same place.
    """
    refused = np.flatnonzero(trace.action[allocs] == Action.OOM)
    stack = trace.stack[allocs]
    return [int(allocs[i]) + 1 for i in refused.tolist() if i + 1 < len(allocs) and stack[i] != stack[i + 1]]


def _whole_backward(marks: list[Mark]) -> list[Mark]:
    """Optimizers and hooks that run inside the backward pass do not end it: autograd goes on behind them, and they
    come again."""
    result: list[Mark] = []
    stretch: list[Mark] = []
    for mark in [*marks, (-1, Kind.FORWARD)]:
        if mark[1] in (Kind.FORWARD, None):
            result += _one_backward(stretch)
            stretch = []
        stretch.append(mark)
    return result + stretch[:-1]


def _one_backward(stretch: list[Mark]) -> list[Mark]:
    autograd = [i for i, (_, kind) in enumerate(stretch) if kind in AUTOGRAD]
    optimizer = [i for i, (_, kind) in enumerate(stretch) if kind is Kind.OPTIMIZER]
    if not autograd or not optimizer or not (autograd[0] < optimizer[0] < autograd[-1] < optimizer[-1]):
        return stretch
    skipped = (Kind.OPTIMIZER, Kind.OTHER)
    return [m for i, m in enumerate(stretch) if not (autograd[0] < i < autograd[-1] and m[1] in skipped)]


def _updates(marks: list[Mark], trace: DeviceTrace, stacks: StackFacts, lives: Lives) -> Iterator[Mark]:
    """The marks, with the program's own code behind a backward pass as an optimizer step where it makes something for
    (at least half of, or the sum of) the gradients that the passes since the last step left: an optimizer written by
    hand, or what prepares one's work."""
    begun, is_behind, until = -1, False, -1
    left, seen = np.zeros(0, np.int64), 0  # what autograd made of the lives up to there and is still alive
    for i, (event, kind) in enumerate(marks):
        if kind in AUTOGRAD:
            if begun < 0:
                begun, left, seen = event, left[:0], place_of(lives.born, event)
            is_behind = True
        elif kind is Kind.FORWARD:
            is_behind = False
        elif kind in (Kind.OPTIMIZER, None):
            begun, is_behind = -1, False
        elif kind is Kind.OTHER and event < until:  # looked at with the code before it
            continue
        elif kind is Kind.OTHER and is_behind:
            end, following = next(
                (marks[j] for j in range(i + 1, len(marks)) if marks[j][1] is not Kind.OTHER), (len(trace), None)
            )
            mid, high = (place_of(lives.born, edge) for edge in (event, end))
            new = np.arange(seen, mid)
            new = new[among(stacks.kind[trace.stack[lives.born[new]]], AUTOGRAD)]
            left, seen = np.concatenate([left, new[lives.size[new] >= _SMALLEST_BYTES]]), mid
            left = left[lives.died[left] > event]
            freed = left[lives.died[left] < NEVER]
            gradients = lives.size[freed if len(freed) else left]  # a workspace stays
            sizes, total = lives.size[mid:high], int(gradients.sum())
            made = among(sizes, np.concatenate([gradients, gradients * 2]))  # in 32 bits, too
            if made.sum() * 2 < len(gradients):
                made = (np.abs(sizes - total) * 64 <= total) | (np.abs(sizes - total * 2) * 64 <= total)  # flat
                made &= len(gradients) > 1
            if made.any():
                until = end
                first = mid + int(np.flatnonzero(made)[0])
                if (in_place := among(sizes, gradients)).sum() * 2 >= len(gradients):
                    made = in_place  # what is twice as large is the next batch, say, unless such code makes it, too
                stack = trace.stack[lives.born[mid:high]]
                last = mid + int(np.flatnonzero(among(stack, stack[made]))[-1])
                yield int(lives.born[first]), Kind.OPTIMIZER
                behind = int(lives.born[last + 1]) if last + 1 < high else end  # the next batch, say
                if behind < len(trace) and following is not Kind.OPTIMIZER:  # which goes on with the step
                    yield behind, Kind.OTHER
                continue
        yield event, kind


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
    return [(first, last) for first, last in sorted(ranges) if first < len(trace) and last > 0]


def _backdated(
    trace: DeviceTrace, stacks: StackFacts, spans: list[tuple[int, Phase, int]], allocs: NDArray[np.int32]
) -> list[tuple[int, Phase, int]]:
    """Begin each backward pass at its first free rather than its first allocation, and end each optimizer step where
    the program begins to free.

    The first nodes of a backward pass free saved tensors before they allocate; behind a step, gradients are given up.
    Frees carry their own stacks under the default ``context="all"``.
    """
    frees_first = {(Phase.FORWARD, Phase.BACKWARD): AUTOGRAD, (Phase.OPTIMIZER, Phase.BETWEEN): (Kind.OTHER,)}
    if not len(allocs):  # nothing but refused requests
        return spans
    moved = spans[:1]
    for (_, before, _), (start, phase, step) in pairwise(spans):
        last = int(allocs[max(place_of(allocs, start) - 1, 0)])
        by = frees_first.get((before, phase), ())
        if phase is Phase.BETWEEN and stacks.kind[trace.stack[last]] != Kind.OPTIMIZER:
            by = ()  # an optimizer written by hand, whose code is the program's
        if by:
            begin = max(last, moved[-1][0]) + 1  # inside the phase before, which may have asked for nothing
            frees = begin + np.flatnonzero(trace.action[begin:start] == Action.FREE_REQUESTED)
            early = frees[among(stacks.kind[trace.stack[frees]], by)]
            start = int(early[0]) if len(early) else start
        moved.append((start, phase, step))
    return moved


def frees_share_stacks(trace: DeviceTrace, makers: NDArray[np.int32]) -> bool:
    """Whether frees were recorded with the stack of the allocation (``context="alloc"``): no stack is free-only.

    ``makers``: the stacks of the trace's allocations.
    """
    allocates, frees = np.zeros((2, int(trace.stack.max(initial=-1)) + 2), dtype=np.bool_)  # by stack; -1 is the last
    allocates[makers] = True
    for start in range(0, len(trace), _PART):  # the first part tells, nearly always
        part = slice(start, start + _PART)
        frees[trace.stack[part][trace.action[part] == Action.FREE_REQUESTED]] = True
        if (frees & ~allocates).any():
            return False
    return int(frees.sum()) > 1


def with_recorded_steps(phases: Phases, trace: DeviceTrace, marks: object) -> Phases:
    """The same phases, with the step numbers that memtrace's recorder stored (``[{"time_us", "name", "step"}, …]``).

    A recording that began late knows nothing of the steps before it; the recorder does.
    """
    if trace.time_us is None or not isinstance(marks, list) or not len(phases):
        return phases
    known = sorted(
        (mark["time_us"], mark["step"])
        for mark in marks
        if isinstance(mark, dict) and all(type(mark.get(key)) is int and abs(mark[key]) < 1 << 62 for key in _MARKED)
    )
    if not known:
        return phases
    last_of_span = np.maximum(phases.start[1:] - 1, 0)
    at = np.searchsorted([time_us for time_us, _ in known], trace.time_us[last_of_span], side="right") - 1
    recorded = np.array([step for _, step in known], dtype=np.int64)[np.maximum(at, 0)]
    step = np.where((at >= 0) & (phases.step >= 0), recorded, phases.step)
    return Phases(phases.start, phases.phase, step, "recorded")


def _evaluations(spans: list[tuple[int, Phase, int]], errors: set[int]) -> list[tuple[int, Phase, int]]:
    """Forward spans that end in something other than a backward pass (not an error or the trace) are evaluation."""
    renamed = []
    has_backward = any(phase is Phase.BACKWARD for _, phase, _ in spans)
    for i, (start, phase, step) in enumerate(spans):
        following = spans[i + 1][1] if i + 1 < len(spans) else None
        cut = following is not None and spans[i + 1][0] in errors
        if phase is Phase.FORWARD and has_backward and not cut and following not in (Phase.BACKWARD, None):
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
