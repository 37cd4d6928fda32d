"""The screens, one a file; a screen's code is imported when it is first shown."""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

from memtrace_tui.session import Session
from memtrace_tui.views.base import View

__all__ = ["DIFF", "Entry", "View", "all_views"]


class Entry(NamedTuple):
    """A screen before its code is there: ``view`` is its name and its module's, ``key`` the key that shows it."""

    view: str
    key: str
    title: str

    def load(self) -> type[View]:
        """The screen's class."""
        module = import_module(f"memtrace_tui.views.{self.view}")
        found: type[View] = getattr(module, f"{self.title}View")
        return found


_ENTRIES = tuple(
    Entry(title.lower(), str(number), title)
    for number, title in enumerate(
        ("Overview", "Timeline", "Segments", "Allocations", "Stacks", "Findings", "Diff", "Events"), 1
    )
)
DIFF = next(entry for entry in _ENTRIES if entry.view == "diff")


def all_views(session: Session) -> list[Entry]:
    """The screens that make sense for a session, in order of their keys."""
    return [entry for entry in _ENTRIES if entry.view != "diff" or session.other is not None]
