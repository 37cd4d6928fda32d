"""Labelled recordings with a part of their evidence taken away, and what is right, wrong and left open of what is left.

Each way makes another timeline of a recording's; the truth goes with the allocations, by the event of the whole
recording that made them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scoring import meant_by

from memtrace.attribution.categories import Category
from memtrace.attribution.classify import Attribution, attribute
from memtrace.attribution.phases import Phase
from memtrace.history.timeline import Timeline
from memtrace.snapshot.model import Action, Annotation, DeviceTrace
from memtrace.snapshot.stacks import Frame, StackTable

I8 = NDArray[np.int64]
Labels = dict[str, Any]
_PER_EVENT = ("action", "address", "size", "stream", "stack", "context", "pool", "user_metadata", "compile_context")


class Thinned(NamedTuple):
    """``made[i]``: event of the whole recording that made row i of the allocations; -1: before it."""

    timeline: Timeline
    made: I8


Way = Callable[[Timeline], Thinned | None]  # None: the recording has nothing of that kind to take away


class Shares(NamedTuple):
    """Of the bytes at the peak of what is left."""

    right: float
    unattributed: float
    wrong: float


def bare(timeline: Timeline) -> Timeline:
    """Without what memtrace's own recorder stored by identity: it would hide what the rules say."""
    return dataclasses.replace(timeline, snapshot=dataclasses.replace(timeline.snapshot, memtrace={}))


# -- ways -----------------------------------------------------------------------------------------------------------


def without_marks(timeline: Timeline) -> Thinned:
    """No recorded ``Optimizer.step`` ranges."""
    return _as_it_is(_with(timeline, annotations=()))


def ring(lost: float) -> Way:
    """Only the newest events, less that share; of what is older and still there, the final state has the stack."""

    def way(timeline: Timeline) -> Thinned | None:
        return _window(timeline, int(len(timeline.trace) * lost), len(timeline.trace))

    return way


def stacks_missing(share: float) -> Way:
    """That share of the distinct stacks, empty."""

    def way(timeline: Timeline) -> Thinned:
        table = timeline.snapshot.stacks
        lost = np.append(np.random.default_rng(5).random(len(table)) < share, False)
        return _as_it_is(_restacked(timeline, lambda stack: np.where(lost[stack], -1, stack)))

    return way


def frames_cut(count: int) -> Way:
    """Only so many frames of each stack, the innermost."""

    def way(timeline: Timeline) -> Thinned:
        table = timeline.snapshot.stacks
        place = np.arange(len(table.frame)) - np.repeat(table.start[:-1], np.diff(table.start))
        return _as_it_is(_with(timeline, stacks=_kept(table, place < count)))

    return way


def without_modules(timeline: Timeline) -> Thinned | None:
    """As if the model were functions on plain tensors: no module is called, nothing is called ``forward``, and the
    libraries that hold weights and models are the program's own files."""
    table = timeline.snapshot.stacks
    if any("/fsdp/" in f.filename or "/deepspeed/" in f.filename for f in table.frames):  # which shard modules
        return None
    named = [
        Frame(f"/home/me/{f.filename.rpartition('/')[2]}" if _of_model(f) else f.filename, f.line,
              "apply" if f.name == "forward" and not _of_autograd(f) else f.name)
        for f in table.frames
    ]  # fmt: skip
    is_module = np.array(["torch/nn/modules/module.py" in f.filename for f in table.frames] or [False])
    kept = _kept(table, ~is_module[table.frame])
    return _as_it_is(_with(timeline, stacks=dataclasses.replace(kept, frames=tuple(named))))


def _of_model(frame: Frame) -> bool:
    return any(part in frame.filename for part in ("torch/nn/modules/", "/transformers/", "/timm/", "/torchvision/"))


def _of_autograd(frame: Frame) -> bool:
    return "torch/autograd" in frame.filename


