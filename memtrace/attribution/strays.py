"""Allocations that say nothing of what the program was doing: those of threads that only help it (fetching the next
batch, say), and those without a stack in the midst of code that has one.

Autograd's threads leave no frames, so what has none behind a forward pass is the backward pass. But no backward pass
runs between two lines of one call of a module. Where that is seen time and again, a missing stack says nothing; then
only what takes away most of what the forward pass kept is taken for a backward pass.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memtrace.arrays import among
from memtrace.attribution.blind_phases import Lives
from memtrace.attribution.frame_tags import Tag, frame_tags
from memtrace.attribution.stack_facts import Kind, StackFacts
from memtrace.snapshot.stacks import StackTable

I8 = NDArray[np.int64]
Bool = NDArray[np.bool_]
_CALLS = (Kind.FORWARD, Kind.RECOMPUTE)
_OFTEN = 32  # one in so many steps inside calls; a model that calls autograd in its forward does so once a pass


def stray(stacks: StackFacts, stack: NDArray[np.int32], lives: Lives) -> Bool:
    """Which of a trace's allocations (``lives``, oldest first, made by ``stack``) are such. Linear."""
    kind = stacks.kind[stack]
    first = np.flatnonzero(kind == Kind.FORWARD)[:1]
    if not len(first):
        return np.zeros(len(kind), dtype=np.bool_)
    result = _of_helpers(stacks)[stack]
    result[: first[0]] = False  # while a model was loaded, they may have made its weights
    framed = np.flatnonzero((kind != Kind.NONE) & ~result)
    before, after = framed[:-1], framed[1:]
    in_call = among(kind[before], _CALLS) & (kind[before] == kind[after])
    stackless = np.cumsum((kind == Kind.NONE) & ~result)
    gaps = np.flatnonzero(stackless[after] > stackless[before])
    goes_on = np.zeros(len(before), dtype=np.bool_)
    inside = gaps[in_call[gaps]]
    pairs, place = np.unique(stack[[before[inside], after[inside]]], axis=1, return_inverse=True)
    goes_on[inside] = np.array(_go_on(stacks.python, pairs.T.tolist()), dtype=np.bool_)[place.ravel()]
    if not goes_on.any():
        return result
    # What forward code had made and was still there when each allocation was made.
    made = kind == Kind.FORWARD
    died, size = lives.died[made], lives.size[made]
    order = np.argsort(died, kind="stable")
    gone = np.append(0, np.cumsum(size[order]))[np.searchsorted(died[order], lives.born)]
    level = np.cumsum(np.where(made, lives.size, 0)) - gone
    there = level[after] - np.where(made[after], lives.size[after], 0)
    by_program = among(kind, [Kind.FORWARD, Kind.OTHER])
    goes_on |= by_program[before] & by_program[after] & ((there > level[before] // 2) | (level[before] == 0))
    if (goes_on & in_call)[gaps].sum() * _OFTEN > in_call.sum():
        for gap in gaps[goes_on[gaps]].tolist():
            result[before[gap] + 1 : after[gap]] = True
    return result


def _of_helpers(stacks: StackFacts) -> Bool:
    """Per stack (and "none"): threads of the program's own in which neither the model nor an optimizer runs."""
    table = stacks.python
    result = np.zeros(len(stacks.kind), dtype=np.bool_)
    threads: dict[int, tuple[str, str]] = {}  # what their own code begins with
    for number in range(len(table)):
        frames = table.frame_ids(number)[::-1].tolist()
        if frames and table.frames[frames[0]][::2] == ("python3/threading.py", "_bootstrap"):
            own = (table.frames[frame][::2] for frame in frames)
            threads[number] = next((each for each in own if not each[0].startswith("python3/")), ("", ""))
    working = {threads[number] for number in threads if stacks.kind[number] not in (Kind.OTHER, Kind.NONE)}
    result[[number for number, thread in threads.items() if thread not in working]] = True
    return result


def _go_on(table: StackTable, pairs: list[list[int]]) -> list[bool]:
    """Whether each pair's second stack lies further down in a function inside a module call of the first."""
    is_call = [bool(frame_tags(f.filename, f.name) & Tag.CALL) for f in table.frames] if pairs else []
    result = []
    for pair in pairs:
        inside = answer = False
        for one, other in zip(*(table.frame_ids(stack).tolist()[::-1] for stack in pair), strict=False):
            if one != other:
                a, b = table.frames[one], table.frames[other]
                answer = inside and a[::2] == b[::2] and a.line < b.line
                break
            inside |= is_call[one]
        result.append(answer)
    return result
