"""What the lines around an error tell: its phase and cause by the traceback, its step by the progress bar.

A cause fits if each of its patterns is found among the frames, written ``file.py:function`` from the outermost to the
innermost; ``last`` must be found among the three innermost. The first of ``traceback_causes.json`` that fits is it.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from memtrace.attribution.frame_tags import Tag
from memtrace.attribution.phases import Phase
from memtrace.attribution.stack_facts import Kind, stack_facts
from memtrace.explain.advice import spelled
from memtrace.explain.answer import Advice, Basis, Finding, When
from memtrace.explain.facts import ByteSpan
from memtrace.explain.setting import RunSetting
from memtrace.frozen import dataclass
from memtrace.oomlog.clean import ANSI, process_of
from memtrace.snapshot.stacks import Frame, StackTable

_LINES_BEFORE, _LINES_AFTER = 400, 100
# Python's own tracebacks (quoted once more inside JSON), those of IPython, rich and old notebooks.
_FRAME = re.compile(
    r'File \\?"([^"\n]{1,400}?)\\?", line (\d{1,7}), in ([\w<>]{1,200})'
    r"|(?<![^\s:\"])([^\s:\"]{1,400}\.py):(\d{1,7}),?\s{1,80}in\s{1,80}([\w<>.]{1,200})"
    r"|(?<![^\s:\"])([^\s:\"]{1,400}\.py) in ([\w<>.]{1,200})\("
    r"(?:[^\n]*\n){1,10}?[^\n]{0,80}?-{2,}> (\d{1,7})"
)
_BOX = re.compile(r"[│|]")  # that rich draws around its tracebacks
_REFUSED = re.compile(r"out of memory|OutOfMemory", re.IGNORECASE)
_TRACEBACK = "Traceback (most recent call last)"
_BAR = re.compile(  # tqdm's and rich's
    r"(?<![\d.])(\d{1,9})/(\d{1,9}) (?:\[[^\]\n]{0,60}(?:it/s|s/it|<|\?)|(?:\d{1,3}:)?\d{1,2}:\d\d •)"
)
_OTHER_BARS = re.compile(r"load|shard|map|token|download|generat|filter|fetch|pack|truncat|eval|saving", re.IGNORECASE)
_PHASES = {
    Kind.OPTIMIZER: Phase.OPTIMIZER,
    Kind.RECOMPUTE: Phase.BACKWARD,
    Kind.BACKWARD: Phase.BACKWARD,
    Kind.LOAD: Phase.LOAD,
    Kind.FORWARD: Phase.FORWARD,
}


@dataclass(frozen=True, slots=True)
class TracebackCause:
    """``what`` completes "the refused request is …"; ``changes`` avoid it."""

    id: str
    title: str
    last: str
    what: str
    changes: Sequence[str]
    anywhere: str = ""
    is_second: bool = False
    """Another failure came before it: this one is not why the run ended."""


CAUSES = tuple(
    TracebackCause(**row) for row in json.loads(Path(__file__).with_name("traceback_causes.json").read_bytes())
)


def lines_around(lines: Iterable[bytes], number: int) -> tuple[list[str], list[str]]:
    """The last few hundred lines up to line ``number`` (1-based), that one included, and some that follow it, without
    colours."""
    source = iter(lines)
    before = deque(islice(source, max(number, 1)), maxlen=_LINES_BEFORE)
    told = (
        [ANSI.sub("", line.decode("utf-8", "replace")[-4000:]) for line in part]
        for part in (before, islice(source, _LINES_AFTER))
    )
    return next(told), next(told)


def frames_in_log(before: Sequence[str], after: Sequence[str] = ()) -> tuple[Frame, ...]:
    """Frames of the last traceback up to the message, the outermost first; or of the first one that follows it and
    ends in running out of memory, for some loggers put the message first. Lines of other processes are left out."""
    tag = process_of(before[-1]) if before else ""
    if found := _frames(before, tag):
        return found
    start = next((i for i, line in enumerate(after) if _TRACEBACK in line), len(after))
    end = next((i for i in range(start, len(after)) if _REFUSED.search(after[i])), start)
    return _frames(after[start:end], tag)


def _frames(lines: Sequence[str], tag: str) -> tuple[Frame, ...]:
    mine = [line for line in lines if not tag or process_of(line) in ("", tag)]
    start = max((i for i, line in enumerate(mine) if _TRACEBACK in line), default=0)
    text = "\n".join(_BOX.sub(" ", line).rstrip() for line in mine[start:])
    found = []
    for match in _FRAME.finditer(text):
        file, line, name = (part for part in match.groups() if part is not None)
        line, name = (line, name) if line.isdigit() else (name, line)
        found.append(Frame(file, int(line), name.rsplit(".", 1)[-1]))
    return tuple(found)


def moment_in_log(before: Sequence[str], after: Sequence[str] = ()) -> When | None:
    """Phase and step at the last of the lines ``before``; None if neither a traceback nor a progress bar tells. A bar
    may be drawn once more, or first, behind the message."""
    phase, step = _phase(frames_in_log(before, after)), _step(before)
    step = _step(after[::-1]) if step is None else step
    if phase is Phase.UNKNOWN and step is None:
        return None
    return When(phase.label, step, None if step is None else step == 0, None, "log", {})


def _phase(outermost_first: tuple[Frame, ...]) -> Phase:
    """By the traceback: the same rules that read recorded stacks."""
    frames = outermost_first[::-1]
    distinct = tuple(dict.fromkeys(frames))
    numbers = np.array([distinct.index(frame) for frame in frames], dtype=np.int32)
    facts = stack_facts(StackTable(distinct, numbers, np.array([0, len(frames)], dtype=np.int64)))
    tags = Tag(int(facts.tags[0]))
    if tags & Tag.GENERATE:
        return Phase.GENERATION
    if tags & Tag.EVALUATE:
        return Phase.EVALUATION
    return _PHASES.get(Kind(int(facts.kind[0])), Phase.UNKNOWN)


def _step(lines: Sequence[str]) -> int | None:
    """Finished steps by the last progress bar that is not one of loading, preparing data or evaluating."""
    for line in reversed(lines):
        for part in reversed(re.split(r"[\r\n]", line)):
            bar = _BAR.search(part)
            if bar is not None and not _OTHER_BARS.search(part[: bar.start()]) and int(bar[1]) <= int(bar[2]):
                return int(bar[1])
    return None


def cause_in(frames: Sequence[Frame]) -> TracebackCause | None:
    """The cause that a traceback names; ``frames`` from the outermost in. None if it names none."""
    words = [f"{frame.filename.replace(chr(92), '/')}:{frame.name}" for frame in frames]
    ends, everything = "\n".join(words[-3:]), "\n".join(words)
    return next(
        (
            cause
            for cause in CAUSES
            if re.search(cause.last, ends, re.M) and re.search(cause.anywhere, everything, re.M | re.I)
        ),
        None,
    )


def finding_of(cause: TracebackCause, asked: ByteSpan | None, setting: RunSetting) -> Finding:
    """What to say of it, as the run's trainer spells it: the request itself is what each change saves."""
    size_bytes = round(asked.middle) if asked is not None else None
    known = size_bytes and not cause.is_second
    what = (size_bytes, Basis.FORMULA, f"the refused {asked}") if known else (None, Basis.RULE, "")
    changes = tuple(Advice(spelled(change, setting), *what) for change in cause.changes)
    return Finding(cause.id, cause.title, size_bytes, f"by the traceback the request is {cause.what}.", changes)
