"""What stands around the timeline's area: the legend above it, phases, steps and the axis below."""

from __future__ import annotations

from collections.abc import Callable

from textual.strip import Strip

from memtrace.attribution.categories import Category
from memtrace.render.words import MARKS, clip
from memtrace.units import format_bytes, format_count
from memtrace_tui.data.buckets import Columns
from memtrace_tui.data.lines import Span as Text
from memtrace_tui.look import ScreenLook
from memtrace_tui.palette import PHASE_LETTERS
from memtrace_tui.provider import Provider, Span

AXIS = 10  # width of the labels at the left


def compact(size_bytes: int) -> str:
    """``4.09G``, ``198M``: three digits where there is no room for more."""
    number, unit = format_bytes(size_bytes).split()
    value = float(number)
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f}{unit[0] if unit != 'B' else ''}"


def legend(look: ScreenLook, provider: Provider, event: int, width: int) -> Strip:
    """The categories with their bytes at the cursor, from the same report as everywhere."""
    report = provider.report(event)
    is_short = width < 132
    parts: list[list[Text]] = []
    for category in Category:
        size = report.categories[str(category)]
        if category is Category.UNATTRIBUTED and not size:
            continue
        name = MARKS[category].short if is_short else str(category).replace("_", " ")
        mark = MARKS[category].letter if look.plain else "■"
        text = compact(size) if is_short else format_bytes(size)
        space = "" if is_short and not look.plain else " "
        parts.append([(mark + space, f"cat:{category}"), (f"{name} ", "text"), (text, "strong")])
    used = sum(len(text) for part in parts for text, _ in part)
    gap = "  " if used + 2 * len(parts) <= width else " "
    spans: list[Text] = [(" ", "text")]
    for part in parts:
        spans += [*part, (gap, "text")]
    return look.spans(spans[:-1], width)


def phase_band(look: ScreenLook, provider: Provider, data: Columns, width: int) -> Strip:
    """The phases in their colours, named where there is room."""
    segments = list(look.spans([("   phase  ", "dim")], AXIS))
    for span, cells in _runs(provider, data, lambda span: span.start):
        name = span.phase if cells >= len(span.phase) + 2 else PHASE_LETTERS[span.phase] if cells > 2 else ""
        text = f"{name:^{cells}}"
        if look.plain:
            text = f"{name or PHASE_LETTERS[span.phase]:·^{cells}}"[:cells]
        segments += list(look.spans([(text, "strong")], cells, f"phase:{span.phase}"))
    return Strip(segments).adjust_cell_length(width, look.style("text"))


def step_band(look: ScreenLook, provider: Provider, data: Columns, width: int) -> Strip:
    """The numbers of the steps, on alternating ground."""
    segments = list(look.spans([("    step  ", "dim")], AXIS))
    for span, cells in _runs(provider, data, lambda span: span.step):
        name = str(span.step) if span.step >= 0 else "load" if cells > 5 else ""
        shown = f"{name:^{cells}}" if len(name) < cells else " " * cells
        segments += list(look.spans([(shown, "text")], cells, "panel" if span.step % 2 else "surface"))
    return Strip(segments).adjust_cell_length(width, look.style("text"))


def _runs(provider: Provider, data: Columns, key: Callable[[Span], int]) -> list[tuple[Span, int]]:
    """(span, columns) for neighbouring columns whose spans have the same key."""
    spans = provider.spans
    runs: list[tuple[Span, int]] = []
    at = 0
    for first in data.start.tolist() if spans else ():
        while at + 1 < len(spans) and spans[at + 1].start <= first:
            at += 1
        if runs and key(runs[-1][0]) == key(spans[at]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((spans[at], 1))
    return runs


def axis_line(look: ScreenLook, provider: Provider, window: tuple[int, int], by_time: bool, width: int) -> Strip:
    """First and last event (or time) of the window, and how many events it has."""
    start, stop = window
    if by_time:
        left, right = f"+{provider.seconds(start) or 0:.3f} s", f"+{provider.seconds(stop - 1) or 0:.3f} s"
    else:
        left, right = format_count(start), format_count(stop - 1)
    room = max(width - AXIS, 1)
    middle = f"{format_count(stop - start)} events"
    axis, letters = f", {'time' if by_time else 'event'} axis", "  lower case: at times  ·: reserved"
    for more in (letters, axis) if look.plain else (axis,):  # without the letters the picture can't be read
        if len(left) + len(middle) + len(more) + len(right) + 4 <= room:
            middle += more
    text = f"{left}{middle:^{max(room - len(left) - len(right), 0)}}{right}"
    return look.spans([(" " * AXIS, "dim"), (clip(text, room), "dim")], width)
