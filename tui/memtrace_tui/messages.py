"""What widgets tell the application. They never act on each other."""

from __future__ import annotations

from dataclasses import dataclass

from textual.message import Message

from memtrace_tui.data.lines import Goto


@dataclass
class MoveCursor(Message):
    """Put the shared cursor on an event."""

    event: int


@dataclass
class Open(Message):
    """Go where a line leads."""

    goto: Goto


@dataclass
class Failed(Message):
    """Something went wrong in a widget; the application shows it and goes on."""

    error: Exception
    where: str


class Changed(Message):
    """The filter or what is compared has changed: whoever shows it should draw again."""
