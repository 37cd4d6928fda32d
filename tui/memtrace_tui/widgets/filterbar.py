"""The line that a filter or a search is written in; hidden until asked for."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widgets import Input

from memtrace_tui.views.base import View


class FilterBar(Input):
    """Enter keeps what was written, Escape takes it back."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "cancel", "Cancel", show=True),
        Binding("enter", "submit", "Apply", show=True),
    ]

    def __init__(self, placeholder: str) -> None:
        super().__init__(placeholder=placeholder, compact=True)
        self.display = False
        self._before = ""

    def begin(self, text: str) -> None:
        """Show the line with a text to change."""
        self._before = text
        with self.prevent(Input.Changed):
            self.value = text
        self.display = True
        self.focus()

    def complain(self, text: str) -> None:
        """Say what is wrong with it, or that nothing is."""
        self.set_class(bool(text), "-wrong")
        self.tooltip = text or None

    def _close(self) -> None:
        self.display = False
        self.complain("")
        for ancestor in self.ancestors:
            if isinstance(ancestor, View):
                ancestor.main().focus()
                return

    def action_cancel(self) -> None:
        """Back to what it was."""
        self.value = self._before
        self._close()

    async def action_submit(self) -> None:
        """Keep it."""
        await super().action_submit()
        self._close()
