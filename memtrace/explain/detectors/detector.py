"""What every detector shares: its registration under its name, and the finding it makes of rows of the recording."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps

from memtrace.explain.answer import Advice, Finding
from memtrace.explain.case import Case
from memtrace.snapshot.model import Bool

Detector = Callable[[Case], Finding | None]

DETECTORS: dict[str, Detector] = {}
"""Finding id -> detector. Ids are part of the JSON contract."""

CONTEXT: set[str] = set()
"""Findings about the circumstances rather than about bytes that could be saved; listed after the others."""


def detector(title: str, *, is_context: bool = False) -> Callable[[Detector], Detector]:
    """Registers a function as a detector: its name is the finding's id. ``title`` is what the finding is called unless
    the function gives it another."""

    def register(look: Detector) -> Detector:
        name = look.__name__

        @wraps(look)
        def named(case: Case) -> Finding | None:
            found = look(case)
            return None if found is None else replace(found, id=name, title=found.title or title)

        DETECTORS[name] = named
        if is_context:
            CONTEXT.add(name)
        return named

    return register


def finding(
    case: Case,
    rows: Bool,
    evidence: str,
    *advice: Advice,
    size_bytes: int | None = None,
    title: str = "",
    per_step: bool = False,
) -> Finding:
    """A finding on rows: their bytes unless others are given, and the call site that made most of them."""
    whole = case.total(rows) if size_bytes is None else size_bytes
    return Finding("", title, whole, evidence, advice, case.frame_of(rows), per_step)
