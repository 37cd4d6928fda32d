"""Events: the raw log; the selected line is the cursor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from memtrace.units import format_count
from memtrace_tui.data.details import event_lines, event_text
from memtrace_tui.data.lines import Line, line
from memtrace_tui.views import TableView
from memtrace_tui.widgets.base import MoveCursor, keys
from memtrace_tui.widgets.table import TableColumn

COLUMNS = (
    TableColumn("event", "event", 9, right=True, rank=0),
    TableColumn("time", "seconds", 10, right=True, rank=5),
    TableColumn("action", "action", 14, rank=1),
    TableColumn("size", "size", 10, right=True, rank=2),
    TableColumn("address", "address", 14, rank=3),
    TableColumn("purpose", "purpose", 25, rank=4),
    TableColumn("site", "call site", 0, keep_end=True, least=12),
    TableColumn("stream", "stream", 6, rank=6),
)


class EventsView(TableView):
    """Every recorded event, virtual; searching jumps between the events that fit."""

    about = (
        "The raw log. What the filter does not fit is dim; n and N jump from fit to fit. Filter words as for the "
        "allocations, and action:oom, 0x7f…."
    )
    BINDINGS = keys("""
        n    next(1)         Next        n N
        N    next(-1)        -Previous
        b    partner         Alloc↔free
    """)

    columns = COLUMNS
    _key: tuple[object, ...] = ()

    def show(self) -> None:
        session, table = self.session, self.main()
        key = (session.provider, session.filter)
        if key != self._key:
            is_new = key[:1] != self._key[:1]
            self._key = key
            table.show(session.provider.count, self._cell, keep=not is_new)
        if session.event >= 0 and table.selected != session.event:
            before, table.selected = table.selected, session.event
            table.refresh_line(before + 1)
            table.refresh_line(table.selected + 1)
        if session.event >= 0:
            table.show_selected(centre=True)
        self._summary()
        self.show_side()

    def _cell(self, event: int, column: str) -> tuple[str, str]:
        text, role = self.session.log.cell(event, column)
        fits = self.session.fitting_events
        return text, role if fits is None or fits[event] else "dim"

    @property
    def _found(self) -> NDArray[np.int64]:
        """Events that the filter fits."""
        fits = self.session.fitting_events
        return np.zeros(0, np.int64) if fits is None else np.flatnonzero(fits)

    def _summary(self) -> None:
        provider, event = self.session.provider, self.session.event
        if not provider.count:
            self.sum_up((" no trace was recorded: only the final state is known", "dim"))
        elif self.session.terms:
            found = self._found
            before = int(np.searchsorted(found, event, side="right"))
            self.sum_up((f" {format_count(len(found))}", "strong"), (" events fit", "dim"),
                        (f"   {format_count(before)} of them up to here", "dim"))  # fmt: skip
        else:
            self.sum_up((f" {format_count(provider.count)}", "strong"), (" events; the cursor is at ", "dim"),
                        (event_text(provider, event), "text"))  # fmt: skip

    def details(self, width: int, fold: bool = True) -> list[Line]:
        session, event = self.session, self.session.event
        if event < 0:
            return []
        row = int(session.log.row_of_event[event])
        head = [line(session.log.cell(event, "action"), "  ", session.log.cell(event, "size"))] if row < 0 else []
        return [*head, *event_lines(session.provider, event, row, width, fold)]

    # -- actions

    def filtered(self) -> None:
        """To the first event that fits, from the cursor on."""
        found = self._found
        if len(found):
            at = int(np.searchsorted(found, self.session.event, side="left"))
            self.post_message(MoveCursor(int(found[at % len(found)])))

    def action_next(self, by: int) -> None:
        """To the next event that fits, around the end."""
        found, event = self._found, self.session.event
        if not len(found):
            self.notify("Filter for something first (/).", severity="warning")
            return
        at = int(np.searchsorted(found, event, side="right" if by > 0 else "left")) - (by < 0)
        self.post_message(MoveCursor(int(found[at % len(found)])))

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
            self.notify(f"{'Never freed in' if session.event == born else 'Allocated before'} this recording.")
        else:
            self.post_message(MoveCursor(target))

    def on_rows_moved(self) -> None:
        self.post_message(MoveCursor(self.main().selected))

    def addresses(self) -> tuple[int, int] | None:
        trace, event = self.session.provider.timeline.trace, self.session.event
        if event < 0 or not trace.address[event]:
            return None
        return int(trace.address[event]), int(trace.address[event]) + max(int(trace.size[event]), 1)

    def csv(self) -> Iterable[Sequence[str]]:
        """The log around the cursor, ten thousand events at most."""
        names = [column.name for column in COLUMNS]
        yield names
        event, trace = self.session.event, self.session.provider.timeline.trace
        for each in range(max(event - 5000, 0), min(event + 5000, self.session.provider.count)):
            cells = {name: self.session.log.cell(each, name)[0] for name in names}
            cells |= {"event": str(each), "size": str(int(trace.size[each]))}
            yield [cells[name] for name in names]
