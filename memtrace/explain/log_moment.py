"""The moment of an error from the log around it: the phase by its traceback, the step by the progress bar before it."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable

import numpy as np

from memtrace.attribution.frame_tags import Tag
from memtrace.attribution.phases import Phase
from memtrace.attribution.stack_facts import Kind, stack_facts
from memtrace.explain.answer import When
from memtrace.snapshot.stacks import Frame, StackTable

LINES_BEFORE = 400
_FRAME = re.compile(r'File "([^"\n]{1,400})", line (\d{1,7}), in ([\w<>.]{1,200})')
_RANK_TAG = re.compile(r"\s*\[?(?:default|rank)[ :=]{0,2}(\d{1,5})\]?:")
_TRACEBACK = "Traceback (most recent call last)"
_BAR = re.compile(r"(?<![\d.])(\d{1,9})/(\d{1,9}) \[[^\]\n]{0,60}(?:it/s|s/it|<|\?)")
_OTHER_BARS = re.compile(r"load|shard|map|token|download|generat|filter|fetch|pack|truncat|eval|saving", re.IGNORECASE)
_PHASES = {
    Kind.OPTIMIZER: Phase.OPTIMIZER,
    Kind.RECOMPUTE: Phase.BACKWARD,
    Kind.BACKWARD: Phase.BACKWARD,
    Kind.LOAD: Phase.LOAD,
    Kind.FORWARD: Phase.FORWARD,
}


def lines_before(lines: Iterable[str], number: int) -> list[str]:
    """The last ``LINES_BEFORE`` lines up to line ``number`` (1-based), that one included."""
    kept: deque[str] = deque(maxlen=LINES_BEFORE)
    for count, line in enumerate(lines, 1):
        kept.append(line[-4000:])
        if count >= number:
            break
    return list(kept)


def frames_in_log(lines: list[str], rank: int | None = None) -> tuple[Frame, ...]:
    """Frames of the last traceback in the lines, the outermost first; lines of other ranks are left out."""
    mine = [line for line in lines if rank is None or (tag := _RANK_TAG.match(line)) is None or int(tag[1]) == rank]
    start = max((i for i, line in enumerate(mine) if _TRACEBACK in line), default=0)
    found = [_FRAME.search(line) for line in mine[start:]]
    return tuple(Frame(m[1], int(m[2]), m[3]) for m in found if m is not None)


def moment_in_log(lines: list[str], rank: int | None = None) -> When | None:
    """Phase and step at the last of ``lines``; None if neither a traceback nor a progress bar tells."""
    phase = _phase(frames_in_log(lines, rank))
    step = _step(lines)
    if phase is Phase.UNKNOWN and step is None:
        return None
    return When(phase.label, step, None if step is None else step == 0, None, "log", {})


def _phase(outermost_first: tuple[Frame, ...]) -> Phase:
    """By the traceback: the same rules that read recorded stacks."""
    frames = outermost_first[::-1]
    if not frames:
        return Phase.UNKNOWN
    distinct = tuple(dict.fromkeys(frames))
    numbers = np.array([distinct.index(frame) for frame in frames], dtype=np.int32)
    facts = stack_facts(StackTable(distinct, numbers, np.array([0, len(frames)], dtype=np.int64)))
    tags = Tag(int(facts.tags[0]))
    if tags & Tag.GENERATE:
        return Phase.GENERATION
    if tags & Tag.EVALUATE:
        return Phase.EVALUATION
    return _PHASES.get(Kind(int(facts.kind[0])), Phase.UNKNOWN)


def _step(lines: list[str]) -> int | None:
    """Finished steps by the last progress bar that is not one of loading, preparing data or evaluating."""
    for line in reversed(lines):
        for part in reversed(re.split(r"[\r\n]", line)):
            bar = _BAR.search(part)
            if bar is not None and not _OTHER_BARS.search(part[: bar.start()]) and int(bar[1]) <= int(bar[2]):
                return int(bar[1])
    return None
