"""Compiled code: behind its frames stand those of the program's code that each buffer was compiled from."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memtrace.attribution.frame_tags import Tag, frame_tags
from memtrace.attribution.stack_facts import StackFacts

Bool = NDArray[np.bool_]


def beside_loss(facts: StackFacts) -> tuple[Bool, Bool]:
    """Per stack (plus the entry for "none"), of compiled code: was it compiled from a loss, and from nothing but the
    function that calls a loss, as what the loss is handed is?"""
    table = facts.python
    from_loss, from_caller = (np.zeros(len(table) + 1, dtype=np.bool_) for _ in range(2))
    stacks = np.flatnonzero(facts.has(Tag.COMPILED)[:-1]).tolist()
    if not stacks:
        return from_loss, from_caller
    tags = [int(frame_tags(f.filename, f.name)) for f in table.frames]
    callers: set[tuple[tuple[str, str], ...]] = set()
    sources = {stack: _source(table.frame_ids(stack).tolist(), tags) for stack in stacks}
    named = {
        stack: tuple((table.frames[f].filename, table.frames[f].name) for f in frames)
        for stack, frames in sources.items()
    }
    for stack, frames in sources.items():
        outermost = max((place for place, frame in enumerate(frames) if tags[frame] & int(Tag.LOSS)), default=-1)
        if outermost >= 0:
            from_loss[stack] = True
            callers.add(named[stack][outermost + 1 :])
    for stack, functions in named.items():
        from_caller[stack] = len(functions) > 0 and functions in callers
    return from_loss, from_caller


def _source(frames: list[int], tags: list[int]) -> list[int]:
    """The frames (innermost first) between the generated code and what runs it."""
    compiled = [bool(tags[frame] & int(Tag.COMPILED)) for frame in frames]
    start = compiled.index(True)
    while start < len(frames) and compiled[start]:
        start += 1
    end = start
    while end < len(frames) and not compiled[end]:
        end += 1
    return frames[start:end] if end < len(frames) else []
