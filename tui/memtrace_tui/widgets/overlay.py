"""Two timelines overlaid, each with its own cursor."""

from __future__ import annotations

from rich.segment import Segment
from textual.strip import Strip

from memtrace.render.words import clip
from memtrace.units import format_bytes, format_count
from memtrace_tui.data.buckets import overlay
from memtrace_tui.data.lines import Span
from memtrace_tui.session import Session
from memtrace_tui.widgets.base import Drawn
from memtrace_tui.widgets.chart import EIGHTHS

# of the overlay's codes, in their order
_ROLES = ("phase:unknown", "hue:0", "hue:1", "panel", "faded:hue|0", "faded:hue|1", "background")
_LETTERS = "▒12·-= "


class Overlay(Drawn):
    """Live bytes of both recordings over shares of their events; first line legend, last line the cursors."""

    def __init__(self, session: Session) -> None:
        super().__init__(id="overlay")
        self.session = session

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
        segments = []
        parts = (each[height - y].tolist() for each in (cells.under, cells.over, cells.eighths))
        for below, above, part in zip(*parts, strict=True):
            if self.look.plain:
                segments.append(Segment(_LETTERS[below if part >= 4 else above], self.look.style("text")))
            elif part == 8:
                segments.append(Segment(" ", self.look.style("text", _ROLES[below])))
            else:
                segments.append(Segment(EIGHTHS[part], self.look.style(_ROLES[below], _ROLES[above])))
        return Strip(segments).simplify().adjust_cell_length(width, self.look.style("text"))