def no_stacks(timeline: Timeline) -> Thinned:
    """``stacks=None``: events and blocks without any."""
    return _as_it_is(_restacked(timeline, lambda stack: np.full_like(stack, -1)))


def no_stacks_no_marks(timeline: Timeline) -> Thinned:
    """Neither stacks nor recorded steps."""
    return without_marks(no_stacks(timeline).timeline)


def stacks_of_state(timeline: Timeline) -> Thinned:
    """``context="state"``: only what is there at the end has its stack."""
    table = timeline.allocations
    last = (table.free_requested_event < 0) & (table.free_completed_event < 0)
    trace = dataclasses.replace(timeline.trace, stack=np.full_like(timeline.trace.stack, -1))
    return _as_it_is(_rebuilt(timeline, trace, stack=np.where(last, table.stack, -1).astype(np.int32)))


def stacks_of_allocations(timeline: Timeline) -> Thinned:
    """``context="alloc"``: a free carries the stack of its allocation."""
    table, stack = timeline.allocations, timeline.trace.stack.copy()
    for frees in (table.free_requested_event, table.free_completed_event):
        made = np.flatnonzero((frees >= 0) & (table.alloc_event >= 0))
        stack[frees[made]] = table.stack[made]
    return _as_it_is(_rebuilt(timeline, dataclasses.replace(timeline.trace, stack=stack)))


def one_pass(timeline: Timeline) -> Thinned | None:
    """From the second pass's beginning (of one: from the recording's) to the end of its backward pass."""
    spans = _spans(timeline)
    passes = [i for i, (_, phase) in enumerate(spans) if phase is Phase.BACKWARD]
    if not passes:
        return None
    back = passes[min(1, len(passes) - 1)]
    forward = max((i for i in range(back) if spans[i][1] is Phase.FORWARD), default=0)
    begin = spans[forward][0] if len(passes) > 1 else 0
    end = spans[back + 1][0] if back + 1 < len(spans) else len(timeline.trace)
    return _window(timeline, begin, end)


def first_step(timeline: Timeline) -> Thinned | None:
    """Up to the end of the first optimizer step."""
    spans = _spans(timeline)
    back = next((i for i, (_, phase) in enumerate(spans) if phase is Phase.BACKWARD), len(spans))
    step = next((i for i, (_, phase) in enumerate(spans) if phase is Phase.OPTIMIZER and i > back), None)
    if step is None or step + 1 >= len(spans):
        return None
    return _window(timeline, 0, spans[step + 1][0])


