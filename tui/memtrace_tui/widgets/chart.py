"""The timeline: memory by category as a stacked area, with phases, steps, out-of-memory marks and the cursor."""

from __future__ import annotations

from typing import ClassVar

from rich.segment import Segment
from textual import events
from textual.binding import Binding, BindingType
from textual.strip import Strip

from memtrace.render.words import MARKS
from memtrace.units import format_bytes
from memtrace_tui.data.buckets import EMPTY, FADED, LAYERS, UNUSED, Columns, Raster, columns, raster, ticks
from memtrace_tui.data.goto import Goto
from memtrace_tui.data.lines import Span
from memtrace_tui.messages import MoveCursor, Open
from memtrace_tui.provider import Provider
from memtrace_tui.session import Session
from memtrace_tui.widgets.base import Wheeled
from memtrace_tui.widgets.chart_frame import AXIS, axis_line, legend, phase_band, step_band

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_LEAST = 4  # events in the closest view


def _first_view(provider: Provider) -> tuple[int, int]:
    """The events that a recording was opened on."""
    first, stop = provider.window
    return first, max(stop, first + 1)


def role_of(code: int) -> str:
    """Role of a raster code."""
    if code == EMPTY:
        return "background"
    if code == UNUSED:
        return "unused"
    return f"faded:cat|{LAYERS[code - FADED]}" if code >= FADED else f"cat:{LAYERS[code]}"


def letter_of(code: int) -> str:
    """What stands for a code where there are no colours."""
    if code >= UNUSED:
        return "·" if code == UNUSED else " "
    return MARKS[LAYERS[code - FADED]].letter.lower() if code >= FADED else MARKS[LAYERS[code]].letter


