"""What widgets have in common: keys, what they tell the application (they never act on each other), guarded drawing,
and lists of rows that only exist where they show."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from textual import events
from textual.binding import Binding
from textual.cache import LRUCache
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget

from memtrace_tui.data.lines import Goto, Line
from memtrace_tui.look import ScreenLook
from memtrace_tui.session import Session

EIGHTHS = " ▁▂▃▄▅▆▇█"


def keys(table: str) -> list[Any]:
    """Bindings, a row each: keys, action, description, what stands for the keys, a longer description.

    Columns are two blanks apart. The key bar leaves out what has ``-`` before its description. A row may be a pair:
    keys for back and for on a blank apart, ``±`` in the action, two descriptions, of which the bar shows the first.
    """
    made: list[Binding] = []
    for row in table.strip().split("\n"):
        names, action, text, *more = re.split("  +", row.strip())
        shown, tooltip = (*more, "", "")[:2]
        for number, (name, what) in enumerate(zip(names.split(), text.split(" / "), strict=True)):
            is_shown = number == 0 and what[0] != "-"
            does = action.replace("±", "-" if number == 0 else "")
            first = (shown or None, tooltip) if number == 0 else (None, "")
            made.append(Binding(name, does, what.removeprefix("-"), is_shown, first[0], tooltip=first[1]))
    return made


@dataclass
class MoveCursor(Message):
    """Put the shared cursor on an event."""

    event: int


@dataclass
class Open(Message):
    """Go where a line leads."""

    goto: Goto


@dataclass
class Failed(Message):
    """Something went wrong in a widget; the application shows it and goes on."""

    error: Exception
    where: str


class Changed(Message):
    """The filter or what is compared has changed: whoever shows it should draw again."""


class Drawn(Widget, can_focus=False):
    """A widget that draws whole lines. What goes wrong while drawing is reported, never fatal."""

    _place: object = None  # the size and scrolling for which lines are kept; None: none are
    _drawn: dict[int, Strip]

    @property
    def look(self) -> ScreenLook:
        """The application's styles."""
        return cast(ScreenLook, self.app.look)  # type: ignore[attr-defined]

    def render_line(self, y: int) -> Strip:
        """Textual's hook; see :meth:`draw_line`."""
        try:
            return self.draw_line(y)
        except Exception as error:
            self.app.post_message(Failed(error, type(self).__name__))
            return self.blank()

    def render_lines(self, crop: Region) -> list[Strip]:
        """Textual's hook: its lines have what the style sheet says around them, which costs as much as drawing them. It
        asks for whatever lies between two widgets that changed; what did not is kept."""
        if self.gutter.totals != (0, 0):
            return super().render_lines(crop)
        place = self.scrollable_content_region.size, self.scroll_offset
        if place != self._place:
            self._place, self._drawn = place, {}
        for y in crop.line_range:
            if y not in self._drawn:
                self._drawn[y] = self.render_line(y)
        strips = [self._drawn[y] for y in crop.line_range]
        return strips if crop.column_span == (0, self.size.width) else [each.crop(*crop.column_span) for each in strips]

    def _set_dirty(self, *regions: Region) -> None:
        super()._set_dirty(*regions)
        if not regions:
            self._place = None
        elif self._place is not None:
            for y in (y for region in regions for y in region.line_range):
                self._drawn.pop(y, None)

    def draw_line(self, y: int) -> Strip:
        """Line ``y`` of the widget, ``self.size.width`` cells wide."""
        raise NotImplementedError

    def blank(self) -> Strip:
        """An empty line."""
        return Strip.blank(self.size.width, self.look.style("text"))


class Cursored(Drawn, can_focus=False):
    """A widget over the state at the cursor. Where it is the recording from left to right (``event_at``), a click or a
    drag moves the cursor."""

    def __init__(self, session: Session) -> None:
        super().__init__(id=type(self).__name__.lower())
        self.session = session

    def event_at(self, x: int) -> int | None:
        """The event that a column stands for, if it does for one."""
        return None

    def wheel(self, by: int) -> None:
        """One notch of the wheel down (1) or up (-1)."""

    def on_click(self, event: events.MouseEvent) -> None:
        found = self.event_at(event.x) if self.session.provider.count else None
        if found is not None:
            self.post_message(MoveCursor(found))

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if event.button == 1:
            Cursored.on_click(self, event)

    def on_mouse_scroll_down(self) -> None:
        self.wheel(1)

    def on_mouse_scroll_up(self) -> None:
        self.wheel(-1)


