"""Allocations: the live set at the cursor, or everything ever allocated, as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical

from memtrace.units import format_bytes, format_count
from memtrace_tui.data.details import allocation_lines
from memtrace_tui.data.goto import Goto
from memtrace_tui.data.lines import Line, line
from memtrace_tui.data.rows import GROUPS, Group
from memtrace_tui.data.tenants import span_of
from memtrace_tui.dialogs import Details, text_width
from memtrace_tui.messages import Changed
from memtrace_tui.session import Session
from memtrace_tui.views.base import View
from memtrace_tui.widgets.lines import Lines
from memtrace_tui.widgets.table import Table, TableColumn

ROWS = (
    TableColumn("size", "size", 10, right=True, rank=0),
    TableColumn("purpose", "purpose", 25, rank=1),
    TableColumn("site", "call site", 0, keep_end=True),
    TableColumn("module", "module", 9, rank=8),
    TableColumn("phase", "born in", 10, rank=4),
    TableColumn("step", "step", 5, right=True, rank=5),
    TableColumn("born", "born", 9, right=True, rank=3),
    TableColumn("freed", "freed", 9, right=True, rank=6),
    TableColumn("life", "life", 9, right=True, rank=9),
    TableColumn("block", "block", 10, right=True, rank=10),
    TableColumn("evidence", "evidence", 10, rank=7),
    TableColumn("rule", "rule", 20, rank=11),
    TableColumn("address", "address", 14, rank=12),
    TableColumn("pool", "pool", 6, rank=13),
    TableColumn("stream", "stream", 6, rank=14),
)
SUMS = (
    TableColumn("bytes", "bytes", 11, right=True, rank=0),
    TableColumn("share", "share", 7, right=True, rank=1),
    TableColumn("count", "count", 9, right=True, rank=2),
    TableColumn("largest", "largest", 11, right=True, rank=3),
    TableColumn("label", "group", 0, keep_end=True),
)


class AllocationsView(View):
    """A virtual table with filter, sort and groups; details of the selected row beside it where there is room."""

    view = "allocations"
    title = "Allocations"
    about = (
        "What is live at the cursor, or everything ever allocated. Filter words: category:lora sub:… site:… stack:… "
        "module:… phase:… step:… rule:… evidence:… pool:… stream:… size>1MiB life>1000 0x7f…, a word or /regex/ for "
        "purpose and whole stack, -word for what must not fit. Click a title to sort."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort", "Sort"),
        Binding("l", "longest", "Longest-lived first", show=False),
        Binding("r", "reverse", "Reverse", show=False),
        Binding("g", "group", "Group"),
        Binding("a", "scope", "Live/all"),
        Binding("escape", "clear", "Clear", show=False),
        Binding("tab", "app.focus_next", "Pane", show=False),
    ]

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.everything = False
        self.sort, self.descending = "size", True
        self.rows: NDArray[np.int64] = np.zeros(0, np.int64)
        self.groups: list[Group] = []
        self._total = 0
        self._key: tuple[object, ...] = ()

    def compose(self) -> ComposeResult:
        with Horizontal():
            with Vertical(id="allocations-list"):
                yield Lines(id="allocations-summary", classes="summary")
                yield Table(ROWS, id="allocations-table")
            yield Lines(id="allocation", classes="side")

    @property
    def grouping(self) -> str:
        """What rows are grouped by."""
        return self.session.group if self.session.group in GROUPS else "none"

    def table(self) -> Table:
        return self.query_one("#allocations-table", Table)

    def main(self) -> Table:
        return self.table()

    def show(self) -> None:
        session = self.session
        self.query_one("#allocation", Lines).display = self.wide
        place = (None if self.everything else session.event, session.filter)
        key = (id(session.provider), *place, self.sort, self.descending, self.grouping)
        if key != self._key:
            if key[2] != (self._key or key)[2]:
                self.table().selected = 0
            self._key = key
            self._choose()
        self._summary()
        self._side()

    def _choose(self) -> None:
        session, table = self.session, self.table()
        data = session.table
        fits = session.fitting
        rows = data.chosen(None) if self.everything else session.live()
        rows = rows if fits is None or not self.everything else rows[fits]
        self._total = int(data.table.requested_bytes[rows].sum())
        if self.grouping == "none":
            self.rows, self.groups = data.sorted(rows, self.sort, self.descending), []
            table.sort = (self.sort, self.descending)
            table.set_columns(ROWS)
            table.show(len(self.rows), lambda row, column: data.cell(int(self.rows[row]), column))
        else:
            self.rows, self.groups = rows, data.grouped(rows, self.grouping)
            table.sort = None
            table.set_columns(SUMS)
            table.show(len(self.groups), self._group_cell)

    def _group_cell(self, row: int, column: str) -> tuple[str, str]:
        group = self.groups[row]
        if column == "label":
            return group.label, group.role
        if column == "share":
            return f"{group.bytes / max(self._total, 1):.1%}", "dim"
        if column == "count":
            return format_count(group.count), "text"
        return format_bytes(getattr(group, column)), "strong" if column == "bytes" else "text"

    def _summary(self) -> None:
        what = "ever allocated" if self.everything else f"live at event {format_count(self.session.event)}"
        spans = [
            (f" {format_count(len(self.rows))}", "strong"),
            (f" {what}, ", "dim"),
            (format_bytes(self._total), "strong"),
            (" requested", "dim"),
        ]
        if self.grouping != "none":
            spans += [("  by ", "dim"), (self.grouping, "accent")]
        self.query_one("#allocations-summary", Lines).show([line(*spans)])

    def selected_row(self) -> int | None:
        """Row of the allocation table; None in groups or an empty list."""
        at = self.table().selected
        return int(self.rows[at]) if self.grouping == "none" and at < len(self.rows) else None

    def _details(self, width: int, fold: bool = True) -> list[Line]:
        row = self.selected_row()
        if row is None:
            return [line(("Enter shows the group's allocations.", "dim"))] if self.groups else []
        return allocation_lines(self.session.provider, row, self.session.event, width, fold)

    def _side(self) -> None:
        side = self.query_one("#allocation", Lines)
        if self.wide:
            side.show(self._details(self.side_width, self.session.settings.fold), keep=False)

    # -- actions

    def action_clear(self) -> None:
        self.session.filter_by("")
        if self.session.group != "none":
            self.session.group = self.session.settings.group = "none"
        self._from_the_top()

    def _from_the_top(self) -> None:
        self.table().selected = 0
        self.post_message(Changed())

    def action_sort(self) -> None:
        if self.grouping != "none":
            return
        names = [column.name for column, _ in self.table().fitted(self.table().size.width)]
        at = names.index(self.sort) if self.sort in names else -1
        self._sort_by(names[(at + 1) % len(names)])

    def action_longest(self) -> None:
        """Sort by how long they lived."""
        self.sort, self.descending = "life", True
        self._from_the_top()

    def _sort_by(self, column: str) -> None:
        if column == self.sort:
            self.descending = not self.descending
        else:
            self.sort, self.descending = column, column in ("size", "block", "life")
        self._from_the_top()

    def action_reverse(self) -> None:
        self._sort_by(self.sort)

    def action_group(self) -> None:
        session = self.session
        session.group = session.settings.group = GROUPS[(GROUPS.index(self.grouping) + 1) % len(GROUPS)]
        self._from_the_top()

    def action_scope(self) -> None:
        """What is live at the cursor, or everything."""
        self.everything = not self.everything
        self.show()

    def on_table_head_clicked(self, message: Table.HeadClicked) -> None:
        if self.grouping == "none":
            self._sort_by(message.column)

    def on_table_moved(self) -> None:
        self._side()

    def on_table_opened(self, message: Table.Opened) -> None:
        """A group: its rows. A row: everything about it."""
        if self.groups:
            self.session.filter_by(f"{self.session.filter} {self.groups[message.row].key}")
            self.session.group = "none"
            self._from_the_top()
        else:
            width = text_width(self.app.size.width)
            self.app.push_screen(Details("Allocation", lambda fold: self._details(width, fold)))

    def arrive(self, goto: Goto) -> None:
        if goto.filter is not None:
            self.everything = False
            self.session.group = "none"

    def addresses(self) -> tuple[int, int] | None:
        row = self.selected_row()
        return None if row is None else span_of(self.session.provider.timeline, row)

    def csv(self) -> Iterable[Sequence[str]]:
        table = self.table()
        columns = [column.name for column in table.columns]
        yield columns
        for row in range(table.row_count):
            yield [self._raw(row, column) for column in columns]

    def _raw(self, row: int, column: str) -> str:
        data = self.session.table
        if self.groups:
            group = self.groups[row]
            if column == "share":
                return f"{group.bytes / max(self._total, 1):.6f}"
            return str(getattr(group, column))
        at = int(self.rows[row])
        exact = {
            "size": data.table.requested_bytes, "block": data.table.block_bytes, "born": data.table.alloc_event,
        }.get(column)  # fmt: skip
        return str(int(exact[at])) if exact is not None else data.cell(at, column)[0].replace(",", "")

    def copy_text(self) -> str:
        return "\n".join(each.plain.rstrip() for each in self._details(120))
