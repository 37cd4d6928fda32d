"""Timeline: memory by category over events or time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from textual.app import ComposeResult
from textual.containers import Vertical

from memtrace.answers.curves import category_curves, pick_events
from memtrace.attribution.categories import Category
from memtrace.history.timeline import Window
from memtrace_tui.data.details import event_lines, event_text
from memtrace_tui.data.lines import Line, line
from memtrace_tui.views import View
from memtrace_tui.widgets.base import Lines
from memtrace_tui.widgets.chart import Chart


class TimelineView(View):
    """The chart; on tall screens also what the event at the cursor did."""

    about = (
        "Live memory by category, the highest state of each column; paler where the column also went lower. "
        "Above it what is reserved but not live. ◆ peak of allocated, ◇ of reserved, • of a step, ▼ refused request, "
        "╌ the limit or the device's memory; with two files ─ is the other one's live memory."
    )

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Chart(self.session)
            yield Lines(id="event", classes="below")

    def main(self) -> Chart:
        return self.query_one(Chart)

    def show(self) -> None:
        self.main().show()
        below = self.query_one("#event", Lines)
        below.display = self.app.size.height >= 36
        if below.display:
            below.show(self._event_lines(max(self.app.size.width - 4, 20)), keep=False)

    def _event_lines(self, width: int) -> list[Line]:
        log, event = self.session.log, self.session.event
        if event < 0:
            return [line(("state before the first event", "dim"))]
        head = (f"event {event_text(self.session.provider, event)}   ", "title")
        parts = log.cell(event, "action"), "  ", log.cell(event, "size")
        return [line(head, *parts), *event_lines(self.session.provider, event, int(log.row_of_event[event]), width)]

    def csv(self) -> Iterable[Sequence[str]]:
        chart, provider = self.main(), self.session.provider
        yield "event", "time_us", "requested_bytes", "allocated_bytes", "reserved_bytes", *map(str, Category)
        if provider.count:
            curves = category_curves(provider.analysis, Window(chart.start, chart.stop))
            for event in pick_events(curves, 4000).tolist():
                row = [event, provider.timeline.time_us(event), *provider.timeline.curve_at(event)]
                row += curves.categories[:, event - curves.first].tolist()
                yield ["" if value is None else str(value) for value in row]

    def copy_text(self) -> str:
        provider, event = self.session.provider, self.session.event
        requested, allocated, reserved = provider.timeline.curve_at(event)
        where = event_text(provider, event)
        return f"event {where}: requested {requested} B, allocated {allocated} B, reserved {reserved} B"
