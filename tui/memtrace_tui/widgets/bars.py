"""The lines every screen has: where the cursor is, the filter while it is written, the whole recording, the keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from rich.segment import Segment
from textual import events
from textual.message import Message
from textual.strip import Strip
from textual.widgets import Input

from memtrace.render.words import clip
from memtrace.units import format_bytes, format_count
from memtrace_tui.data.buckets import skyline
from memtrace_tui.data.details import moment_text
from memtrace_tui.data.lines import Span
from memtrace_tui.look import ScreenLook
from memtrace_tui.provider import Provider
from memtrace_tui.widgets.base import EIGHTHS, Cursored, Drawn, keys


class Cursor(Cursored):
    """Where the cursor is and what the curves say there."""

    _complaint = ""

    def complain(self, text: str) -> None:
        """Say what is wrong with the filter instead, or nothing any more."""
        self._complaint = text
        self.refresh()

    def draw_line(self, y: int) -> Strip:
        if self._complaint and y == 0:
            return self.look.spans([(f" {self._complaint}", "bad")], self.size.width, "surface")
        return self._what() if y == 0 and self.size.height > 1 else self._where()

    def _what(self) -> Strip:
        """Which file, device, mark and filter the screen shows."""
        session, width = self.session, self.size.width
        spans: list[Span] = [(f"  {session.provider.timeline.device_name}", "dim")]
        if session.other is not None:
            spans.append((f"  file {2 if session.swapped else 1} of 2", "accent"))
        elif session.mark is not None:
            spans += [("  A ", "key"), (f"event {format_count(session.mark)}", "accent")]
        if session.filter:
            stack_too = "  (stack, too)" if any(term.field == "any" for term in session.terms) else ""
            spans += [("  filter ", "dim"), (session.filter, "accent"), (stack_too, "dim")]
        name = clip(session.provider.source, max(width - _cells(spans) - 1, 20), keep_end=True)
        return self.look.spans([(f" {name}", "text"), *spans], width)

    def _where(self) -> Strip:
        provider, event, width = self.session.provider, self.session.event, self.size.width
        kind = provider.at(event).kind.upper().replace("-", " ")
        _, allocated, reserved = provider.timeline.curve_at(event)
        seconds = provider.seconds(event)
        where = format_count(event) if event >= 0 else "before the trace"
        last = f"/{format_count(max(provider.count - 1, 0))}" if event >= 0 else ""
        left: list[Span] = [
            (" ▶ " if self.session.playing > 0 else " ◀ " if self.session.playing < 0 else " ● ", "accent"),
            (where, "strong"), (last, "strong"), ("  " + moment_text(provider, event), "text"),
        ]  # fmt: skip
        if kind != "EVENT":
            left += [("  ", "text"), (f" {kind} ", "alarm" if kind == "OOM" else "key")]
        right: list[Span] = [
            ("allocated ", "dim"), (format_bytes(allocated), "strong"), ("  reserved ", "dim"),
            (format_bytes(reserved), "strong"), (" ", "text"),
        ]  # fmt: skip
        if _cells(left + right) >= width:
            right[0], right[2] = ("alloc. ", "dim"), ("  res. ", "dim")
        if _cells(left + right) >= width:
            del left[2]  # the number of events is the easiest to do without
        clock: list[Span] = [] if seconds is None else [(f"  +{seconds:.3f} s", "dim")]
        if _cells(left + clock + right) + 2 <= width:
            left += clock
        gap = max(width - _cells(left + right), 1)
        return self.look.spans([*left, (" " * gap, "text"), *right], width, "surface")


def _cells(spans: list[Span]) -> int:
    return sum(len(text) for text, _ in spans)


@lru_cache(4)
def _whole(look: ScreenLook, provider: Provider, width: int) -> list[Segment]:
    """The recording in one line, without the cursor."""
    first, highest, high = skyline(provider, width)
    eighths = np.maximum(np.rint(high / max(int(high.max()), 1) * 8).astype(np.int64), 1).tolist()
    ooms = set((np.searchsorted(first, provider.ooms[:200], side="right") - 1).tolist())
    starts = np.array([span.start for span in provider.spans])
    phases = (np.searchsorted(starts, highest, side="right") - 1).tolist()
    roles = ("bad" if x in ooms else f"phase:{provider.spans[phases[x]].phase}" if len(starts) else "text"
             for x in range(width))  # fmt: skip
    return [Segment(EIGHTHS[part], look.style(role, "surface")) for part, role in zip(eighths, roles, strict=True)]


class Scrubber(Cursored):
    """The whole recording in one line: height is allocated bytes, colour is the phase. A click moves the cursor."""

    def draw_line(self, y: int) -> Strip:
        provider, width = self.session.provider, self.size.width
        if not provider.count or not width:
            return self.look.spans([(" no events", "dim")], width, "surface")
        cells, first = _whole(self.look, provider, width), skyline(provider, width)[0]
        x = int(np.searchsorted(first, max(self.session.event, 0), side="right")) - 1
        here = Segment("┃" if self.look.plain else cells[x].text, self.look.style("strong", "select"))
        return Strip([*cells[:x], here, *cells[x + 1 :]], width)

    def event_at(self, x: int) -> int:
        _, highest, _ = skyline(self.session.provider, self.size.width)
        return int(highest[max(min(x, len(highest) - 1), 0)])


class TabBar(Drawn):
    """The screens by key and title, the present one marked; a click shows one.

    Textual's Tabs is ten widgets, whose styles and hidden underline cost a third of every change of the screen.
    """

    def __init__(self, titles: Mapping[str, str]) -> None:
        super().__init__(id="tabs")
        self._long, self.current = titles, ""

    def _titles(self) -> dict[str, str]:
        """Short where long ones don't fit; where that is too much, too, only the present one has its own."""
        short = {name: title.replace("Allocations", "Allocs").replace("Findings", "Finds")
                 for name, title in self._long.items()}  # fmt: skip
        fits = (dict(each) for each in (self._long, short) if len(" ".join(each.values())) < self.size.width)
        return next(fits, {name: title if name == self.current else title[0] for name, title in short.items()})

    def draw_line(self, y: int) -> Strip:
        parts = [
            self.look.spans([(f"{title} ", "strong" if name == self.current else "text")], len(title) + 1,
                            "select" if name == self.current else "panel")
            for name, title in self._titles().items()
        ]  # fmt: skip
        return Strip.join(parts).adjust_cell_length(self.size.width, self.look.style("text", "panel"))

    def on_click(self, event: events.Click) -> None:
        keys = [title[0] for title in self._titles().values() for _ in f"{title} "]
        if event.x < len(keys):
            self.app.simulate_key(keys[event.x])


