"""The first screen: how far loading is, and a way out of it."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.strip import Strip

from memtrace.render.words import bar, clip
from memtrace.units import printable
from memtrace_tui.widgets.base import Drawn


class Progress(Drawn):
    """File name, bar, what is being done."""

    def __init__(self, name: str) -> None:
        super().__init__(id="loading")
        self.file = printable(name)
        self.share = 0.0

    def draw_line(self, y: int) -> Strip:
        width = self.size.width
        what = "reading" if self.share < 0.7 else "replaying the allocator, attributing allocations"
        lines = {
            0: [("memtrace", "title"), ("  " + clip(self.file, width - 12, True), "text")],
            2: [(f"{bar(self.share, width - 6):<{width - 6}}", "accent"), (f"{self.share:>6.0%}", "strong")],
            4: [(what, "dim"), ("   esc cancels", "dim")],
        }
        return self.look.spans(lines.get(y, []), width)


class LoadingScreen(Screen[None]):
    """Shown while a worker thread loads; dismissed by whoever gives up on it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,ctrl+c", "app.cancel_loading", "Cancel")]

    def __init__(self, name: str) -> None:
        super().__init__()
        self.file = name

    def compose(self) -> ComposeResult:
        yield Progress(self.file)

    def show(self, share: float) -> None:
        progress = self.query_one(Progress)
        progress.share = share
        progress.refresh()

    def stop(self) -> None:
        """It can't be read: nothing is under way any more."""
        self.query_one(Progress).display = False
