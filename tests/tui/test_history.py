"""Who was here, who freed it: against the obvious way to find out. Places that people name. What the terminal gets."""

from __future__ import annotations

import ast
import io
import re
from itertools import accumulate
from pathlib import Path

import memtrace_tui
import numpy as np
import pytest
from browser_cases import TINY, hit, main_screen, open_app, recording, text_of, until
from hypothesis import given, settings
from hypothesis import strategies as st
from memtrace_tui.data.details import block_lines, freed_at, history_lines, origin, span_of
from memtrace_tui.palette import PALETTES
from memtrace_tui.terminal import ASCII, Terminal, speaks_utf8
from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.app import App
from textual.strip import Strip

from memtrace.errors import MemtraceError
from memtrace.history.layout import State
from memtrace.units import format_bytes

OOM = "llama2-7b_oom-first-step"


# -- tenants and holes


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_tenants_are_all_that_ever_overlapped_the_last_first(data: st.DataObject) -> None:
    provider = recording(TINY).provider()
    timeline = provider.timeline
    table = timeline.allocations
    start, stop = span_of(timeline, data.draw(st.integers(0, len(table) - 1)))
    found = provider.tenants(start, stop).tolist()
    spans = [span_of(timeline, row) for row in range(len(table))]
    assert sorted(found) == [row for row, (a, b) in enumerate(spans) if a < stop and start < b]
    births = [int(table.alloc_event[row]) for row in found]
    assert births == sorted(births, reverse=True)


