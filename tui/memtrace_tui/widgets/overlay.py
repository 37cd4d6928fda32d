"""Two timelines overlaid, each with its own cursor."""

from __future__ import annotations

from rich.segment import Segment
from textual.strip import Strip

from memtrace.render.words import clip
from memtrace.units import format_bytes, format_count
from memtrace_tui.data.buckets import Columns, Raster
from memtrace_tui.data.lines import Span
from memtrace_tui.data.overlay import BOTH, FIRST, HELD, HELD_FIRST, HELD_SECOND, NEITHER, SECOND, overlay
from memtrace_tui.session import Session
from memtrace_tui.widgets.base import Drawn

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_ROLES = {BOTH: "phase:unknown", FIRST: "hue:0", SECOND: "hue:1", HELD: "panel", HELD_FIRST: "faded:hue|0",
          HELD_SECOND: "faded:hue|1", NEITHER: "background"}  # fmt: skip
_LETTERS = {BOTH: "▒", FIRST: "1", SECOND: "2", HELD: "·", HELD_FIRST: "-", HELD_SECOND: "=", NEITHER: " "}


class Overlay(Drawn):
    """Live bytes of both recordings over shares of their events; first line legend, last line the cursors."""

    def __init__(self, session: Session) -> None:
        super().__init__(id="overlay")
        self.session = session
        self._cached: tuple[tuple[object, ...], tuple[Columns, Columns, Raster, int]] | None = None

    def draw_line(self, y: int) -> Strip:
        first, second = self.session.pair()
        width, height = self.size.width, max(self.size.height - 2, 1)
        key = (id(first), id(second), width, height)
        if self._cached is None or self._cached[0] != key:
            self._cached = (key, overlay(first, second, width, height))
        a, b, cells, top = self._cached[1]
        events = self.session.pair_events()
        if y == 0:
            spans: list[Span] = []
            for number, (provider, event, role) in enumerate(
                zip((first, second), events, ("hue:0", "hue:1"), strict=True), 1
            ):
                live = format_bytes(provider.timeline.curve_at(event)[1])
                name = provider.source.rsplit("/", 1)[-1] if first is not second else "A" if number == 1 else "cursor"
                spans += [(f" {number if self.look.plain else '█'} ", role), (clip(name, 28, True), "text"),
                          (f"  event {format_count(event)}, {live} live  ", "dim")]  # fmt: skip
            return self.look.spans([*spans, (f"  top {format_bytes(top)}", "dim")], width)
        if y == height + 1:
            marks: list[Span] = [("─", "dim")] * width
            for data, event, mark, role in ((a, events[0], "▲", "hue:0"), (b, events[1], "▲", "hue:1")):
                at = data.column_of(max(event, 0))
                if at is not None:
                    marks[at] = (mark, role)
            return self.look.spans(marks, width)
        row = height - y
        segments = []
        for below, above, part in zip(
            cells.under[row].tolist(), cells.over[row].tolist(), cells.eighths[row].tolist(), strict=True
        ):
            if self.look.plain:
                segments.append(Segment(_LETTERS[below if part >= 4 else above], self.look.style("text")))
            elif part == 8:
                segments.append(Segment(" ", self.look.style("text", _ROLES[below])))
            else:
                segments.append(Segment(_EIGHTHS[part], self.look.style(_ROLES[below], _ROLES[above])))
        return Strip(segments).simplify().adjust_cell_length(width, self.look.style("text"))
