"""Hypothetical programs: allocations of a category or call site left out, or scaled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator.whatif.program import Program
from memtrace.attribution.categories import Category
from memtrace.attribution.classify import Attribution
from memtrace.attribution.sites import frame_label
from memtrace.errors import NoAnswerError, UsageError

Bool = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Edit:
    """``what``: a category, ``category/subcategory`` or part of a call site; ``factor`` 0 leaves it out."""

    what: str
    factor: float

    @property
    def label(self) -> str:
        """``without logits`` or ``0.5 × logits``."""
        return f"without {self.what}" if self.factor == 0 else f"{self.factor:g} × {self.what}"


def parse_edits(without: Sequence[str], scale: Sequence[str]) -> tuple[Edit, ...]:
    """Edits from the values of ``--without WHAT`` and ``--scale WHAT=FACTOR``. Raises UsageError."""
    edits = [Edit(what, 0.0) for what in without]
    for text in scale:
        what, _, number = text.rpartition("=")
        try:
            factor = float(number)
        except ValueError:
            factor = -1.0
        if not what or not 0 <= factor < 1e6:
            raise UsageError(f"--scale takes WHAT=FACTOR with a factor of 0 or more, as in logits=0.5, not {text!r}")
        edits.append(Edit(what, factor))
    if any(not edit.what.strip() for edit in edits):
        raise UsageError("--without takes a category, category/subcategory or part of a call site")
    return tuple(edits)


def select(attribution: Attribution, what: str) -> Bool:
    """Rows of ``Timeline.allocations`` that ``what`` names. Raises NoAnswerError if it names none.

    Tried in this order: a category, ``category/subcategory``, a subcategory by itself, part of the call site shown in
    reports (``modeling_llama.py:175 forward``), part of any frame of the stack.
    """
    wanted = what.strip()
    rules = attribution.rules
    for test in (
        [rule.category == wanted for rule in rules],
        [rule.purpose == wanted for rule in rules],
        [rule.subcategory == wanted for rule in rules],
    ):
        rows = np.array(test, dtype=np.bool_)[attribution.rule]
        if rows.any():
            return rows
    stacks = attribution.facts.timeline.snapshot.stacks
    stack = attribution.facts.timeline.allocations.stack
    shown = [wanted in attribution.sites.label(i) for i in range(len(stacks))]
    if not any(shown):
        frames = [wanted in frame_label(frame) or wanted in frame.filename for frame in stacks.frames]
        shown = [any(frames[f] for f in stacks.frame_ids(i).tolist()) for i in range(len(stacks))]
    rows = np.array([*shown, False], dtype=np.bool_)[stack]  # stack -1: the entry added at the end
    if not rows.any():
        known = ", ".join(Category)
        raise NoAnswerError(
            f"no allocation is of {what!r}: no category or subcategory ({known}, temporary/logits, …) and no call site"
        )
    return rows


def apply(program: Program, attribution: Attribution, edits: Sequence[Edit]) -> Program:
    """The program with all edits made, in order."""
    for edit in edits:
        marked = _by_handle(program, select(attribution, edit.what))
        program = program.without(marked) if edit.factor == 0 else program.scaled(marked, edit.factor)
    return program


def _by_handle(program: Program, rows: Bool) -> Bool:
    """A mask over rows of ``Timeline.allocations`` as one over the program's handles: only the first ones differ."""
    handles = rows.copy()
    handles[program.evidence.beginning.handle] = rows[: program.initial]
    return handles