def refused_in(phase: Phase) -> Way:
    """Out of memory in the middle of the first pass (or step) of that kind that the recording has."""

    def way(timeline: Timeline) -> Thinned | None:
        spans = [*_spans(timeline), (len(timeline.trace), Phase.UNKNOWN)]
        found = next((i for i, (_, each) in enumerate(spans) if each is phase), None)
        if found is None or spans[found + 1][0] - spans[found][0] < 20:
            return None
        return _window(timeline, 0, (spans[found][0] + spans[found + 1][0]) // 2, refused=True)

    return way


def two_threads(timeline: Timeline) -> Thinned:
    """The program trains in two threads at once: a second run of the same, begun later, that takes turns with it."""
    trace, table, stacks = timeline.trace, timeline.allocations, timeline.snapshot.stacks
    count, chance = len(trace), np.random.default_rng(3)
    turns = np.repeat(np.arange(count) % 2, chance.integers(1, 400, count))
    turns = np.concatenate([np.zeros(count // 5, np.int64), turns])  # whose turn it is
    order = [np.flatnonzero(turns == who)[:count] for who in (0, 1)]
    order = [np.append(places, np.arange(len(turns), len(turns) + count - len(places))) for places in order]
    places = np.argsort(np.argsort(np.concatenate(order), kind="stable"), kind="stable")
    where = places[:count], places[count:]  # of each one's events
    root = [
        Frame("/usr/lib/python3.12/threading.py", line, name) for line, name in ((1012, "run"), (1032, "_bootstrap"))
    ]
    frames = [*stacks.frames, *(Frame("/home/me/fleet.py", n, f"member_{n}") for n in (1, 2)), *root]
    new, lengths = [], np.diff(stacks.start)
    for who in (0, 1):
        tail = np.array([len(stacks.frames) + who, len(frames) - 2, len(frames) - 1], np.int32)
        for number in range(len(stacks)):
            ids = stacks.frame_ids(number)
            new.append(np.concatenate([ids, tail]) if len(ids) else ids)
    both = StackTable(tuple(frames), np.concatenate(new or [stacks.frame]), np.append(0, np.cumsum([*map(len, new)])))
    assert len(lengths) * 2 == len(both)

    def merged(column: NDArray[Any], shift: int = 0, absent: int = -1) -> NDArray[Any]:
        result = np.empty(2 * count, column.dtype)
        result[where[0]] = column
        result[where[1]] = np.where(column == absent, column, column + column.dtype.type(shift)) if shift else column
        return result

    away, apart = 1 << 45, len(stacks)
    columns = {name: merged(getattr(trace, name)) for name in _PER_EVENT}
    columns |= {"address": merged(trace.address, away, 0), "stack": merged(trace.stack, apart)}
    later = np.append(where[0], 2 * count), np.append(where[1], 2 * count)
    notes: list[Annotation] = []
    for who in (0, 1) if trace.time_us is not None else ():
        for note in timeline.snapshot.annotations:
            at = later[who][int(np.searchsorted(trace.time_us, note.time_us))]
            notes.append(dataclasses.replace(note, time_us=int(at)))
    merged_trace = dataclasses.replace(
        trace, **columns, time_us=np.arange(2 * count), oom_device_free_bytes={}, unknown_actions={},
        forward_frames={}, internal_metadata={}, category=None,
    )  # fmt: skip
    rows: dict[str, NDArray[Any]] = {}
    for field in dataclasses.fields(table):
        column = getattr(table, field.name)
        if field.name.endswith("event"):
            parts = [np.where(column < 0, column, where[who][column.clip(0)]).astype(column.dtype) for who in (0, 1)]
        elif field.name in ("address", "stack"):
            shift = away if field.name == "address" else apart
            parts = [column, np.where(column < 0, column, column + shift).astype(column.dtype)]
        else:
            parts = [column, column]
        rows[field.name] = np.concatenate(parts)
    order_of_rows = np.lexsort((rows["address"], rows["alloc_event"]))
    made = np.concatenate([table.alloc_event, table.alloc_event])[order_of_rows]
    rows = {name: column[order_of_rows] for name, column in rows.items()}
    notes.sort(key=lambda note: note.time_us)
    return Thinned(_with(_rebuilt(timeline, merged_trace, **rows), annotations=tuple(notes), stacks=both), made)


WAYS: dict[str, Way] = {
    "whole": lambda timeline: _as_it_is(timeline),
    "no step marks": without_marks,
    "ring, 30 % lost": ring(0.3),
    "ring, 60 % lost": ring(0.6),
    "ring, 85 % lost": ring(0.85),
    "10 % of the stacks missing": stacks_missing(0.1),
    "30 % of the stacks missing": stacks_missing(0.3),
    "innermost 4 frames": frames_cut(4),
    "innermost 8 frames": frames_cut(8),
    "no modules": without_modules,
    "no stacks": no_stacks,
    "no stacks, no step marks": no_stacks_no_marks,
    "stacks of the final state": stacks_of_state,
    "stacks of allocations": stacks_of_allocations,
    "two training threads": two_threads,
    "one pass": one_pass,
    "first step only": first_step,
    "out of memory in the first forward pass": refused_in(Phase.FORWARD),
    "out of memory in the first backward pass": refused_in(Phase.BACKWARD),
    "out of memory in the first step": refused_in(Phase.OPTIMIZER),
}


# -- scoring --------------------------------------------------------------------------------------------------------


def shares(thinned: Thinned, found: Attribution, whole: Timeline, truth: Labels) -> Shares:
    """Right, unattributed and wrong at the highest point of what is left.

    Of memory from before the recording the truth is a total for each label at the whole recording's peak: it counts
    where just that is alive.
    """
    right, total, lost, _ = compared(thinned, found, whole, truth)
    return Shares(right / total, lost / total, (total - right - lost) / total)


def compared(
    thinned: Thinned, found: Attribution, whole: Timeline, truth: Labels
) -> tuple[int, int, int, Counter[tuple[str, str, str]]]:
    """(right, all, unattributed) bytes at the peak, and what was said for what else, with the rules' names."""
    table = thinned.timeline.allocations
    at_peak = _at_peak(table, len(thinned.timeline.trace))
    label = dict(zip(truth["event_index"], truth["label"], strict=True))
    said, size = [rule.category for rule in found.rules], table.requested_bytes
    right = total = lost = 0
    confused: Counter[tuple[str, str, str]] = Counter()
    early: Counter[str] = Counter()
    rules: dict[str, set[str]] = {}
    for row in np.flatnonzero(at_peak).tolist():
        rule, made = int(found.rule[row]), int(thinned.made[row])
        if made < 0:
            early[said[rule]] += int(size[row])
            rules.setdefault(said[rule], set()).add(found.rules[rule].id)
            continue
        if (word := label.get(made)) is None:
            continue
        total += int(size[row])
        if meant_by(word)[0].category is said[rule]:
            right += int(size[row])
        elif said[rule] is Category.UNATTRIBUTED:
            lost += int(size[row])
        confused[word, str(found.rules[rule].purpose), found.rules[rule].id] += int(size[row])
    left = _early_truth(whole, truth)
    if sum(early.values()) == _early_bytes(whole, truth["peak_event"]):
        for category, count in left.items():
            hit = min(count, early[category])
            total, right = total + count, right + hit
        open_bytes = min(
            early[Category.UNATTRIBUTED], sum(left.values()) - sum(min(c, early[k]) for k, c in left.items())
        )
        lost += open_bytes
        for category, count in early.items():
            if count > left[category]:
                ids = ",".join(sorted(rules[category]))
                confused["before the recording", category, ids] += count - left[category]
    return right, total, lost, confused


def _at_peak(table: Any, count: int) -> NDArray[np.bool_]:
    freed = np.where(table.free_completed_event >= 0, table.free_completed_event, count)
    level = np.bincount(table.alloc_event.clip(0), table.requested_bytes, count + 1)
    level -= np.bincount(freed, table.requested_bytes, count + 1)
    peak = int(np.cumsum(level[:count]).argmax())
    return (table.alloc_event <= peak) & (freed > peak)


def _early_bytes(whole: Timeline, peak: int) -> int:
    table = whole.allocations
    freed = table.free_completed_event
    return int(table.requested_bytes[(table.alloc_event < 0) & ((freed < 0) | (freed > peak))].sum())


def _early_truth(whole: Timeline, truth: Labels) -> Counter[str]:
    """Categories of what was there before the recording, at its peak."""
    peak, table = truth["peak_event"], whole.allocations
    label = dict(zip(truth["event_index"], truth["label"], strict=True))
    left = Counter(truth["peak_breakdown"])
    freed = table.free_completed_event
    for row in np.flatnonzero((table.alloc_event >= 0) & (table.alloc_event <= peak) & ((freed < 0) | (freed > peak))):
        left[label.get(int(table.alloc_event[row])) or "unlabelled"] -= int(table.requested_bytes[row])
    result: Counter[str] = Counter()
    for word in truth["before_recording"]:
        if word != "unlabelled":
            result[meant_by(word)[0].category] += left[word]
    return result


# -- parts ----------------------------------------------------------------------------------------------------------


def _as_it_is(timeline: Timeline) -> Thinned:
    return Thinned(timeline, timeline.allocations.alloc_event.astype(np.int64))


def _with(timeline: Timeline, **changed: Any) -> Timeline:
    return dataclasses.replace(timeline, snapshot=dataclasses.replace(timeline.snapshot, **changed))


def _rebuilt(timeline: Timeline, trace: DeviceTrace, **columns: NDArray[Any]) -> Timeline:
    device = dataclasses.replace(timeline.device, trace=trace)
    replay = dataclasses.replace(timeline.replay, allocations=dataclasses.replace(timeline.allocations, **columns))
    snapshot = dataclasses.replace(timeline.snapshot, devices=(device,))
    return dataclasses.replace(timeline, snapshot=snapshot, device=device, replay=replay)


def _restacked(timeline: Timeline, change: Callable[[Any], Any]) -> Timeline:
    trace = dataclasses.replace(timeline.trace, stack=change(timeline.trace.stack).astype(np.int32))
    return _rebuilt(timeline, trace, stack=change(timeline.allocations.stack).astype(np.int32))


def _kept(table: StackTable, keep: NDArray[np.bool_]) -> StackTable:
    before = np.concatenate([[0], np.cumsum(keep)])
    return StackTable(table.frames, table.frame[keep], before[table.start])


def _spans(timeline: Timeline) -> list[tuple[int, Phase]]:
    phases = attribute(timeline).facts.phases
    return [(int(start), Phase(phase)) for start, phase in zip(phases.start, phases.phase, strict=False)]


def _window(timeline: Timeline, first: int, stop: int, refused: bool = False) -> Thinned:
    """Events first to stop only; with ``refused``, an out-of-memory error with the last allocation's stack ends it."""
    trace, table = timeline.trace, timeline.allocations
    index = np.arange(first, stop)
    action = trace.action[index]
    if refused:
        last = index[np.flatnonzero(action == Action.ALLOC)[-1]]
        index, action = np.append(index, last), np.append(action, np.uint8(Action.OOM))
    columns = {name: getattr(trace, name)[index] for name in _PER_EVENT} | {"action": action}
    time_us = None if trace.time_us is None else trace.time_us[index]
    if refused and time_us is not None:
        time_us[-1] = trace.time_us[stop - 1]  # type: ignore[index]
    new = dataclasses.replace(
        trace, **columns, time_us=time_us, oom_device_free_bytes={}, unknown_actions={}, forward_frames={},
        internal_metadata={}, category=None,
    )  # fmt: skip
    freed = table.free_completed_event
    rows = np.flatnonzero((table.alloc_event < stop) & ((freed < 0) | (freed >= first)))
    older = table.alloc_event[rows] < first
    rows = np.concatenate([rows[older][np.argsort(table.address[rows[older]], kind="stable")], rows[~older]])
    ends = {}
    for name in ("free_requested_event", "free_completed_event"):
        events = getattr(table, name)[rows]
        ends[name] = np.where((events >= first) & (events < stop), events - first, -1).astype(np.int32)
    born = table.alloc_event[rows]
    stays = (ends["free_requested_event"] < 0) & (ends["free_completed_event"] < 0)
    columns = {field.name: getattr(table, field.name)[rows] for field in dataclasses.fields(table)} | ends
    columns["stack"] = np.where((born >= first) | stays, table.stack[rows], -1).astype(np.int32)
    columns["alloc_event"] = np.where(born >= first, born - first, -1).astype(np.int32)
    times = trace.time_us
    notes: tuple[Annotation, ...] = timeline.snapshot.annotations
    if times is not None and len(times):
        # A ring of annotations goes as far back as that of events.
        notes = tuple(n for n in notes if (first == 0 or n.time_us >= times[first]) and n.time_us <= times[stop - 1])
    return Thinned(_with(_rebuilt(timeline, new, **columns), annotations=notes), born.astype(np.int64))