class Rows(Drawn, ScrollView, can_focus=True):
    """A list of ``row_count`` rows, any number, with one selected. ``head`` (0 or 1) lines stay at the top.

    Subclasses draw a row and say which rows can be selected.
    """

    BINDINGS = keys("""
        up,k down,j                    step(±1)  -Row up or down / Down          ↑↓ k j
        pageup,ctrl+b pagedown,ctrl+f  page(±1)  -Page up or down / Page down    pgup pgdn
        home end                       edge(±1)  -First or last row / Last row   home end
        enter                          open      Open
    """)
    head = 0

    @dataclass
    class Opened(Message):
        """Enter on a row, or a click on the selected one."""

        row: int

    @dataclass
    class Moved(Message):
        """Another row is selected."""

        rows: Rows

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.row_count = 0
        self.selected = 0
        self._strips: LRUCache[tuple[object, ...], Strip] = LRUCache(1024)

    # -- for subclasses

    def draw_row(self, row: int, width: int, is_selected: bool) -> Strip:
        """One row, ``width`` cells wide."""
        raise NotImplementedError

    def draw_head(self, width: int) -> Strip:
        """The line that does not scroll."""
        raise NotImplementedError

    def can_select(self, row: int) -> bool:
        """Whether the selection may rest on a row."""
        return True

    def opened(self, row: int) -> None:
        """Enter, or a click on the selected row."""
        self.post_message(self.Opened(row))

    def head_clicked(self, x: int) -> None:
        """A click on the head."""

    # -- state

    @property
    def page(self) -> int:
        """Rows that fit."""
        return max(self.size.height - self.head, 1)

    @property
    def inner_width(self) -> int:
        """Cells of a row: without the scroll bar."""
        return self.scrollable_content_region.width

    def reset(self, count: int, keep: bool = True) -> None:
        """New content. The place is kept as far as it exists."""
        self.row_count = count
        self._strips.clear()
        if not keep:
            self.selected = 0
        self.selected = max(min(self.selected, count - 1), 0)
        if count and not self.can_select(self.selected):
            self.selected = self._nearest(self.selected, 1)
        size = Size(self.virtual_size.width, count + self.head)
        if size != self.virtual_size:  # without the layout of the whole screen that setting it would ask for
            self.set_reactive(Widget.virtual_size, size)
            self._scroll_update(size)
        if not keep:
            self.scroll_to(y=0, animate=False, force=True)
        self._settle()
        self.refresh()

    def _settle(self, centre: bool = False) -> None:
        """Keep the selection in sight, once there is one: what stands above the first row that can be selected is to be
        read, too."""
        if self.selected > self._nearest(0, 1):
            self.show_selected(centre)

    def select(self, row: int) -> None:
        row = max(min(row, self.row_count - 1), 0)
        if row != self.selected:
            before, self.selected = self.selected, row
            self.refresh_line(before + self.head)
            self.refresh_line(row + self.head)
            self.post_message(self.Moved(self))
        self.show_selected()

    def show_selected(self, centre: bool = False) -> None:
        """Scroll as little as needed, or so that the row comes to the middle."""
        top = round(self.scroll_y)
        if self.size.height and not top <= self.selected < top + self.page:
            above = self.page // 2 if centre else 0 if self.selected < top else self.page - 1
            self.scroll_to(y=self.selected - above, animate=False, force=True)

    def _nearest(self, row: int, by: int) -> int:
        """The first row from ``row`` on (``by`` above 0) or back that can be selected; the present one if none can."""
        rows = range(row, self.row_count) if by > 0 else range(row, -1, -1)
        return next(filter(self.can_select, rows), self.selected)

    # -- actions

    def action_step(self, by: int) -> None:
        """So many rows on; where nothing further can be selected, scroll."""
        target = max(min(self.selected + by, self.row_count - 1), 0)
        nearest = self._nearest(target, by), self._nearest(target, -by)
        found = next((row for row in nearest if row != self.selected), None)
        if found is None:
            self.scroll_relative(y=by, animate=False)
        else:
            self.select(found)

    def action_page(self, by: int) -> None:
        self.action_step(by * max(self.page - 1, 1))

    def action_edge(self, by: int) -> None:
        self.select(self._nearest(0, 1) if by < 0 else self._nearest(self.row_count - 1, -1))
        if not self.can_select(self.selected) or by < 0:
            self.scroll_to(y=0 if by < 0 else self.row_count, animate=False)

    def action_open(self) -> None:
        if self.row_count and self.can_select(self.selected):
            self.opened(self.selected)

    # -- drawing and mouse

    def draw_line(self, y: int) -> Strip:
        width = self.inner_width
        if y < self.head:
            return self.draw_head(width)
        row = self.scroll_offset.y + y - self.head
        if row >= self.row_count:
            return self.blank()
        is_selected = row == self.selected and self.can_select(row)
        key = (row, width, is_selected, self.has_focus, self.look)
        if key not in self._strips:
            self._strips[key] = self.draw_row(row, width, is_selected)
        return self._strips[key]

    def on_click(self, event: events.Click) -> None:
        event.stop()
        at = event.get_content_offset(self)
        if at is None:
            return
        row = self.scroll_offset.y + at.y - self.head
        if at.y < self.head:
            self.head_clicked(at.x)
        elif row < self.row_count and self.can_select(row):
            (self.opened if row == self.selected else self.select)(row)

    def on_resize(self) -> None:
        self._settle(centre=True)


class Lines(Rows):
    """Lines; those with a target can be selected and opened."""

    lines: Sequence[Line] = ()

    def show(self, lines: Sequence[Line], keep: bool = True) -> None:
        """Other lines; as many as before are compared, and only those that changed are drawn again."""
        before, self.lines = self.lines, lines
        if not keep or len(before) != len(lines) or not self.can_select(self.selected):
            self.reset(len(lines), keep)
            return
        self._strips.clear()
        for row, (one, other) in enumerate(zip(before, lines, strict=True)):
            if one != other:
                self.refresh_line(row)

    @property
    def text(self) -> str:
        """Everything as plain text."""
        return "\n".join(each.plain.rstrip() for each in self.lines)

    def can_select(self, row: int) -> bool:
        return 0 <= row < len(self.lines) and self.lines[row].target is not None

    def draw_row(self, row: int, width: int, is_selected: bool) -> Strip:
        behind = "select" if is_selected and self.has_focus else "background"
        return self.look.spans(self.lines[row].spans, width, behind)

    def opened(self, row: int) -> None:
        target = self.lines[row].target
        self.post_message(Open(target) if isinstance(target, Goto) else self.Opened(row))
