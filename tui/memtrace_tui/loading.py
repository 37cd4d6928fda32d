"""The first screen: how far loading is, and a way out of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.strip import Strip

from memtrace_tui.data.lines import bar, clean, clip
from memtrace_tui.widgets.base import Drawn

if TYPE_CHECKING:
    from memtrace_tui.app import BrowseApp


class Progress(Drawn):
    """File name, bar, what is being done."""

    def __init__(self, name: str) -> None:
        super().__init__(id="loading")
        self.file = clean(name)
        self.share = 0.0

    def draw_line(self, y: int) -> Strip:
        width = self.size.width
        if y == 0:
            return self.look.spans([("memtrace", "title"), ("  " + clip(self.file, width - 12, True), "text")], width)
        if y == 2:
            done = bar(self.share, width - 6)
            return self.look.spans([(f"{done:<{width - 6}}", "accent"), (f"{self.share:>6.0%}", "strong")], width)
        if y == 4:
            what = "reading" if self.share < 0.7 else "replaying the allocator, attributing allocations"
            return self.look.spans([(what, "dim"), ("   esc cancels", "dim")], width)
        return self.blank()


class LoadingScreen(Screen[None]):
    """Shown while a worker thread loads."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,ctrl+c", "cancel", "Cancel")]

    def __init__(self, name: str) -> None:
        super().__init__()
        self.file = name

    def compose(self) -> ComposeResult:
        """The bar."""
        yield Progress(self.file)

    def show(self, share: float) -> None:
        """How far it is."""
        progress = self.query_one(Progress)
        progress.share = share
        progress.refresh()

    def stop(self) -> None:
        """It can't be read: nothing is under way any more."""
        self.query_one(Progress).display = False

    def action_cancel(self) -> None:
        """Give up and leave."""
        cast("BrowseApp", self.app).cancel_loading()
