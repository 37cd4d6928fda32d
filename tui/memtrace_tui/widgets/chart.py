"""The timeline: memory by category as a stacked area, with phases, steps, out-of-memory marks and the cursor; and two
recordings overlaid."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.segment import Segment
from textual.strip import Strip

from memtrace.attribution.categories import Category, category_name
from memtrace.render.words import MARKS, clip, plain_name, short_name
from memtrace.units import format_bytes, format_count
from memtrace_tui.data.buckets import EMPTY, FADED, LAYERS, UNUSED, Columns, Raster, columns, overlay, raster, ticks
from memtrace_tui.data.lines import Goto, Span
from memtrace_tui.look import ScreenLook
from memtrace_tui.palette import PHASE_LETTERS
from memtrace_tui.provider import PhaseSpan, Provider
from memtrace_tui.session import Session
from memtrace_tui.widgets.base import EIGHTHS, Cursored, MoveCursor, Open, keys

AXIS = 10  # width of the labels at the left
_LEAST = 4  # events in the closest view


# of raster codes: their roles, and the letters that stand for them where there are no colours
ROLES = {
    EMPTY: "background", UNUSED: "unused", **{code: f"cat:{name}" for code, name in enumerate(LAYERS)},
    **{code: f"faded:cat|{name}" for code, name in enumerate(LAYERS, FADED)},
}  # fmt: skip
LETTERS = {
    EMPTY: " ", UNUSED: "·", **{code: MARKS[name].letter for code, name in enumerate(LAYERS)},
    **{code: MARKS[name].letter.lower() for code, name in enumerate(LAYERS, FADED)},
}  # fmt: skip


def area(
    look: ScreenLook, cells: Raster, row: int, roles: Mapping[int, str], letters: Mapping[int, str]
) -> list[Segment]:
    """A row of a raster, 0 the lowest: codes by their role, or by their letter where there are no colours."""
    segments = []
    parts = (each[row].tolist() for each in (cells.under, cells.over, cells.eighths))
    for x, (below, above, part) in enumerate(zip(*parts, strict=True)):
        if look.plain:
            segments.append(Segment(letters[cells.ground(row, x)], look.style("text")))
        elif part == 8 or below == above:
            segments.append(Segment(" ", look.style("text", roles[below])))
        else:
            segments.append(Segment(EIGHTHS[part], look.style(roles[below], roles[above])))
    return segments


def _compact(size_bytes: int) -> str:
    """``4.09G``, ``198M``: three digits where there is no room for more."""
    number, unit = format_bytes(size_bytes).split()
    value = float(number)
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f}{unit[0] if unit != 'B' else ''}"


class Chart(Cursored, can_focus=True):
    """Stacked area of ``start:stop``; left and right move the cursor by columns."""

    BINDINGS = keys("""
        left right                  move(±1)   Cursor / Cursor   ←→
        plus,equals_sign,up,k       zoom(0.5)  Zoom              +-
        minus,down,j                zoom(2.0)  -Zoom out
        shift+left,H shift+right,L  pan(±1)    Pan / Pan right   ⇧←→
        0                           fit        Fit
        z                           zoom_step  -Zoom to step
        e                           axis       Time/events
        enter                       live_set   Live set
    """)

    start, stop = 0, 1
    _shown: object = None  # the provider whose window that is
    _key: tuple[object, ...] = ()
    _other: Sequence[int] = ()  # the row that the other file's live bytes reach in each column

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._strips: dict[int, Strip] = {}

    # -- geometry

    @staticmethod
    def columns_of(session: Session, window: tuple[int, int], width: int) -> Columns:
        """The columns of a chart of that width; the last few are kept."""
        return columns(session.provider, *window, max(width - AXIS, 1), session.by_time)

    @property
    def chart_height(self) -> int:
        """Rows of the area itself: without legend, marks, two bands and the axis."""
        return max(self.size.height - 5, 1)

    @property
    def top_bytes(self) -> int:
        """Upper edge of the scale: room for the highest reserved bytes, for the other file's live ones, and for the
        capacity if that is near."""
        provider, other = self.session.provider, self._other_file
        peak, capacity = max(provider.peaks[2].size_bytes, 1), provider.capacity_bytes or 0
        peak = peak if other is None else max(peak, other.peaks[1].size_bytes)
        return round((capacity if peak < capacity <= peak * 1.6 else peak) * 1.03)

    @property
    def _other_file(self) -> Provider | None:
        return next((each for each in self.session.pair() if each is not self.session.provider), None)

    def _prepare(self) -> tuple[Columns, Raster]:
        session = self.session
        data = self.columns_of(session, (self.start, self.stop), self.size.width)
        cells = raster(data, self.chart_height, self.top_bytes)
        key = (cells, self.look, session.other, session.swapped)
        if key != self._key:
            self._strips, self._key, self._other = {}, key, self._other_rows(len(data))
        return data, cells

    def show(self) -> None:
        provider = self.session.provider
        if provider is not self._shown:
            self._shown = provider
            self.start, self.stop = provider.window[0], max(provider.window[1], provider.window[0] + 1)
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
        data, event = self._prepare()[0], self.session.event
        here = data.column_of(max(event, 0))
        at = len(data) // 2 if here is None else here
        beyond = data.high_event[at + 1 :] if by > 0 else data.high_event[:at][::-1]
        beyond = beyond[(beyond > event) if by > 0 else (beyond < event)]
        edge = max(self.session.provider.clamp(self.stop if by > 0 else self.start - 1), 0)
        self.post_message(MoveCursor(int(beyond[0]) if len(beyond) else edge))

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
        event, spans = max(self.session.event, 0), self.session.provider.spans
        number = next((span.step for span in spans if span.start <= event < span.stop), None)
        step = [span for span in spans if span.step == number]
        if step:
            self._window(step[0].start, step[-1].stop)

    def action_axis(self) -> None:
        """Columns of equal time, or of equal numbers of events."""
        settings = self.session.settings
        if self.session.provider.timeline.trace.time_us is None:
            self.notify("This file has no times.", severity="warning")
        else:
            settings.axis = "event" if settings.axis == "time" else "time"
        self.refresh()

    def action_live_set(self) -> None:
        self.post_message(Open(Goto("allocations", self.session.event)))

    def event_at(self, x: int) -> int | None:
        data, _ = self._prepare()
        return int(data.high_event[min(x - AXIS, len(data) - 1)]) if x >= AXIS else None

    def wheel(self, by: int) -> None:
        self.action_zoom(1.25 if by > 0 else 0.8)

    # -- drawing

    def draw_line(self, y: int) -> Strip:
        width, height = self.size.width, self.chart_height
        if y == 0:
            return self._legend(width)
        if not self.session.provider.count:
            text = " no trace was recorded: only the final state is known" if y == 2 else ""
            return self.look.spans([(text, "dim")], width)
        data, cells = self._prepare()
        if 2 <= y <= 1 + height:
            return self._area(height + 1 - y, data, cells)
        others = {1: self._marks, height + 2: self._phases, height + 3: self._steps, height + 4: self._axis}
        return others[y](data) if y in others else self.blank()

    def _legend(self, width: int) -> Strip:
        """The categories with their bytes at the cursor, from the same report as everywhere."""
        is_short, plain = width < 132, self.look.plain
        meaning = self.session.report.lora["meaning"]
        parts: list[list[Span]] = []
        for category, size in self.session.report.categories.items():
            if category == Category.UNATTRIBUTED and not size:
                continue
            mark = (MARKS[category].letter if plain else "■") + ("" if is_short and not plain else " ")
            name = short_name(category, meaning) if is_short else plain_name(category_name(category, meaning))
            text = _compact(size) if is_short else format_bytes(size)
            parts.append([(mark, f"cat:{category}"), (f"{name} ", "text"), (text, "strong")])
        if (other := self._other_file) is not None:
            live_bytes = other.timeline.curve_at(self.session.other_event)[1]
            live = _compact(live_bytes) if is_short else f"{format_bytes(live_bytes)} live"
            name = "other " if is_short else " other file "
            parts.append([("─", "hue:1"), (name, "text"), (live, "strong")])
        used = sum(len(text) for part in parts for text, _ in part)
        gap = "  " if used + 2 * len(parts) <= width else " "
        spans: list[Span] = [(" ", "text")]
        for part in parts:
            spans += [*part, (gap, "text")]
        return self.look.spans(spans[:-1], width)

    def _phases(self, data: Columns) -> Strip:
        """The phases in their colours, named where there is room."""
        segments = list(self.look.spans([("   phase  ", "dim")], AXIS))
        for span, cells in self._runs(data, lambda span: span.start):
            letter = PHASE_LETTERS[span.phase]
            name = span.phase if cells >= len(span.phase) + 2 else letter if cells > 2 else ""
            text = f"{name or letter:·^{cells}}"[:cells] if self.look.plain else f"{name:^{cells}}"
            segments += list(self.look.spans([(text, "strong")], cells, f"phase:{span.phase}"))
        return Strip(segments).adjust_cell_length(self.size.width, self.look.style("text"))

    def _steps(self, data: Columns) -> Strip:
        """The numbers of the steps, on alternating ground."""
        segments = list(self.look.spans([("    step  ", "dim")], AXIS))
        for span, cells in self._runs(data, lambda span: span.step):
            name = str(span.step) if span.step >= 0 else "load" if cells > 5 else ""
            shown = f"{name if len(name) < cells else '':^{cells}}"
            segments += list(self.look.spans([(shown, "text")], cells, "panel" if span.step % 2 else "surface"))
        return Strip(segments).adjust_cell_length(self.size.width, self.look.style("text"))

    def _runs(self, data: Columns, key: Callable[[PhaseSpan], int]) -> list[tuple[PhaseSpan, int]]:
        """(span, columns) for neighbouring columns whose spans have the same key."""
        spans = self.session.provider.spans
        runs: list[tuple[PhaseSpan, int]] = []
        at = 0
        for first in data.start.tolist() if spans else ():
            while at + 1 < len(spans) and spans[at + 1].start <= first:
                at += 1
            if runs and key(runs[-1][0]) == key(spans[at]):
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((spans[at], 1))
        return runs

    def _axis(self, data: Columns) -> Strip:
        """First and last event (or time) of the window, and how many events it has."""
        provider, start, stop = self.session.provider, self.start, self.stop
        left, right = format_count(start), format_count(stop - 1)
        if self.session.by_time:
            left, right = (f"+{provider.seconds(event) or 0:.3f} s" for event in (start, stop - 1))
        room = max(self.size.width - AXIS, 1)
        middle = f"{format_count(stop - start)} events"
        axis, letters = f", {'time' if self.session.by_time else 'event'} axis", "  lower case: at times  ·: reserved"
        for more in (letters, axis) if self.look.plain else (axis,):  # without the letters it can't be read
            if len(left) + len(middle) + len(more) + len(right) + 4 <= room:
                middle += more
        text = f"{left}{middle:^{max(room - len(left) - len(right), 0)}}{right}"
        return self.look.spans([(" " * AXIS, "dim"), (clip(text, room), "dim")], self.size.width)

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
        mark = Segment("┃", self.look.style("strong", ROLES[cells.ground(row, here)]))
        return Strip([*strip.crop(0, x), mark, *strip.crop(x + 1, self.size.width)], self.size.width)

    def _draw_area(self, row: int, cells: Raster) -> Strip:
        look = self.look
        segments = list(look.spans([(self._label(row), "dim")], AXIS))
        is_capacity = row == self._capacity_row
        drawn = area(look, cells, row, ROLES, LETTERS)
        for x in range(len(drawn)):
            if is_capacity or (self._other and self._other[x] == row):
                glyph, role = ("╌", "bad") if is_capacity else ("─", "hue:1")
                drawn[x] = Segment(glyph, look.style(role, ROLES[cells.ground(row, x)]))
        return Strip([*segments, *drawn], self.size.width).simplify()

    def _other_rows(self, width: int) -> list[int]:
        """Where the other file's live bytes are, its events stretched to the same width."""
        mine, provider = self.session.provider, self._other_file
        if provider is None or not provider.count:
            return []
        own, count = max(mine.count, 1), provider.count
        first, stop = self.start * count // own, max(self.stop * count // own, self.start * count // own + 1)
        return [self._row_of(size) for size in columns(provider, first, min(stop, count), width).high.tolist()]

    @property
    def _capacity_row(self) -> int | None:
        """Where the line of what the process could have is, if it is within the scale."""
        capacity = self.session.provider.capacity_bytes
        return None if capacity is None or capacity > self.top_bytes else self._row_of(capacity)

    def _row_of(self, size_bytes: int) -> int:
        return min(int(size_bytes / self.top_bytes * self.chart_height), self.chart_height - 1)

    def _label(self, row: int) -> str:
        if row == self._capacity_row:
            return " capacity "
        for tick in ticks(self.top_bytes, self.chart_height):
            if self._row_of(tick) == row:
                return f"{format_bytes(tick).replace('.00 ', ' ').replace('.0 ', ' '):>9}┤"
        return " " * 9 + "│"


