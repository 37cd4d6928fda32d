"""A scrolling list of prepared lines."""

from __future__ import annotations

from collections.abc import Sequence

from textual.strip import Strip

from memtrace_tui.data.goto import Goto
from memtrace_tui.data.lines import Line
from memtrace_tui.messages import Open
from memtrace_tui.widgets.base import Rows


class Lines(Rows):
    """Lines; those with a target can be selected and opened."""

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.lines: Sequence[Line] = ()

    def show(self, lines: Sequence[Line], keep: bool = True) -> None:
        self.lines = lines
        self.reset(len(lines), keep)

    @property
    def text(self) -> str:
        """Everything as plain text."""
        return "\n".join(each.plain.rstrip() for each in self.lines)

    def can_select(self, row: int) -> bool:
        return 0 <= row < len(self.lines) and self.lines[row].target is not None

    def draw_row(self, row: int, width: int, is_selected: bool) -> Strip:
        behind = "select" if is_selected and self.has_focus else "background"
        return self.look.strip(self.lines[row], width, behind)

    def opened(self, row: int) -> None:
        target = self.lines[row].target
        if isinstance(target, Goto):
            self.post_message(Open(target))