class KeyBar(Drawn):
    """The keys that work here, most specific first, then help and quit; a click presses one.

    Textual's Footer mounts a widget for each of them whenever the focus moves, which doubled the work of a key.
    """

    def __init__(self) -> None:
        super().__init__(id="keys")
        self._ends: list[tuple[int, str]] = []

    def draw_line(self, y: int) -> Strip:
        shown = {b.description: b for _, b, enabled, _ in self.screen.active_bindings.values() if b.show and enabled}
        items = [(self.app.get_key_display(b), b.description, b.key) for b in shown.values()]
        room = self.size.width - len(" ?  Help  q  Quit ")
        spans: list[Span] = []
        used, self._ends = 0, []
        for name, description, key in [*items, ("?", "Help", "question_mark"), ("q", "Quit", "q")]:
            size = len(name) + len(description) + 3
            if used + size <= room or key in ("question_mark", "q"):
                spans += [(f" {name} ", "key"), (f"{description} ", "text")]
                used += size
                self._ends.append((used, key))
        return self.look.spans(spans, self.size.width, "panel")

    def on_click(self, event: events.Click) -> None:
        key = next((key for end, key in self._ends if event.x < end), None)
        if key is not None:
            self.app.simulate_key(key.partition(",")[0])


class FilterBar(Input):
    """Enter keeps what was written, Escape takes it back."""

    BINDINGS = keys("""
        escape  cancel  Cancel
        enter   submit  Apply
    """)

    @dataclass
    class Closed(Message):
        """The line is hidden again; ``is_kept``: by Enter."""

        is_kept: bool

    def __init__(self) -> None:
        super().__init__(placeholder="filter: category:runtime  size>1MiB  -step:0  word or /regex/ (stack, too)",
                         compact=True)  # fmt: skip
        self.display = False
        self._before = ""

    def begin(self, text: str) -> None:
        """Show the line with a text to change."""
        self._before = text
        with self.prevent(Input.Changed):
            self.value = text
        self.display = True
        self.screen.set_focus(self)  # at once: keys typed ahead are for this line

    def _close(self, is_kept: bool) -> None:
        self.display = False
        self.remove_class("-wrong")
        self.post_message(self.Closed(is_kept))

    def action_cancel(self) -> None:
        self.value = self._before
        self._close(False)

    async def action_submit(self) -> None:
        self._close(True)