class Chart(Wheeled):
    """Stacked area of ``start:stop``; left and right move the cursor by columns."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "move(-1)", "Cursor", key_display="←→"),
        Binding("right", "move(1)", "Cursor", show=False),
        Binding("plus,equals_sign,up,k", "zoom(0.5)", "Zoom", key_display="+-"),
        Binding("minus,down,j", "zoom(2.0)", "Zoom out", show=False),
        Binding("shift+left,H", "pan(-1)", "Pan", key_display="⇧←→"),
        Binding("shift+right,L", "pan(1)", "Pan right", show=False),
        Binding("0", "fit", "Fit"),
        Binding("z", "zoom_step", "Zoom to step", show=False),
        Binding("e", "axis", "Time/events"),
        Binding("enter", "live_set", "Live set"),
    ]

    def __init__(self, session: Session) -> None:
        super().__init__(id="chart")
        self.session = session
        self.start, self.stop = _first_view(session.provider)
        self._provider_id = id(session.provider)
        self._key: tuple[object, ...] = ()
        self._window_key: tuple[object, ...] = ()
        self._data: Columns | None = None
        self._raster: Raster | None = None
        self._strips: dict[int, Strip] = {}
        self._other_key: tuple[object, ...] = ()
        self._other: list[int] = []

    # -- geometry

    @property
    def by_time(self) -> bool:
        """Whether columns are equal stretches of time."""
        times = self.session.provider.timeline.trace.time_us
        return self.session.settings.axis == "time" and times is not None

    @property
    def chart_height(self) -> int:
        """Rows of the area itself: without legend, marks, two bands and the axis."""
        return max(self.size.height - 5, 1)

    @property
    def top_bytes(self) -> int:
        """Upper edge of the scale: room for the highest reserved bytes, and for the capacity if that is near."""
        provider = self.session.provider
        peak = max(provider.peaks[2].size_bytes, 1)
        capacity = provider.capacity_bytes or 0
        return round((capacity if peak < capacity <= peak * 1.6 else peak) * 1.03)

    def _prepare(self) -> tuple[Columns, Raster]:
        provider = self.session.provider
        width, height = max(self.size.width - AXIS, 1), self.chart_height
        window = (id(provider), self.start, self.stop, width, self.by_time)
        if self._data is None or window != self._window_key:
            self._data = columns(provider, self.start, self.stop, width, self.by_time)
            self._window_key = window
        key = (window, height, id(self.look), id(self.session.other), self.session.swapped)
        if self._raster is None or key != self._key:
            self._raster = raster(self._data, height, self.top_bytes)
            self._strips = {}
            self._key = key
        return self._data, self._raster

    def show(self) -> None:
        provider = self.session.provider
        if id(provider) != self._provider_id:
            self._provider_id = id(provider)
            self.start, self.stop = _first_view(provider)
        event = max(self.session.event, 0)
        if not self.start <= event < self.stop:
            half = (self.stop - self.start) // 2
            self._window(event - half, event - half + self.stop - self.start)
        self.refresh()

    def _window(self, start: int, stop: int) -> None:
        count = max(self.session.provider.count, 1)
        size = max(min(stop - start, count), min(_LEAST, count))
        self.start = max(min(start, count - size), 0)
        self.stop = self.start + size
        self.refresh()

    # -- actions

    def action_move(self, by: int) -> None:
        """The cursor to the highest point of the next column."""
        if not self.session.provider.count:
            return
        data, _ = self._prepare()
        here = data.column_of(max(self.session.event, 0))
        at = len(data) // 2 if here is None else here
        event = self.session.event
        while 0 <= at + by < len(data):
            at += by
            target = int(data.high_event[at])
            if (target > event) == (by > 0) and target != event:
                self.post_message(MoveCursor(target))
                return
        edge = self.session.provider.clamp(self.stop if by > 0 else self.start - 1)
        self.post_message(MoveCursor(max(edge, 0)))

    def action_zoom(self, factor: float) -> None:
        """Show fewer or more events, the cursor staying where it is."""
        event = max(self.session.event, 0)
        size = max(round((self.stop - self.start) * factor), _LEAST)
        share = (event - self.start) / max(self.stop - self.start, 1)
        start = round(event - share * size)
        self._window(start, start + size)

    def action_pan(self, by: int) -> None:
        """Half a screen along; the cursor comes with it."""
        size = self.stop - self.start
        self._window(self.start + by * size // 2, self.stop + by * size // 2)
        if not self.start <= self.session.event < self.stop:
            self.post_message(MoveCursor(self.start if by > 0 else self.stop - 1))

    def action_fit(self) -> None:
        self._window(0, self.session.provider.count)

    def action_zoom_step(self) -> None:
        event = max(self.session.event, 0)
        spans = self.session.provider.spans
        inside = next((span for span in spans if span.start <= event < span.stop), None)
        if inside is not None:
            step = [span for span in spans if span.step == inside.step]
            self._window(step[0].start, step[-1].stop)

    def action_axis(self) -> None:
        """Columns of equal time, or of equal numbers of events."""
        if self.session.provider.timeline.trace.time_us is None:
            self.notify("This file has no times.", severity="warning")
            return
        self.session.settings.axis = "event" if self.session.settings.axis == "time" else "time"
        self.refresh()

    def action_live_set(self) -> None:
        self.post_message(Open(Goto("allocations", self.session.event)))

    def on_click(self, event: events.Click) -> None:
        self._go(event.x)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if event.button == 1:
            self._go(event.x)

    def _go(self, x: int) -> None:
        if self.session.provider.count and x >= AXIS:
            data, _ = self._prepare()
            self.post_message(MoveCursor(int(data.high_event[min(x - AXIS, len(data) - 1)])))

    def wheel(self, by: int) -> None:
        self.action_zoom(1.25 if by > 0 else 0.8)

    # -- drawing

    def draw_line(self, y: int) -> Strip:
        width, height = self.size.width, self.chart_height
        if y == 0:
            return legend(self.look, self.session.provider, self.session.event, width)
        if not self.session.provider.count:
            text = " no trace was recorded: only the final state is known" if y == 2 else ""
            return self.look.spans([(text, "dim")], width)
        data, cells = self._prepare()
        if y == 1:
            return self._marks(data)
        if y <= 1 + height:
            return self._area(height + 1 - y, data, cells)
        if y == height + 2:
            return phase_band(self.look, self.session.provider, data, width)
        if y == height + 3:
            return step_band(self.look, self.session.provider, data, width)
        if y == height + 4:
            return axis_line(self.look, self.session.provider, (self.start, self.stop), self.by_time, width)
        return self.blank()

    def _marks(self, data: Columns) -> Strip:
        provider, session = self.session.provider, self.session
        marks: list[Span] = [(" ", "text")] * len(data)
        _, allocated, reserved = provider.peaks
        notes = [(event, "•", "dim") for event in provider.step_peaks]
        notes += [(reserved.event, "◇", "accent"), (allocated.event, "◆", "accent")]
        notes += [(event, "▼", "bad") for event in provider.ooms[:500]]
        notes += [(session.mark, "A", "key")] if session.mark is not None and session.other is None else []
        for event, mark, role in notes:
            column = data.column_of(event)
            if event >= 0 and column is not None:
                marks[column] = (mark, role)
        here = data.column_of(max(session.event, 0))
        if here is not None:
            if marks[here][0] in " •":
                marks[here] = ("┃", "strong")
            value = f" {format_bytes(provider.timeline.curve_at(session.event)[1])} "
            start = here + 1 if here + 1 + len(value) <= len(marks) else here - len(value)
            if start >= 0 and all(mark in " •" for mark, _ in marks[start : start + len(value)]):
                marks[start : start + len(value)] = [(letter, "strong") for letter in value]
        return self.look.spans([(" " * AXIS, "dim"), *marks], self.size.width)

    def _area(self, row: int, data: Columns, cells: Raster) -> Strip:
        """Row 0 is the lowest."""
        if row not in self._strips:
            self._strips[row] = self._draw_area(row, cells)
        strip = self._strips[row]
        here = data.column_of(max(self.session.event, 0))
        if here is None:
            return strip
        x = AXIS + here
        code = int(cells.under[row, here]) if cells.eighths[row, here] >= 4 else int(cells.over[row, here])
        mark = Segment("┃", self.look.style("strong", role_of(code)))
        return Strip([*strip.crop(0, x), mark, *strip.crop(x + 1, self.size.width)], self.size.width)

    def _draw_area(self, row: int, cells: Raster) -> Strip:
        look = self.look
        segments = list(look.spans([(self._label(row), "dim")], AXIS))
        capacity = self.session.provider.capacity_bytes
        is_capacity = capacity is not None and self._row_of(capacity) == row
        under, over = cells.under[row].tolist(), cells.over[row].tolist()
        eighths = cells.eighths[row].tolist()
        other = self._other_rows()
        for x, (below, above, part) in enumerate(zip(under, over, eighths, strict=True)):
            ground = below if part >= 4 else above
            if is_capacity:
                glyph, style = "╌", look.style("bad", role_of(ground))
            elif other is not None and other[x] == row:
                glyph, style = "─", look.style("hue:1", role_of(ground))
            elif look.plain:
                glyph, style = letter_of(ground), look.style("text")
            elif part == 8 or below == above:
                glyph, style = " ", look.style("text", role_of(below))
            else:
                glyph, style = _EIGHTHS[part], look.style(role_of(below), role_of(above))
            segments.append(Segment(glyph, style))
        return Strip(segments, self.size.width).simplify()

    def _other_rows(self) -> list[int] | None:
        """The row that the other file's live bytes reach in each column, its events stretched to the same width."""
        if self.session.other is None or self._data is None:
            return None
        provider = next(each for each in self.session.pair() if each is not self.session.provider)
        key = (id(provider), self.start, self.stop, len(self._data), self.chart_height, self.top_bytes)
        if key != self._other_key:
            own, count = max(self.session.provider.count, 1), provider.count
            first, stop = self.start * count // own, max(self.stop * count // own, self.start * count // own + 1)
            shown = len(self._data)
            high = columns(provider, first, min(stop, count), shown).high.tolist() if count else [0] * shown
            self._other_key, self._other = key, [self._row_of(size) for size in high]
        return self._other or None

    def _row_of(self, size_bytes: int) -> int:
        return min(int(size_bytes / self.top_bytes * self.chart_height), self.chart_height - 1)

    def _label(self, row: int) -> str:
        capacity = self.session.provider.capacity_bytes
        if capacity is not None and capacity <= self.top_bytes and self._row_of(capacity) == row:
            return " capacity "
        for tick in ticks(self.top_bytes, self.chart_height):
            if self._row_of(tick) == row:
                return f"{format_bytes(tick).replace('.00 ', ' ').replace('.0 ', ' '):>9}┤"
        return " " * 9 + "│"
