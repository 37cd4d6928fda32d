"""The screens, one a file; a screen's code is imported when it is first shown."""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

from memtrace_tui.views.base import View

__all__ = ["DIFF", "VIEWS", "Entry", "View"]


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


VIEWS = tuple(
    Entry(title.lower(), str(number), title)
    for number, title in enumerate(
        ("Overview", "Timeline", "Segments", "Allocations", "Stacks", "Findings", "Diff", "Events"), 1
    )
)
DIFF = next(entry for entry in VIEWS if entry.view == "diff")
