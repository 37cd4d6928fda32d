"""Diff: two recordings, each at its own cursor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from textual.app import ComposeResult
from textual.containers import Vertical

from memtrace_tui.data.difference import difference_lines
from memtrace_tui.views import View
from memtrace_tui.widgets.base import Lines, keys
from memtrace_tui.widgets.chart import Overlay


class DiffView(View):
    """Overlaid timelines above; sentence, categories and call sites below."""

    about = (
        "The second file minus the first, each at its own cursor; or, in one file, the cursor minus event A (A marks "
        "it). w changes which of the two the keys move."
    )
    BINDINGS = keys("w  swap  Other side")

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Overlay(self.session)
            yield Lines(id="difference")

    def main(self) -> Lines:
        return self.query_one("#difference", Lines)

    def show(self) -> None:
        self.query_one(Overlay).styles.height = max(min(self.app.size.height // 3, 16), 6)
        self.query_one(Overlay).refresh()
        width = min(max(self.app.size.width - 3, 40), 140)
        # Of a predicted run its outcome alone: the difference's own sentence speaks of runs that went on, or survived.
        answer = self.session.difference()
        said = self.session.outcome or answer.sentence
        self.main().show(difference_lines(answer, said, width))

    def action_swap(self) -> None:
        """The other file becomes the one that the cursor moves in and all screens show."""
        self.session.swap()
        self.call_later(self.screen.run_action, "refresh_all")

    def csv(self) -> Iterable[Sequence[str]]:
        yield "category", "subcategory", "frame", "before_bytes", "after_bytes", "delta_bytes", "match"
        for site in self.session.difference().sites:
            sizes = (str(site.before_bytes), str(site.after_bytes), str(site.delta_bytes))
            yield site.category, site.subcategory, site.frame, *sizes, site.match or ""
