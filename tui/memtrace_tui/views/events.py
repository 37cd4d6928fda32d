"""Events: the raw log; the selected line is the cursor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Input

from memtrace.errors import UsageError
from memtrace.units import format_bytes, format_count
from memtrace_tui.data.details import allocation_lines, event_text, stack_lines
from memtrace_tui.data.goto import Goto
from memtrace_tui.data.lines import BLANK, Line, line
from memtrace_tui.dialogs import Details, text_width
from memtrace_tui.messages import MoveCursor
from memtrace_tui.session import Session
from memtrace_tui.views.base import View
from memtrace_tui.widgets.filterbar import FilterBar
from memtrace_tui.widgets.lines import Lines
from memtrace_tui.widgets.table import Column, Table

COLUMNS = (
    Column("event", "event", 9, right=True, rank=0),
    Column("time", "seconds", 10, right=True, rank=5),
    Column("action", "action", 14, rank=1),
    Column("size", "size", 10, right=True, rank=2),
    Column("address", "address", 14, rank=4),
    Column("purpose", "purpose", 25, rank=3),
    Column("site", "call site", 0, keep_end=True),
    Column("stream", "stream", 6, rank=6),
)


class EventsView(View):
    """Every recorded event, virtual; searching jumps between the events that fit."""

    view = "events"
    title = "Events"
    about = "The raw log. Search: an action, an address (0x…), a word or /regex/ of the call site; n and N jump."
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "search", "Search"),
        Binding("n", "next(1)", "Next", key_display="n N"),
        Binding("N", "next(-1)", "Previous", show=False),
        Binding("b", "partner", "Alloc↔free"),
        Binding("tab", "app.focus_next", "Pane", show=False),
    ]

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.query_text = ""
        self._found: NDArray[np.int64] = np.zeros(0, np.int64)
        self._device = -1

    def compose(self) -> ComposeResult:
        """Search line, log, details."""
        with Horizontal():
            with Vertical(id="events-list"):
                yield FilterBar("search: oom  segment_alloc  0x7f…  modeling_llama  /regex/")
                yield Lines(id="events-summary", classes="summary")
                yield Table(COLUMNS, id="events-table")
            yield Lines(id="event-details", classes="side")

    def table(self) -> Table:
        """The log."""
        return self.query_one("#events-table", Table)

    def main(self) -> Table:
        return self.table()

    def show(self) -> None:
        session, table = self.session, self.table()
        if self._device != id(session.provider):
            self._device = id(session.provider)
            table.show(session.provider.count, session.log.cell, keep=False)
            self._search()
        if session.event >= 0 and table.selected != session.event:
            table.selected = session.event
            if not table.top <= session.event < table.top + table.page:
                table.top = max(session.event - table.page // 2, 0)
            table.show_selected()
            table.refresh()
        elif session.event >= 0:
            table.show_selected()
        self._summary()
        side = self.query_one("#event-details", Lines)
        side.display = self.wide
        if self.wide:
            side.show(self._details(self.side_width), keep=False)

    def _summary(self) -> None:
        if not self.session.provider.count:
            text = line((" no trace was recorded: only the final state is known", "dim"))
        elif self.query_text:
            before = int(np.searchsorted(self._found, self.session.event, side="right"))
            text = line(
                (f" {format_count(len(self._found))}", "strong"),
                (" events fit ", "dim"),
                (self.query_text, "accent"),
                (f"   {format_count(before)} of them up to here", "dim"),
            )
        else:
            text = line(
                (f" {format_count(self.session.provider.count)}", "strong"),
                (" events; the cursor is at ", "dim"),
                (event_text(self.session.provider, self.session.event), "text"),
            )
        self.query_one("#events-summary", Lines).show([text])

    def _details(self, width: int) -> list[Line]:
        session, event = self.session, self.session.event
        if event < 0:
            return []
        row = int(session.log.row_of_event[event])
        if row >= 0:
            return allocation_lines(session.provider, row, event, width)
        trace = session.provider.timeline.trace
        action, role = session.log.cell(event, "action")
        lines = [line((action, role), f"  {format_bytes(int(trace.size[event]))}")]
        if event in trace.oom_device_free_bytes:
            free = trace.oom_device_free_bytes[event]
            lines.append(line(("free on the device  ", "dim"), format_bytes(free)))
        return [*lines, BLANK, *stack_lines(session.provider, int(trace.stack[event]), width)]

    # -- actions

    def action_search(self) -> None:
        """Write what to look for."""
        self.query_one(FilterBar).begin(self.query_text)

    def _search(self) -> None:
        text = self.query_text.strip()
        fits = self.session.log.matches(text) if text else np.zeros(0, np.bool_)
        self._found = np.flatnonzero(fits)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Look while writing."""
        event.stop()
        bar = self.query_one(FilterBar)
        try:
            self.query_text = event.value
            self._search()
            bar.complain("")
        except UsageError as error:
            bar.complain(str(error))
            self.query_one("#events-summary", Lines).show([line((f" {error}", "bad"))])
            return
        self._summary()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """To the first event that fits, from the cursor on."""
        event.stop()
        at = int(np.searchsorted(self._found, self.session.event, side="left"))
        if len(self._found):
            self.post_message(MoveCursor(int(self._found[at % len(self._found)])))

    def action_next(self, by: int) -> None:
        """To the next event that fits, around the end."""
        if not len(self._found):
            self.notify("Search for something first (/).", severity="warning")
            return
        if by > 0:
            at = int(np.searchsorted(self._found, self.session.event, side="right"))
        else:
            at = int(np.searchsorted(self._found, self.session.event, side="left")) - 1
        self.post_message(MoveCursor(int(self._found[at % len(self._found)])))

    def action_partner(self) -> None:
        """From an allocation to its free, and back."""
        session = self.session
        row = int(session.log.row_of_event[session.event]) if session.event >= 0 else -1
        if row < 0:
            return
        table = session.provider.timeline.allocations
        born, freed = int(table.alloc_event[row]), int(table.free_completed_event[row])
        target = freed if session.event == born else born
        if target < 0:
            self.notify(
                "Never freed in this recording." if session.event == born else "Allocated before the recording."
            )
        else:
            self.post_message(MoveCursor(target))

    def on_table_moved(self, message: Table.Moved) -> None:
        """The cursor follows the selection."""
        self.post_message(MoveCursor(message.row))

    def on_table_opened(self, message: Table.Opened) -> None:
        """Everything about the event."""
        self.app.push_screen(Details("Event", self._details(text_width(self.app.size.width))))

    def arrive(self, goto: Goto) -> None:
        if goto.filter is not None:
            self.query_text = goto.filter
            self._search()

    def csv(self) -> Iterable[Sequence[str]]:
        """The log around the cursor, ten thousand events at most."""
        names = [column.name for column in COLUMNS]
        yield names
        event, trace = self.session.event, self.session.provider.timeline.trace
        for each in range(max(event - 5000, 0), min(event + 5000, self.session.provider.count)):
            cells = {name: self.session.log.cell(each, name)[0] for name in names}
            cells |= {"event": str(each), "size": str(int(trace.size[each]))}
            yield [cells[name] for name in names]

    def copy_text(self) -> str:
        return "\n".join(each.plain.rstrip() for each in self._details(120))
