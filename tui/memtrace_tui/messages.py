"""What widgets tell the application. They never act on each other."""

from __future__ import annotations

from textual.message import Message

from memtrace_tui.data.goto import Goto


class MoveCursor(Message):
    """Put the shared cursor on an event."""

    def __init__(self, event: int) -> None:
        super().__init__()
        self.event = event


class Open(Message):
    """Go where a line leads."""

    def __init__(self, goto: Goto) -> None:
        super().__init__()
        self.goto = goto


class Failed(Message):
    """Something went wrong in a widget; the application shows it and goes on."""

    def __init__(self, error: Exception, where: str) -> None:
        super().__init__()
        self.error = error
        self.where = where


class Changed(Message):
    """The filter or what is compared has changed: whoever shows it should draw again."""
