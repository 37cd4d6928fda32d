"""A virtual table: any number of rows, text made only for those on screen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from textual.message import Message
from textual.strip import Strip

from memtrace.render.words import clip
from memtrace_tui.data.lines import Span
from memtrace_tui.widgets.base import Rows


@dataclass(frozen=True, slots=True)
class TableColumn:
    """``width`` 0 takes what is left; ``rank`` says which columns go first where the screen is narrow (high ones)."""

    name: str
    title: str
    width: int
    right: bool = False
    rank: int = 0
    keep_end: bool = False
    least: int = 24  # what a column of width 0 needs in a table of 108 cells; more in proportion in a wider one


class Table(Rows):
    """Rows of cells under a head. Sorting is the owner's business: the table says which head was clicked."""

    head = 1

    @dataclass
    class HeadClicked(Message):
        """A click on a column's title."""

        column: str

    def __init__(self, columns: Sequence[TableColumn], *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.columns = columns
        self.cell: Callable[[int, str], Span] = lambda row, column: ("", "text")
        self.sort: tuple[str, bool] | None = None

    def show(self, count: int, cell: Callable[[int, str], Span], keep: bool = True) -> None:
        """``count`` rows, whose cells ``cell`` gives."""
        self.cell = cell
        self.reset(count, keep)

    def fitted(self, width: int) -> list[tuple[TableColumn, int]]:
        """The columns that fit, in order, with their widths."""
        sort = self.sort[0] if self.sort is not None else ""
        left = width - sum(column.least * max(width, 108) // 108 for column in self.columns if not column.width)
        chosen = {column.name for column in self.columns if not column.width}
        for column in sorted((c for c in self.columns if c.width), key=lambda c: -1 if c.name == sort else c.rank):
            left -= column.width + 2
            if left < 0:
                break
            chosen.add(column.name)
        shown = [column for column in self.columns if column.name in chosen]
        rest = max(width - sum(column.width + 2 for column in shown), 8)
        return [(column, column.width or rest) for column in shown]

    def _cells(self, texts: Sequence[Span], width: int, behind: str) -> Strip:
        spans = []
        for (column, size), (text, role) in zip(self.fitted(width), texts, strict=True):
            text = clip(text, size, column.keep_end)
            spans.append((f" {text:>{size}} " if column.right else f" {text:<{size}} ", role))
        return self.look.spans(spans, width, behind)

    def draw_head(self, width: int) -> Strip:
        name, down = self.sort or ("", False)
        arrow = "▼" if down else "▲"
        titles = [(c.title + arrow, "key") if c.name == name else (c.title, "dim") for c, _ in self.fitted(width)]
        return self._cells(titles, width, "panel")

    def draw_row(self, row: int, width: int, is_selected: bool) -> Strip:
        behind = "select" if is_selected and self.has_focus else "panel" if is_selected else "background"
        return self._cells([self.cell(row, column.name) for column, _ in self.fitted(width)], width, behind)

    def head_clicked(self, x: int) -> None:
        for column, size in self.fitted(self.inner_width):
            x -= size + 2
            if x < 0:
                self.post_message(self.HeadClicked(column.name))
                return
