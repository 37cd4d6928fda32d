"""The four lines every screen has: the screens, the cursor, the whole recording in one line, and the keys."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from textual import events
from textual.strip import Strip

from memtrace.units import format_bytes, format_count
from memtrace_tui.data.buckets import I8, skyline
from memtrace_tui.data.details import moment_text
from memtrace_tui.data.lines import Span, clip
from memtrace_tui.messages import MoveCursor
from memtrace_tui.session import Session
from memtrace_tui.widgets.base import Drawn

SHORT = {"Allocations": "Allocs", "Overview": "Overview", "Findings": "Finds"}
KINDS = {"oom": "OOM", "peak": "PEAK", "reserved-peak": "RESERVED PEAK", "end": "END", "event": ""}


class Tabs(Drawn):
    """The screens by number; the present one stands out. A click changes it."""

    def __init__(self, names: list[tuple[str, str, str]]) -> None:
        super().__init__(id="tabs")
        self.names = names  # (key, view, title)
        self.current = ""
        self._ends: list[tuple[int, str]] = []

    def show(self, view: str) -> None:
        """The present screen."""
        self.current = view
        self.refresh()

    def draw_line(self, y: int) -> Strip:
        width = self.size.width
        full = sum(len(title) + 4 for _, _, title in self.names)
        brand = " memtrace "
        spans: list[Span] = [(brand, "title")] if full + len(brand) <= width else []
        used = sum(len(text) for text, _ in spans)
        short = full + used > width
        segments = list(self.look.spans(spans, used, "panel"))
        self._ends = []
        for key, view, title in self.names:
            text = SHORT.get(title, title) if short and view != self.current else title
            behind = "select" if view == self.current else "panel"
            piece = [(f" {key} ", "key"), (f"{text} ", "strong" if view == self.current else "text")]
            size = sum(len(part) for part, _ in piece)
            segments += list(self.look.spans(piece, size, behind))
            used += size
            self._ends.append((used, view))
        return Strip(segments).adjust_cell_length(width, self.look.style("text", "panel"))

    async def on_click(self, event: events.Click) -> None:
        """Change the screen."""
        for end, view in self._ends:
            if event.x < end:
                await self.screen.run_action(f"view('{view}')")
                return


class CursorLine(Drawn):
    """Where the cursor is and what the curves say there."""

    def __init__(self, session: Session) -> None:
        super().__init__(id="cursor")
        self.session = session
        self.playing = 0

    def draw_line(self, y: int) -> Strip:
        provider, event, width = self.session.provider, self.session.event, self.size.width
        kind = KINDS[provider.at(event).kind]
        _, allocated, reserved = provider.timeline.curve_at(event)
        seconds = provider.seconds(event)
        where = format_count(event) if event >= 0 else "before the trace"
        last = f"/{format_count(max(provider.count - 1, 0))}" if event >= 0 else ""
        left: list[Span] = [
            (" ▶ " if self.playing > 0 else " ◀ " if self.playing < 0 else " ● ", "accent"),
            (where, "strong"), (last, "strong"), ("  " + moment_text(provider, event), "text"),
        ]  # fmt: skip
        if kind:
            left += [("  ", "text"), (f" {kind} ", "alarm" if kind == "OOM" else "key")]
        right: list[Span] = [
            ("allocated ", "dim"), (format_bytes(allocated), "strong"), ("  reserved ", "dim"),
            (format_bytes(reserved), "strong"), (" ", "text"),
        ]  # fmt: skip
        if sum(len(text) for text, _ in left + right) >= width:
            right[0], right[2] = ("alloc. ", "dim"), ("  res. ", "dim")
        if sum(len(text) for text, _ in left + right) >= width:
            del left[2]  # the number of events is the easiest to do without
        name = provider.source.rsplit("/", 1)[-1]
        extra: list[list[Span]] = [
            [(f"  +{seconds:.3f} s", "dim")] if seconds is not None else [],
            [(f"  GPU {provider.device}", "dim")],
            [("  " + clip(name, 40), "dim")],
        ]
        used = sum(len(text) for text, _ in left + right)
        for more in extra:
            size = sum(len(text) for text, _ in more)
            if used + size + 2 <= width:
                left += more
                used += size
        gap = max(width - used, 1)
        return self.look.spans([*left, (" " * gap, "text"), *right], width, "surface")


class Scrubber(Drawn):
    """The whole recording in one line: height is allocated bytes, colour is the phase. A click moves the cursor."""

    _LEVELS = " ▁▂▃▄▅▆▇█"

    def __init__(self, session: Session) -> None:
        super().__init__(id="scrubber")
        self.session = session
        self._cached: tuple[tuple[int, int], tuple[I8, I8, I8]] | None = None

    def _columns(self, width: int) -> tuple[I8, I8, I8]:
        key = (width, id(self.session.provider))
        if self._cached is None or self._cached[0] != key:
            self._cached = (key, skyline(self.session.provider, width))
        return self._cached[1]

    def draw_line(self, y: int) -> Strip:
        provider, width = self.session.provider, self.size.width
        if not provider.count or not width:
            return self.look.spans([(" no events", "dim")], width, "surface")
        first, highest, high = self._columns(width)
        top = max(int(high.max()), 1)
        here = int(np.searchsorted(first, max(self.session.event, 0), side="right")) - 1
        ooms = set((np.searchsorted(first, provider.ooms[:200], side="right") - 1).tolist())
        spans = provider.spans
        phase = 0
        segments = []
        for i in range(width):
            while phase + 1 < len(spans) and spans[phase + 1].start <= int(highest[i]):
                phase += 1
            role = f"phase:{spans[phase].phase}" if spans else "text"
            glyph = self._LEVELS[max(round(int(high[i]) / top * 8), 1)]
            if i == here:
                segments += list(self.look.spans([("┃" if self.look.plain else glyph, "strong")], 1, "select"))
                continue
            if i in ooms:
                role = "bad"
            segments += list(self.look.spans([(glyph, role)], 1, "surface"))
        return Strip(segments, width)

    def on_click(self, event: events.Click) -> None:
        """Move the cursor to where the click is."""
        self._go(event.x)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        """Drag the cursor."""
        if event.button == 1:
            self._go(event.x)

    def _go(self, x: int) -> None:
        if self.session.provider.count:
            _, highest, _ = self._columns(self.size.width)
            self.post_message(MoveCursor(int(highest[max(min(x, len(highest) - 1), 0)])))


class KeyBar(Drawn):
    """The keys that work here, most specific first; a click presses one."""

    DISPLAY: ClassVar[dict[str, str]] = {
        "enter": "⏎", "escape": "esc", "left": "←", "right": "→", "up": "↑", "down": "↓", "space": "space",
        "question_mark": "?", "slash": "/", "comma": ",", "full_stop": ".", "left_square_bracket": "[",
        "right_square_bracket": "]", "plus": "+", "minus": "-", "less_than_sign": "<", "greater_than_sign": ">",
        "equals_sign": "=", "left_curly_bracket": "{", "right_curly_bracket": "}", "left_parenthesis": "(",
        "right_parenthesis": ")", "shift+left": "⇧←", "shift+right": "⇧→", "backspace": "⌫", "ctrl+p": "^p",
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__(id="keys")
        self._ends: list[tuple[int, str]] = []

    @classmethod
    def name_of(cls, key: str) -> str:
        """A key as people write it."""
        return cls.DISPLAY.get(key, key.replace("ctrl+", "^"))

    def draw_line(self, y: int) -> Strip:
        width = self.size.width
        items: list[tuple[str, str, str]] = []
        seen: set[str] = set()
        for key, active in self.screen.active_bindings.items():
            binding = active.binding
            if binding.show and binding.description not in seen:
                seen.add(binding.description)
                items.append((binding.key_display or self.name_of(key), binding.description, key))
        tail = [item for item in items if item[2] in ("question_mark", "q")]
        items = [item for item in items if item not in tail]
        room = width - sum(len(k) + len(d) + 3 for k, d, _ in tail)
        segments = []
        used = 0
        self._ends = []
        for group, limit in ((items, room), (tail, width)):
            for name, description, key in group:
                size = len(name) + len(description) + 3
                if used + size > limit:
                    continue
                segments += list(self.look.spans([(f" {name} ", "key"), (f"{description} ", "text")], size, "panel"))
                used += size
                self._ends.append((used, key))
        return Strip(segments).adjust_cell_length(width, self.look.style("text", "panel"))

    def on_click(self, event: events.Click) -> None:
        """Press the key."""
        for end, key in self._ends:
            if event.x < end:
                self.app.simulate_key(key)
                return
