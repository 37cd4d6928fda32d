"""What the main screen asks of every view."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from textual.widget import Widget

from memtrace_tui.data.goto import Goto
from memtrace_tui.session import Session
from memtrace_tui.widgets.base import Looking


class View(Looking):
    """A screen below the tabs. ``show`` is called whenever it is visible and something it shows has changed."""

    view: ClassVar[str] = ""
    title: ClassVar[str] = ""
    about: ClassVar[str] = ""

    def __init__(self, session: Session) -> None:
        super().__init__(id=f"view-{self.view}")
        self.session = session

    @property
    def wide(self) -> bool:
        """Whether there is room for two panes side by side."""
        return self.app.size.width >= 118

    @property
    def side_width(self) -> int:
        """Cells for text in a pane at the side, without border, padding and scroll bar."""
        return max(min(self.app.size.width * 2 // 5, 72) - 4, 20)

    def show(self) -> None:
        """Show the state at the cursor."""

    def main(self) -> Widget:
        """The widget that takes the keys when the view comes up."""
        raise NotImplementedError

    def arrive(self, goto: Goto) -> None:
        """Come here by a jump; the cursor is already there."""

    def address(self) -> int | None:
        """The address that is selected, where one is, to come back to."""
        return None

    def addresses(self) -> tuple[int, int] | None:
        """The addresses of the selection, whose history ``h`` shows."""
        return None

    def filtered(self) -> None:
        """A filter was written to its end."""

    def csv(self) -> Iterable[Sequence[str]]:
        """What is on screen as rows of a table, the head first."""
        return ()

    def copy_text(self) -> str:
        """What ``y`` puts on the clipboard."""
        return ""