# of the overlay's codes, in their order
_ROLES = dict(enumerate(("phase:unknown", "hue:0", "hue:1", "panel", "faded:hue|0", "faded:hue|1", "background")))
_LETTERS = dict(enumerate("▒12·-= "))


class Overlay(Cursored):
    """Live bytes of both recordings over shares of their events; first line legend, last line the cursors."""

    def draw_line(self, y: int) -> Strip:
        first, second = self.session.pair()
        width, height = self.size.width, max(self.size.height - 2, 1)
        a, b, cells, top = overlay(first, second, width, height)
        events = self.session.pair_events()
        if y == 0:
            spans: list[Span] = []
            for i, provider, event in zip((0, 1), (first, second), events, strict=True):
                live = format_bytes(provider.timeline.curve_at(event)[1])
                name = provider.source.rsplit("/", 1)[-1] if first is not second else ("A", "cursor")[i]
                spans += [(f" {i + 1 if self.look.plain else '█'} ", f"hue:{i}"), (clip(name, 28, True), "text"),
                          (f"  event {format_count(event)}, {live} live  ", "dim")]  # fmt: skip
            return self.look.spans([*spans, (f"  top {format_bytes(top)}", "dim")], width)
        if y == height + 1:
            marks: list[Span] = [("─", "dim")] * width
            for number, data in enumerate((a, b)):
                at = data.column_of(max(events[number], 0))
                if at is not None:
                    marks[at] = ("▲", f"hue:{number}")
            return self.look.spans(marks, width)
        segments = area(self.look, cells, height - y, _ROLES, _LETTERS)
        return Strip(segments).simplify().adjust_cell_length(width, self.look.style("text"))
