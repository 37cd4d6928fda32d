"""What every drawn widget has in common: guarded drawing, and lists of rows that only exist where they show."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

from textual import events
from textual.binding import Binding, BindingType
from textual.cache import LRUCache
from textual.strip import Strip
from textual.widget import Widget

from memtrace_tui.look import Look
from memtrace_tui.messages import Failed

if TYPE_CHECKING:
    from memtrace_tui.app import BrowseApp


class Drawn(Widget, can_focus=False):
    """A widget that draws whole lines. What goes wrong while drawing is reported, never fatal."""

    @property
    def look(self) -> Look:
        """The styles in use."""
        return cast("BrowseApp", self.app).look

    def render_line(self, y: int) -> Strip:
        """Textual's hook; see :meth:`draw_line`."""
        try:
            return self.draw_line(y)
        except Exception as error:
            self.post_message(Failed(error, type(self).__name__))
            return Strip.blank(self.size.width, self.look.style("text"))

    def draw_line(self, y: int) -> Strip:
        """Line ``y`` of the widget, ``self.size.width`` cells wide."""
        raise NotImplementedError

    def blank(self) -> Strip:
        """An empty line."""
        return Strip.blank(self.size.width, self.look.style("text"))


class Rows(Drawn, can_focus=True):
    """A list of ``row_count`` rows, any number, drawn from ``top`` on, with one selected and a scroll bar at the right.

    ``head`` lines stay at the top. Subclasses draw a row and say which rows can be selected.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "step(-1)", "Row up or down", show=False, key_display="↑↓ k j"),
        Binding("down,j", "step(1)", "Down", show=False),
        Binding("pageup,ctrl+b", "page(-1)", "Page up or down", show=False, key_display="pgup pgdn"),
        Binding("pagedown,ctrl+f", "page(1)", "Page down", show=False),
        Binding("home", "edge(-1)", "First or last row", show=False, key_display="home end"),
        Binding("end", "edge(1)", "Last row", show=False),
        Binding("enter", "open", "Open"),
    ]
    head = 0

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.row_count = 0
        self.selected = 0
        self.top = 0
        self._strips: LRUCache[tuple[object, ...], Strip] = LRUCache(1024)

    # -- for subclasses

    def draw_row(self, row: int, width: int, is_selected: bool) -> Strip:
        """One row, ``width`` cells wide."""
        raise NotImplementedError

    def draw_head(self, y: int, width: int) -> Strip:
        """A line that does not scroll."""
        raise NotImplementedError

    def can_select(self, row: int) -> bool:
        """Whether the selection may rest on a row."""
        return True

    def opened(self, row: int) -> None:
        """Enter, or a click on the selected row."""

    def selection_moved(self) -> None:
        """After the selection moved by key or mouse."""

    # -- state

    @property
    def page(self) -> int:
        """Rows that fit."""
        return max(self.size.height - self.head, 1)

    def reset(self, count: int, keep: bool = True) -> None:
        """New content. The place is kept as far as it exists."""
        self.row_count = count
        self._strips.clear()
        if not keep:
            self.selected = self.top = 0
        self.selected = max(min(self.selected, count - 1), 0)
        if count and not self.can_select(self.selected):
            self.selected = self._nearest(self.selected, 1)
        self.top = max(min(self.top, count - self.page), 0) if self.size.height else 0
        self.show_selected()
        self.refresh()

    def changed_look(self) -> None:
        """Other colours: draw everything again."""
        self._strips.clear()
        self.refresh()

    def select(self, row: int) -> None:
        """Select a row and scroll to it."""
        row = max(min(row, self.row_count - 1), 0)
        if row != self.selected:
            self.selected = row
            self.selection_moved()
        self.show_selected()
        self.refresh()

    def show_selected(self) -> None:
        """Scroll as little as needed; what can't be selected in front of the first choice stays in sight."""
        if not self.size.height:
            return
        if self.selected < self.top:
            self.top = self.selected
        elif self.selected >= self.top + self.page:
            self.top = self.selected - self.page + 1

    def _nearest(self, row: int, direction: int) -> int:
        """The first row from ``row`` on that can be selected; the present one if there is none."""
        while 0 <= row < self.row_count:
            if self.can_select(row):
                return row
            row += direction
        return self.selected

    # -- actions

    def action_step(self, by: int) -> None:
        """One row on; where nothing further can be selected, scroll."""
        target = self._nearest(self.selected + by, by)
        if target == self.selected:
            self.scroll_rows(by)
        else:
            self.select(target)

    def action_page(self, by: int) -> None:
        """A screen on."""
        target = self.selected + by * max(self.page - 1, 1)
        target = max(min(target, self.row_count - 1), 0)
        found = self._nearest(target, by)
        if found == self.selected:
            found = self._nearest(target, -by)
        if found == self.selected:
            self.scroll_rows(by * (self.page - 1))
        else:
            self.select(found)

    def action_edge(self, by: int) -> None:
        """The first or last row."""
        self.select(self._nearest(0, 1) if by < 0 else self._nearest(self.row_count - 1, -1))
        if not self.can_select(self.selected) or by < 0:
            self.scroll_rows(by * self.row_count)

    def action_open(self) -> None:
        """Enter."""
        if self.row_count and self.can_select(self.selected):
            self.opened(self.selected)

    def scroll_rows(self, by: int) -> None:
        """Scroll without moving the selection."""
        top = max(min(self.top + by, self.row_count - self.page), 0)
        if top != self.top:
            self.top = top
            self.refresh()

    # -- drawing and mouse

    def draw_line(self, y: int) -> Strip:
        width = self.size.width
        bar = self.row_count > self.page
        inner = width - 1 if bar else width
        if y < self.head:
            strip = self.draw_head(y, inner)
        else:
            row = self.top + y - self.head
            if row >= self.row_count:
                return self.blank()
            is_selected = row == self.selected and self.can_select(row)
            key = (row, inner, is_selected, self.has_focus)
            cached = self._strips.get(key)
            if cached is None:
                cached = self._strips[key] = self.draw_row(row, inner, is_selected)
            strip = cached
        return Strip([*strip, *self._scroll_mark(y)], width) if bar else strip

    def _scroll_mark(self, y: int) -> Strip:
        page = self.page
        thumb = max(page * page // max(self.row_count, 1), 1)
        first = self.head + round((page - thumb) * self.top / max(self.row_count - page, 1))
        inside = first <= y < first + thumb
        return self.look.spans([("┃" if inside else "│", "accent" if inside else "panel")], 1)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Wheel."""
        event.stop()
        self.scroll_rows(3)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Wheel."""
        event.stop()
        self.scroll_rows(-3)

    def on_click(self, event: events.Click) -> None:
        """Select; a second click opens; the scroll bar jumps."""
        event.stop()
        y = event.y - self.head
        if self.row_count > self.page and event.x >= self.size.width - 1:
            self.top = max(min(round(y / self.page * self.row_count - self.page / 2), self.row_count - self.page), 0)
            self.refresh()
            return
        if event.y < self.head:
            self.head_clicked(event.x)
            return
        row = self.top + y
        if row < self.row_count and self.can_select(row):
            if row == self.selected:
                self.opened(row)
            else:
                self.select(row)

    def head_clicked(self, x: int) -> None:
        """A click on the head."""

    def on_focus(self) -> None:
        """The selection shows more strongly in the focused list."""
        self.refresh()

    def on_blur(self) -> None:
        """See :meth:`on_focus`."""
        self.refresh()

    def on_resize(self) -> None:
        """Keep the selection on screen."""
        self.top = max(min(self.top, self.row_count - self.page), 0)
        self.show_selected()
        self.refresh()
