"""A virtual table: any number of rows, text made only for those on screen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from textual.message import Message
from textual.strip import Strip

from memtrace.render.words import clip
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
    least: int = 24  # what a column of width 0 needs


Cell = Callable[[int, str], tuple[str, str]]


class Table(Rows):
    """Rows of cells under a head. Sorting is the owner's business: the table says which head was clicked."""

    head = 1

    @dataclass
    class HeadClicked(Message):
        """A click on a column's title."""

        column: str

    @dataclass
    class Opened(Message):
        """Enter on a row."""

        table: Table
        row: int

    @dataclass
    class Moved(Message):
        """The selection moved."""

        table: Table
        row: int

    def __init__(self, columns: Sequence[TableColumn], *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.columns = columns
        self.cell: Cell = lambda row, column: ("", "text")
        self.sort: tuple[str, bool] | None = None
        self.marked: frozenset[int] = frozenset()

    def show(self, count: int, cell: Cell, keep: bool = True) -> None:
        self.cell = cell
        self.reset(count, keep)

    def set_columns(self, columns: Sequence[TableColumn]) -> None:
        """Other columns."""
        self.columns = columns
        self._strips.clear()
        self.refresh()

    def fitted(self, width: int) -> list[tuple[TableColumn, int]]:
        """The columns that fit, in order, with their widths."""
        flexible = sum(column.least for column in self.columns if column.width == 0)
        left = width - flexible
        chosen = {column.name for column in self.columns if column.width == 0}
        for column in sorted(
            (c for c in self.columns if c.width), key=lambda c: -1 if self.sort and c.name == self.sort[0] else c.rank
        ):
            if column.width + 2 > left:
                continue
            chosen.add(column.name)
            left -= column.width + 2
        shown = [column for column in self.columns if column.name in chosen]
        fixed = sum(column.width + 2 for column in shown if column.width)
        rest = max(width - fixed - 2 * sum(not c.width for c in shown), 8)
        return [(column, column.width or rest) for column in shown]

    def draw_head(self, y: int, width: int) -> Strip:
        spans = []
        for column, size in self.fitted(width):
            title = column.title
            is_sorted = self.sort is not None and self.sort[0] == column.name
            if is_sorted and self.sort is not None:
                title += "▼" if self.sort[1] else "▲"
            text = clip(title, size)
            spans.append((f" {text:>{size}} " if column.right else f" {text:<{size}} ", "key" if is_sorted else "dim"))
        return self.look.spans(spans, width, "panel")

    def draw_row(self, row: int, width: int, is_selected: bool) -> Strip:
        behind = "select" if is_selected and self.has_focus else "panel" if is_selected else "background"
        spans = []
        for column, size in self.fitted(width):
            text, role = self.cell(row, column.name)
            text = clip(text, size, column.keep_end)
            spans.append((f" {text:>{size}} " if column.right else f" {text:<{size}} ", role))
        return self.look.spans(spans, width, behind)

    def opened(self, row: int) -> None:
        self.post_message(self.Opened(self, row))

    def selection_moved(self) -> None:
        self.post_message(self.Moved(self, self.selected))

    def head_clicked(self, x: int) -> None:
        for column, size in self.fitted(self.inner_width):
            x -= size + 2
            if x < 0:
                self.post_message(self.HeadClicked(column.name))
                return
