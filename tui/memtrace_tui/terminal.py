"""What reaches the terminal: the cells that changed since the last picture; ASCII where it can show nothing else."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import zip_longest
from operator import itemgetter
from typing import NamedTuple

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from textual._compositor import ChopsUpdate, CompositorUpdate, LayoutUpdate
from textual.strip import Strip

Cell = tuple[str, "Pen"]  # character and its pen; "" for its second half, if it is wide
Piece = tuple[int, int, Strip]  # row, column, and what is there
_NARROW = re.compile("[ -~\u00a0-\u02ff\u2190-\u21ff\u2500-\u25fc]*").fullmatch  # a cell each
_GAP = 6  # unchanged cells that are cheaper to write again than to jump over
_SAME = {
    "▁▂▃": "_", "▄▅": "-", "▆▇█▉▊▋▌▍▎▏━╸▐┃▀": "#", "▒": "%", "·⋯": ".", "…": "~", "│┤├┊▕": "|", "─╌╴": "-",
    "╭╮╰╯┌┐└┘┼┬┴": "+", "▸▶→↦": ">", "▾▼↓": "v", "◀←": "<", "▲↑◆◇": "^", "●■•": "*", "×": "x", "⏎": "=", "⌫": "<",
    "⇧": "^", "≥": ">", "↔": "-", "—–": "-", "±": "+",
}  # fmt: skip
ASCII = str.maketrans({character: plain for group, plain in _SAME.items() for character in group})


def speaks_utf8() -> bool:
    """Whether the terminal is said to show UTF-8: the locale's encoding, where it names one, and that of the stream."""
    named = next((value for name in ("LC_ALL", "LC_CTYPE", "LANG") if (value := os.environ.get(name))), "")
    encodings = [named.partition(".")[2].partition("@")[0], getattr(sys.__stderr__, "encoding", None) or ""]
    return all(each.lower().replace("-", "") in ("", "utf8") for each in encodings)


class Pen(NamedTuple):
    """What a terminal writes with: the parts of an SGR sequence. Blanks are written in any colour (""), and with any
    attributes that don't show on them."""

    attributes: str
    behind: str
    front: str


class PenRun(NamedTuple):
    """Cells of a row that are written with one pen."""

    pen: Pen
    y: int
    first: int
    stop: int
    text: str


_PLAIN = Pen("", "49", "39")
_UNKNOWN: Cell = ("", Pen("?", "", ""))
_UNSEEN_ON_BLANKS = ("", "1", "2")  # bold and dim


@lru_cache(4096)
def _pens(style: Style | None, colours: ColorSystem | None) -> tuple[Pen, Pen]:
    """For characters, and for blanks."""
    if style is None or colours is None:
        return _PLAIN, Pen("", "49", "")
    codes = [] if style.color is None else style.color.downgrade(colours).get_ansi_codes()
    codes_behind = [] if style.bgcolor is None else style.bgcolor.downgrade(colours).get_ansi_codes(False)
    attributes = style.without_color._make_ansi_codes(colours)
    pen = Pen(attributes, ";".join(codes_behind) or "49", ";".join(codes) or "39")
    return pen, Pen("", pen.behind, "") if attributes in _UNSEEN_ON_BLANKS else pen


class Terminal:
    """Remembers what is on screen. Textual repaints whole regions, which over a slow link is what a key waits for."""

    def __init__(self, is_ascii: bool) -> None:
        self._is_ascii = is_ascii
        self._rows: dict[int, list[Cell]] = {}

    def forget(self) -> None:
        """Something else may have written there: draw everything the next time."""
        self._rows.clear()

    def changes(self, pieces: Iterable[Piece], console: Console) -> str:
        """The sequence that shows pieces of lines where they are not on screen yet."""
        before: dict[int, list[Cell]] = {}
        for y, x, strip in pieces:
            if y not in before:
                before[y] = self._rows.get(y, [])
                self._rows[y] = before[y].copy()
            row, cells = self._rows[y], self._cells(strip, console._color_system)
            row += [_UNKNOWN] * (x - len(row))
            row[x : x + len(cells)] = cells
        runs = [run for y, old in before.items() if old != self._rows[y] for run in _runs(y, old, self._rows[y])]
        return "".join(_written(sorted(runs)))

    def _cells(self, strip: Strip, colours: ColorSystem | None) -> list[Cell]:
        cells: list[Cell] = []
        for text, style, control in strip:
            if control:
                continue
            pen, blank = _pens(style, colours)
            shown = text.translate(ASCII) if self._is_ascii else text
            if _NARROW(shown):
                cells += [(character, blank if character == " " else pen) for character in shown]
                continue
            for piece in _characters(shown):
                cells += [(piece, pen), *[("", pen)] * (cell_len(piece) - 1)]
        return cells


