"""Allocations: the live set at the cursor, or everything ever allocated, as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memtrace.snapshot.model import I8
from memtrace.units import format_bytes, format_count
from memtrace_tui.data.details import allocation_lines, span_of
from memtrace_tui.data.lines import Goto, Line, line
from memtrace_tui.data.rows import GROUPS, Group
from memtrace_tui.views import TableView
from memtrace_tui.widgets.base import Changed, keys
from memtrace_tui.widgets.table import Table, TableColumn

ROWS = (
    TableColumn("size", "size", 10, right=True, rank=0),
    TableColumn("purpose", "purpose", 25, rank=1),
    TableColumn("site", "call site", 0, keep_end=True),
    TableColumn("module", "module", 9, rank=8),
    TableColumn("layer", "layer", 5, right=True, rank=15),
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


class AllocationsView(TableView):
    """A virtual table with filter, sort and groups."""

    about = (
        "What is live at the cursor, or everything ever allocated. Filter words: category:runtime sub:… site:… stack:… "
        "module:… layer:7 phase:… step:… rule:… evidence:… pool:… stream:… size>1MiB life>1000 0x7f…, a word or "
        "/regex/ for purpose and whole stack, -word for what must not fit. Click a title to sort."
    )
    columns = ROWS
    BINDINGS = keys("""
        s       sort            Sort
        l       longest         -Longest-lived first
        r       reverse         -Reverse
        g       group           Group
        a       scope           Live/all
        escape  clear           -Clear
    """)

    everything = False
    sort, descending = "size", True
    rows: I8 = np.zeros(0, np.int64)
    groups: Sequence[Group] = ()
    _total = 0
    _key: tuple[object, ...] = ()

    @property
    def grouping(self) -> str:
        """What rows are grouped by."""
        return self.session.group if self.session.group in GROUPS else "none"

    def show(self) -> None:
        session = self.session
        place = (None if self.everything else session.event, session.filter)
        key = (session.provider, *place, self.sort, self.descending, self.grouping)
        if key != self._key:
            if key[2] != (self._key or key)[2]:
                self.main().selected = 0
            self._key = key
            self._choose()
        when = f"at event {format_count(session.event)}" if session.event >= 0 else "before the recording"
        what = "ever allocated" if self.everything else f"live {when}"
        grouped = [] if self.grouping == "none" else [("  by ", "dim"), (self.grouping, "accent")]
        if not len(self.rows) and session.filter and not self.everything:
            grouped.append(("  (a: of everything ever allocated)", "dim"))
        self.sum_up((f" {format_count(len(self.rows))}", "strong"), (f" {what}, ", "dim"),
                    (format_bytes(self._total), "strong"), (" requested", "dim"), *grouped)  # fmt: skip
        self.show_side()

    def _choose(self) -> None:
        session, table, data = self.session, self.main(), self.session.table
        every = self.everything and session.fitting is None
        if not self.everything:
            rows = session.live()
        else:
            rows = data.all_rows if session.fitting is None else np.flatnonzero(session.fitting)
        self._total = int(data.table.requested_bytes[slice(None) if every else rows].sum())
        if self.grouping == "none":
            self.rows, self.groups = data.sorted(None if every else rows, self.sort, self.descending), ()
            table.sort, table.columns = (self.sort, self.descending), ROWS
            table.show(len(self.rows), lambda row, column: data.cell(int(self.rows[row]), column))
        else:
            self.rows, self.groups = rows, data.grouped(rows, self.grouping)
            table.sort, table.columns = None, SUMS
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

    def selected_row(self) -> int | None:
        """Row of the allocation table; None in groups or an empty list."""
        at = self.main().selected
        return int(self.rows[at]) if self.grouping == "none" and at < len(self.rows) else None

    def details(self, width: int, fold: bool = True) -> list[Line]:
        row = self.selected_row()
        if row is None:
            return [line(("Enter shows the group's allocations.", "dim"))] if self.groups else []
        return allocation_lines(self.session.provider, row, self.session.event, width, fold)

    # -- actions

    def action_clear(self) -> None:
        self.session.filter_by("")
        if self.session.group != "none":
            self.session.group = self.session.settings.group = "none"
        self._from_the_top()

    def _from_the_top(self) -> None:
        self.main().selected = 0
        self.post_message(Changed())

    def action_sort(self) -> None:
        if self.grouping != "none":
            return
        names = [column.name for column, _ in self.main().fitted(self.main().size.width)]
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

    def on_rows_moved(self, message: Table.Moved) -> None:
        if message.rows is self.main():
            self.show_side()

    def opened(self, row: int) -> None:
        """A group: its rows. A row: everything about it."""
        if not self.groups:
            super().opened(row)
            return
        self.session.filter_by(f"{self.session.filter} {self.groups[row].key}")
        self.session.group = "none"
        self._from_the_top()

    def arrive(self, goto: Goto) -> None:
        if goto.filter is not None:
            self.everything = False
            self.session.group = "none"

    def addresses(self) -> tuple[int, int] | None:
        row = self.selected_row()
        return None if row is None else span_of(self.session.provider.timeline, row)

    def csv(self) -> Iterable[Sequence[str]]:
        table, data = self.main(), self.session.table
        names = [column.name for column in table.columns]
        yield names
        exact: dict[str, NDArray[Any]] = {
            "size": data.table.requested_bytes,
            "block": data.table.block_bytes,
            "born": data.table.alloc_event,
        }
        for row in self.rows.tolist() if not self.groups else ():
            yield [str(int(exact[name][row])) if name in exact else data.cell(row, name)[0].replace(",", "")
                   for name in names]  # fmt: skip
        for group in self.groups:
            share = f"{group.bytes / max(self._total, 1):.6f}"
            yield [share if name == "share" else str(getattr(group, name)) for name in names]