@pytest.mark.parametrize("case", [TINY, OOM])
def test_a_hole_came_to_be_when_its_origin_says(case: str) -> None:
    """At the event that made it the hole is there, as large as now; just before that event it is not."""
    provider = recording(case).provider()
    layout = provider.layout(provider.start.event)
    holes = np.flatnonzero(layout.block_state == State.FREE)
    checked = split = freed = 0
    for block in holes[:: max(len(holes) // 25, 1)].tolist():
        found = origin(provider, layout, block)
        split += found.split >= 0
        freed += found.split < 0 <= found.last
        made = int(provider.timeline.allocations.alloc_event[found.split]) if found.split >= 0 else found.freed
        if made < 0:
            continue
        place = int(layout.block_address[block]), int(layout.block_bytes[block])
        after, before = provider.layout(made), provider.layout(made - 1)
        assert place in _holes(after), (block, found)
        assert place not in _holes(before), (block, found)
        checked += 1
    assert checked > 5 and split and freed


def _holes(layout: object) -> set[tuple[int, int]]:
    free = layout.block_state == State.FREE  # type: ignore[attr-defined]
    return set(zip(layout.block_address[free].tolist(), layout.block_bytes[free].tolist(), strict=True))  # type: ignore[attr-defined]


def test_a_hole_names_its_last_owner_and_the_stack_of_the_free() -> None:
    provider = recording(OOM).provider()
    layout, timeline = provider.layout(provider.start.event), provider.timeline
    hole = next(
        block for block in np.flatnonzero(layout.block_state == State.FREE).tolist()
        if origin(provider, layout, block).last >= 0
    )  # fmt: skip
    last = origin(provider, layout, hole).last
    lines = block_lines(provider, layout, hole, 100)
    text = "\n".join(line.plain for line in lines)
    assert "last was" in text and "freed by" in text and f"{freed_at(timeline, last):,}" in text
    stack = int(timeline.trace.stack[freed_at(timeline, last)])
    frames = set(timeline.snapshot.stacks.frame_ids(stack).tolist())
    assert frames & {getattr(line.target, "frame", None) for line in lines}
    start, stop = int(layout.block_address[hole]), int(layout.block_address[hole] + layout.block_bytes[hole])
    owners = [
        line for line in history_lines(provider, start, stop, layout.event, 100) if getattr(line.target, "view", "")
    ]
    assert len(owners) == min(len(provider.tenants(start, stop)), 400)


def test_owners_stand_apart_from_where_they_began() -> None:
    """However far before the range an owner began, a blank stands between the offset and its size."""
    provider = recording(OOM).provider()
    table = provider.timeline.allocations
    largest = int(table.block_bytes.argmax())
    stop = int(table.address[largest] + table.block_bytes[largest])
    rows = provider.tenants(stop - 512, stop).tolist()
    assert largest in rows
    lines = [line.plain for line in history_lines(provider, stop - 512, stop, provider.count, 100)]
    for row, place in zip(rows, lines[2::3], strict=False):
        offset = format_bytes(stop - 512 - int(table.address[row]))
        assert place.split() == [*f"-{offset} {format_bytes(int(table.block_bytes[row]))}".split(), *place.split()[4:]]


def test_owners_before_the_cursor_come_first_and_later_ones_behind_them() -> None:
    provider = recording(TINY).provider()
    timeline, event = provider.timeline, provider.count // 2
    born = timeline.allocations.alloc_event
    start, stop = next(
        span for row in range(len(born)) if len(found := born[provider.tenants(*(span := span_of(timeline, row)))]) > 8
        and (found > event).any() and (found <= event).any()
    )  # fmt: skip
    lines = history_lines(provider, start, stop, event, 100)
    border = next(i for i, line in enumerate(lines) if line.plain.startswith("after the cursor"))
    before, after = (
        [g.event for line in part if (g := line.target) is not None] for part in (lines[:border], lines[border:])
    )
    expected = sorted(max(int(each), 0) for each in born[provider.tenants(start, stop)])
    assert before == [each for each in reversed(expected) if each <= event]
    assert after == [each for each in expected if each > event]


# -- places


def test_one_grammar_of_places() -> None:
    provider = recording(TINY).provider()
    timeline, named = provider.timeline, provider.named
    spans = [span for span in provider.spans if span.step == 1]
    first, stop = spans[0].start, spans[-1].stop
    assert named("step 1") == named("start of step 1") == named("Step: 1") == first
    assert named("end of step 1") == stop - 1
    assert named("peak of step 1") == first + int(timeline.allocated_bytes[first:stop].argmax())
    assert named("reserved-peak of step 1") == first + int(timeline.reserved_bytes[first:stop].argmax())
    times = timeline.trace.time_us
    assert times is not None
    half = (int(times[-1]) - int(times[0])) / 2e6
    for text in (f"+{half:.6f}s", f"+{half * 1e3:.3f}ms"):
        event = named(text)
        assert (
            times[event] - times[0] <= half * 1e6 + 1 and times[min(event + 1, len(times) - 1)] - times[0] >= half * 1e6
        )
    assert named("+0s") >= 0 and named("+99999s") == provider.count - 1
    row = 57
    address = int(timeline.allocations.address[row])
    there = provider.tenants(address, address + 1).tolist()
    assert named(hex(address)) == max(int(timeline.allocations.alloc_event[r]) for r in there)
    for wrong in ("step 99", "peak of step", "0x0", "0xfffffffffffffffff", "+s", "+2h", "step -1", "peak of"):
        with pytest.raises(MemtraceError):
            named(wrong)


# -- the terminal


class Grid:
    """What a terminal shows after such sequences: text, and of each cell its colours and attributes."""

    def __init__(self, width: int, height: int) -> None:
        self.rows = [[" "] * width for _ in range(height)]
        self.looks = [[("", "", "")] * width for _ in range(height)]
        self.attributes, self.front, self.behind = "", "", ""

    def feed(self, sequence: str) -> None:
        x = y = 0
        sequence = re.sub("\x1b\\].*?\x07", "", sequence)  # the pointer's shape
        for move, column, pen, text in re.findall(r"\x1b\[(?:(\d+;\d+)H|(\d+)G|([\d;]*)m)|([^\x1b]+)", sequence):
            if move:
                y, x = (int(part) - 1 for part in move.split(";"))
            elif column:
                x = int(column) - 1
            elif not text:
                self._take(pen)
            for character in text:
                self.rows[y][x] = character
                self.looks[y][x] = self._look(character)
                if cell_len(character) == 2:
                    self.rows[y][x + 1], self.looks[y][x + 1] = "", self.looks[y][x]
                x += cell_len(character)

    def _take(self, pen: str) -> None:
        for code in re.findall(r"[34]8;2;\d+;\d+;\d+|\d+", pen or "0"):
            if code == "0":
                self.attributes = self.front = self.behind = ""
            elif code == "22":
                self.attributes = self.attributes.strip("12")
            elif code in ("39", "49") or re.match("[34][0-8]", code):
                colour = "" if code[1] == "9" else code[1:]
                self.front, self.behind = (colour, self.behind) if code[0] == "3" else (self.front, colour)
            else:
                self.attributes += code

    def _look(self, character: str) -> tuple[str, str, str]:
        """Bold, dim and the colour in front don't show on a blank."""
        seen = self.attributes.strip("12") if character == " " else self.attributes
        return seen, "" if character == " " and not seen else self.front, self.behind


texts = st.text("abc █▄界", min_size=1, max_size=6)
styles = st.sampled_from([
    None, Style(color="red"), Style(bgcolor="blue", bold=True), Style(color="#010203", bgcolor="#f0e0d0"),
    Style(color="#010203", dim=True), Style(color="green", bgcolor="blue", underline=True), Style(reverse=True),
])  # fmt: skip
rows = st.lists(st.tuples(texts, styles), max_size=6)


def pieces(strips: list[Strip], cut: int = 0) -> list[tuple[int, int, Strip]]:
    """Lines cut in two, as Textual hands them on where widgets lie side by side."""
    halves = [[(y, 0, strip.crop(0, cut)), (y, cut, strip.crop(cut))] for y, strip in enumerate(strips)]
    return [piece for line in halves for piece in line if piece[2].cell_length]


def letters(strip: Strip) -> list[tuple[str, Style | None]]:
    return [(character, style) for text, style, _ in strip for character in text]


@settings(deadline=None)
@given(st.lists(st.lists(rows, min_size=3, max_size=3), min_size=1, max_size=5), st.integers(0, 39))
def test_only_changes_are_sent_and_they_make_the_picture(
    pictures: list[list[list[tuple[str, Style | None]]]], cut: int
) -> None:
    console, width = Console(file=io.StringIO(), color_system="truecolor", force_terminal=True), 40
    terminal, grid = Terminal(False), Grid(width, 3)
    for picture in pictures:
        strips = [Strip([Segment(*part) for part in row]).adjust_cell_length(width) for row in picture]
        strips = [Strip.join([strip.crop(0, cut), strip.crop(cut)]) for strip in strips]  # a wide one may go with it
        grid.feed(terminal.changes(pieces(strips, cut), console))
        assert ["".join(row) for row in grid.rows] == [strip.text for strip in strips]
        plain = Grid(width, 3)  # each cell with its whole style
        for y, strip in enumerate(strips):
            for x, (text, style) in zip(accumulate(map(cell_len, strip.text), initial=0), letters(strip), strict=False):
                plain.feed(f"\x1b[m\x1b[{y + 1};{x + 1}H" + (style or Style()).render(text))
        assert grid.looks == plain.looks
        assert terminal.changes(pieces(strips), console) == ""
        one = [*strips[:2], Strip([*strips[2].crop(0, width - 1), Segment("!")])]
        sent = terminal.changes(pieces(one)[2:], console)  # what did not change need not be handed on
        grid.feed(sent)
        assert len(sent) < 30 and grid.rows[2][-1] == "!"


def test_of_a_style_only_what_changes_is_sent() -> None:
    """As on the map: one colour behind all cells, another in front of each, and blanks, which need none in front."""
    console = Console(file=io.StringIO(), color_system="truecolor", force_terminal=True)
    styles = [Style(color=front, bgcolor="#7d2b45") for front in ("#3fb68b", "#5b8ff0", "#e6d352")]
    cells = [("▄ "[x % 2], styles[x % 3]) for x in range(150)]
    sent = Terminal(False).changes([(0, 0, Strip([Segment(*cell) for cell in cells]))], console)
    assert len(sent) < 0.15 * sum(len(style.render(text)) for text, style in cells)


async def test_the_terminal_shows_what_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through all screens: what was sent, change by change, is the picture."""
    grid = Grid(120, 40)
    async with open_app("llama2-7b_oom-first-step", (120, 40)) as pilot:
        monkeypatch.setattr(App, "is_headless", False)
        monkeypatch.setattr(type(pilot.app._driver), "write", lambda self, data: grid.feed(data))
        keys = "2 left 3 right comma enter n escape 4 down down g escape 5 down i 6 down 8 up comma 1 question_mark"
        for key in (*keys.split(), "escape", "4", "slash", *"lora", "enter", "p", "1"):
            await hit(pilot, key)
            assert ["".join(row) for row in grid.rows] == text_of(pilot).split("\n"), key
        monkeypatch.undo()


async def test_a_key_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """New screens, too, whose widgets learn their sizes in between; and when the key is done, not some time later."""
    drawn: list[object] = []
    async with open_app("llama2-7b_oom-first-step", (120, 40)) as pilot:
        await until(lambda: main_screen(pilot).session.explanation is not None)
        await hit(pilot, "p")
        show = type(pilot.app)._display
        monkeypatch.setattr(
            type(pilot.app), "_display", lambda app, screen, what: drawn.append(what) or show(app, screen, what)
        )
        keys = "2 left 3 right enter n escape 4 down g 5 down 6 8 up 1"
        for number, key in enumerate(keys.split(), pilot.app._keys + 1):  # type: ignore[attr-defined]
            drawn.clear()
            pilot.app.post_message(events.Key(key, key if len(key) == 1 else None))
            await until(lambda number=number: pilot.app._keys == number and not pilot.app.is_busy)  # type: ignore
            assert len([each for each in drawn if each is not None]) == (key != "n"), key


def test_a_terminal_without_utf8_gets_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), color_system=None, force_terminal=True)
    strips = [Strip([Segment("▁▂▃▄▅▆▇█ │┃─╌ ▸▾ ◆◇▼ … · ⏎ ↑ × é")])]
    assert Terminal(True).changes(pieces(strips), console).removeprefix("\x1b[1;1H").replace("é", "").isascii()
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for value, expected in (
        ("", True),
        ("C", True),
        ("de_DE.UTF-8", True),
        ("de_DE.ISO-8859-1", False),
        ("C.utf8", True),
    ):
        monkeypatch.setenv("LANG", value)
        assert speaks_utf8() is expected, value
    assert all(len(plain) == 1 and plain.isascii() for plain in map(chr, map(ord, ASCII.values())))


# -- colours that can be read


@pytest.mark.parametrize("name", ["memtrace-dark", "memtrace-light"])
def test_two_themes_meet_wcag(name: str) -> None:
    """Contrast of 4.5 for text (WCAG 2.2, 1.4.3) and of 3 for what is drawn (1.4.11)."""
    palette = PALETTES[name]
    for role in ("text", "dim", "strong", "accent", "good", "warn", "bad"):
        for ground in ("background", "surface", "panel"):
            ratio = contrast(getattr(palette, role), getattr(palette, ground))
            assert ratio >= 4.5, f"{role} on {ground}: {ratio:.2f}"
    assert contrast(palette.strong, palette.select) >= 4.5
    assert contrast(palette.background, palette.bad) >= 4.5
    for category, colour in palette.category.items():
        assert contrast(colour, palette.background) >= 3, category


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_what_the_screens_are_drawn_with_has_a_plain_stand_in() -> None:
    drawn = {
        character
        for file in Path(memtrace_tui.__file__).parent.rglob("*.py") if file.name != "terminal.py"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for character in node.value
    }  # fmt: skip
    assert "█" in drawn and not {each for each in drawn if not each.isascii() and ord(each) not in ASCII}