def _characters(text: str) -> list[str]:
    """The characters; what combines with the one before stays with it."""
    pieces: list[str] = []
    for character in text:
        if pieces and not cell_len(character):
            pieces[-1] += character
        else:
            pieces.append(character)
    return pieces


def _both(one: Pen, other: Pen) -> Pen | None:
    """The pen that writes what either of them does."""
    if one.behind == other.behind:
        for pen, rest in ((one, other), (other, one)):
            if pen == rest or (not rest.front and pen.attributes in _UNSEEN_ON_BLANKS):
                return pen
    return None


def _runs(y: int, before: list[Cell], row: list[Cell]) -> list[PenRun]:
    """The cells that differ, and unchanged ones between them where the gap is short and the pen the same."""
    found: list[tuple[int, int, Pen]] = []
    first = stop = 0
    pen: Pen | None = None
    for x, (old, cell) in enumerate(zip_longest(before, row)):
        if old == cell or not cell[0]:
            continue
        both = pen if x - stop <= _GAP else None
        if x > stop or cell[1] is not both:
            for _, other in row[stop : x + 1]:
                both = both and _both(both, other)
        if both is None:
            if pen is not None:
                found.append((first, stop, pen))
            first, both = x, cell[1]
        pen, stop = both, x + 1
    if pen is not None:
        found.append((first, stop, pen))
    return [PenRun(pen, y, first, stop, "".join(map(itemgetter(0), row[first:stop]))) for first, stop, pen in found]


def _written(runs: list[PenRun]) -> Iterator[str]:
    """Pen by pen, not row by row: another colour takes three times as many bytes as a move of the cursor."""
    now, at = _PLAIN, (-1, -1)
    for pen, y, first, stop, text in runs:
        if at != (y, first):
            yield f"\x1b[{first + 1}G" if at[0] == y else f"\x1b[{y + 1};{first + 1}H"
        at = y, stop
        if pen != now:
            codes, now = _change(now, pen)
            yield f"\x1b[{codes}m" if codes else ""
        yield text
    if now != _PLAIN:
        yield "\x1b[m"


def _change(old: Pen, pen: Pen) -> tuple[str, Pen]:
    """What has to change of a pen, and the one that is then held."""
    attributes, behind, front = pen
    codes = []
    if not front and old.attributes in _UNSEEN_ON_BLANKS:
        attributes, front = old.attributes, old.front
    if attributes != old.attributes:
        if attributes in _UNSEEN_ON_BLANKS and old.attributes in _UNSEEN_ON_BLANKS:
            codes = ["22" if old.attributes else "", attributes]
        else:
            codes, old = ["0", attributes.removesuffix(";")], _PLAIN
    codes += [new for new, was in ((behind, old.behind), (front, old.front)) if new != was]
    return ";".join(filter(None, codes)), Pen(attributes, behind, front or old.front)


class Changes(CompositorUpdate):
    """In place of Textual's own update of the screen, whose strips it has."""

    def __init__(self, terminal: Terminal, update: CompositorUpdate) -> None:
        self._terminal, self._update = terminal, update

    def _pieces(self) -> Iterator[Piece]:
        if isinstance(self._update, LayoutUpdate):
            for y, line in enumerate(self._update.strips, self._update.region.y):
                yield y, self._update.region.x, Strip.join(line)
        elif isinstance(self._update, ChopsUpdate):
            for y, first, stop in self._update.spans:  # beside these it has what lies behind, not what is to be seen
                for x, strip in self._update.chops[y].items():
                    if strip is not None and x < stop and x + strip.cell_length > first:
                        yield y, max(x, first), strip.crop(max(first - x, 0), stop - x)

    def render_segments(self, console: Console) -> str:
        return self._terminal.changes(self._pieces(), console)
