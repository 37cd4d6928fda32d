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
_AT_LEAST = 4  # stretches without stacks behind which nothing is gone, and a quarter of all
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
    num_in_call = int(in_call.sum())
    stackless = np.cumsum((kind == Kind.NONE) & ~result)
    gaps = stackless[after] > stackless[before]
    before, after, in_call = before[gaps], after[gaps], in_call[gaps]
    goes_on = np.zeros(len(before), dtype=np.bool_)
    pairs, place = np.unique(stack[[before[in_call], after[in_call]]], axis=1, return_inverse=True)
    goes_on[in_call] = np.array(_go_on(stacks.python, pairs.T.tolist()), dtype=np.bool_)[place.ravel()]
    # What forward code had made and was still there when the allocations around each gap were made.
    made = kind == Kind.FORWARD
    died, size = lives.died[made], lives.size[made]
    order = np.argsort(died, kind="stable")
    died, gone, so_far = died[order], np.append(0, np.cumsum(size[order])), np.cumsum(np.where(made, lives.size, 0))
    level, there = (so_far[rows] - gone[np.searchsorted(died, lives.born[rows])] for rows in (before, after))
    there -= np.where(made[after], lives.size[after], 0)
    by_program = among(kind, [Kind.FORWARD, Kind.OTHER])
    between = by_program[before] & by_program[after]
    frees_nothing = between & (there > level // 32 * 31) & (level > 0)
    is_torn = frees_nothing.sum() >= max(_AT_LEAST, len(before) // 4)
    if goes_on.any() or is_torn:
        goes_on |= between & ((there > level // 2) | (level == 0))
    if is_torn or (goes_on & in_call).sum() * _OFTEN > num_in_call:
        for first_row, last_row in zip(before[goes_on].tolist(), after[goes_on].tolist(), strict=True):
            result[first_row + 1 : last_row] = True
    return result


def _of_helpers(stacks: StackFacts) -> Bool:
    """Per stack (and "none"): threads of the program's own in which neither the model nor an optimizer runs."""
    own = threads_by_stack(stacks)
    working = own[~among(stacks.kind, [Kind.OTHER, Kind.NONE])]
    return (own > _MAIN) & ~among(own, working)


_MAIN = 1


def threads_by_stack(stacks: StackFacts) -> I8:
    """Per stack (and "none", which has 0), a number for the thread: 1 for the program's main one, and one for each
    function that threads of its own begin with."""
    table, result = stacks.python, np.zeros(len(stacks.kind), dtype=np.int64)
    numbers: dict[tuple[str, str], int] = {}
    for number in range(len(table)):
        frames = table.frame_ids(number)[::-1].tolist()
        if frames and table.frames[frames[0]][::2] == ("python3/threading.py", "_bootstrap"):
            own = (table.frames[frame][::2] for frame in frames)
            begins = next((each for each in own if not each[0].startswith("python3/")), ("", ""))
            result[number] = _MAIN + 1 + numbers.setdefault(begins, len(numbers))
        elif frames:
            result[number] = _MAIN
    return result


def threads_of(stacks: StackFacts, kind: Kind) -> set[int]:
    """The threads whose stacks, of those that the device has, are of the kind."""
    return {*threads_by_stack(stacks)[(stacks.kind == kind) & (stacks.tags != 0)].tolist()}


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
