"""The line that the filter of all screens is written in; hidden until asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import Input


class FilterBar(Input):
    """Enter keeps what was written, Escape takes it back."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "cancel", "Cancel", show=True),
        Binding("enter", "submit", "Apply", show=True),
    ]

    @dataclass
    class Closed(Message):
        """The line is hidden again; ``is_kept``: by Enter."""

        is_kept: bool

    def __init__(self) -> None:
        super().__init__(placeholder="filter: category:lora  size>1MiB  -step:0  word or /regex/ (stack, too)",
                         compact=True)  # fmt: skip
        self.display = False
        self._before = ""

    def begin(self, text: str) -> None:
        """Show the line with a text to change."""
        self._before = text
        with self.prevent(Input.Changed):
            self.value = text
        self.display = True
        self.screen.set_focus(self)  # at once: keys typed ahead are for this line

    def complain(self, text: str) -> None:
        """Mark it as wrong, or as right again."""
        self.set_class(bool(text), "-wrong")

    def _close(self, is_kept: bool) -> None:
        self.display = False
        self.complain("")
        self.post_message(self.Closed(is_kept))

    def action_cancel(self) -> None:
        self.value = self._before
        self._close(False)

    async def action_submit(self) -> None:
        self._close(True)
