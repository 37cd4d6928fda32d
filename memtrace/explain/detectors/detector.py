"""What every detector shares: its registration under its name, and the finding that is made of what it saw."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from memtrace.explain.advice import Change
from memtrace.explain.answer import Advice, Finding
from memtrace.explain.case import MATERIAL_SHARE, Case
from memtrace.frozen import dataclass
from memtrace.snapshot.model import Bool
from memtrace.units import counted


@dataclass(frozen=True, slots=True)
class Seen:
    """What a detector saw: ``rows`` of ``Timeline.allocations`` (None where no tensors are to blame), whose bytes count
    unless ``size_bytes`` is given. See :class:`~memtrace.explain.answer.Finding` for the rest."""

    rows: Bool | None
    evidence: str
    changes: tuple[Change | Advice, ...] = ()
    size_bytes: int | None = None
    title: str = ""
    frame: str = ""
    per_step: bool = False
    beside: str = ""


def live_ones(rows: Bool, what: str) -> str:
    """``2 tensors made by the cache are live``."""
    count = int(rows.sum())
    return f"{counted(count, 'tensor')} {what} {'is' if count == 1 else 'are'} live"


Detector = Callable[[Case], Finding | None]

DETECTORS: dict[str, Detector] = {}
"""Finding id -> detector. Ids are part of the JSON contract."""

CONTEXT: set[str] = set()
"""Findings about the circumstances rather than about bytes that could be saved; listed after the others."""


def detector(
    title: str, *, least: float = MATERIAL_SHARE, is_context: bool = False
) -> Callable[[Callable[[Case], Seen | None]], Detector]:
    """Registers a function as a detector: its name is the finding's id, ``title`` what the finding is called unless the
    function gives it another. What is a smaller share than ``least`` of the memory in use is no finding; circumstances
    always are. Changes are worked out for findings alone."""

    def register(look: Callable[[Case], Seen | None]) -> Detector:
        name = look.__name__

        @wraps(look)
        def named(case: Case) -> Finding | None:
            seen = look(case)
            if seen is None:
                return None
            rows, size_bytes = seen.rows, seen.size_bytes
            if size_bytes is None and rows is not None:
                size_bytes = case.total(rows)
            if least and not is_context and not case.is_material(size_bytes or 0, least):
                return None
            advice = tuple(one if isinstance(one, Advice) else one(case) for one in seen.changes)
            frame = seen.frame or (case.frame_of(rows) if rows is not None else "")
            return Finding(
                name, seen.title or title, size_bytes, seen.evidence, advice, frame, seen.per_step, seen.beside
            )

        DETECTORS[name] = named
        if is_context:
            CONTEXT.add(name)
        return named

    return register
