"""What reaches the terminal: the cells that changed since the last picture; ASCII where it can show nothing else."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import groupby, zip_longest
from operator import itemgetter
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from textual._compositor import ChopsUpdate, CompositorUpdate, LayoutUpdate
from textual.strip import Strip

Cell = tuple[str, Any]  # character and its pen; "" and the character for its second half, if it is wide
Piece = tuple[int, int, Strip]  # row, column, and what is there
_NARROW = re.compile("[ -~\u00a0-\u02ff\u2190-\u21ff\u2500-\u25fc]*").fullmatch  # a cell each
_UNKNOWN: Cell = ("", "?")
_GAP = 6  # unchanged cells that are cheaper to write again than to jump over
_SAME = {
    "▁▂▃": "_", "▄▅": "-", "▆▇█▉▊▋▌▍▎▏━╸▐┃▀": "#", "▒": "%", "·⋯": ".", "…": "~", "│┤├┊▕": "|", "─╌╴": "-",
    "╭╮╰╯┌┐└┘┼┬┴": "+", "▸▶→↦": ">", "▾▼↓": "v", "◀←": "<", "▲↑◆◇": "^", "●■": "*", "×": "x", "⏎": "=", "⌫": "<",
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
    front: str
    behind: str


_PLAIN = Pen("", "39", "49")
_UNSEEN_ON_BLANKS = ("", "1", "2")  # bold and dim


@lru_cache(4096)
def _pens(style: Style | None, colours: ColorSystem | None) -> tuple[Pen, Pen]:
    """For characters, and for blanks."""
    if style is None or colours is None:
        return _PLAIN, Pen("", "", "49")
    codes = [] if style.color is None else style.color.downgrade(colours).get_ansi_codes()
    codes_behind = [] if style.bgcolor is None else style.bgcolor.downgrade(colours).get_ansi_codes(False)
    attributes = style.without_color._make_ansi_codes(colours)
    pen = Pen(attributes, ";".join(codes) or "39", ";".join(codes_behind) or "49")
    return pen, Pen("", "", pen.behind) if attributes in _UNSEEN_ON_BLANKS else pen


class Terminal:
    """Remembers what is on screen. Textual repaints whole regions, which over a slow link is what a key waits for."""

    def __init__(self, is_ascii: bool) -> None:
        self._is_ascii = is_ascii
        self._rows: dict[int, list[Cell]] = {}
        self._pen = _PLAIN

    def forget(self) -> None:
        """Something else may have written there: draw everything the next time."""
        self._rows.clear()

    def changes(self, pieces: Iterable[Piece], console: Console) -> str:
        """The sequence that shows pieces of lines where they are not on screen yet."""
        written: list[str] = []
        for y, line in groupby(pieces, key=itemgetter(0)):
            before = self._rows.get(y, [])
            row = self._rows[y] = before.copy()
            for _, x, strip in line:
                cells = self._cells(strip, console._color_system)
                row += [_UNKNOWN] * (x - len(row))
                row[x : x + len(cells)] = cells
            for number, (first, stop) in enumerate(_differing(before, row)):
                written.append(f"\x1b[{first + 1}G" if number else f"\x1b[{y + 1};{first + 1}H")
                written += self._written(row[first:stop])
        if self._pen != _PLAIN:
            self._pen = _PLAIN
            written.append("\x1b[m")
        return "".join(written)

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
                cells += [(piece, pen), *[("", piece)] * (cell_len(piece) - 1)]
        return cells

    def _written(self, cells: list[Cell]) -> Iterator[str]:
        """The cells, and before each run of one style what has to change of the last one."""
        for pen, group in groupby((cell for cell in cells if cell[0]), key=itemgetter(1)):
            attributes, front, behind = pen
            old, codes = self._pen, ""
            if not front and old.attributes in _UNSEEN_ON_BLANKS:
                attributes, front = old.attributes, old.front
            if attributes != old.attributes:
                if attributes in _UNSEEN_ON_BLANKS and old.attributes in _UNSEEN_ON_BLANKS:
                    codes = f"22;{attributes}"
                else:
                    codes, old = f"0;{attributes}", _PLAIN
            colours = (new for new, was in ((front, old.front), (behind, old.behind)) if new and new != was)
            codes = ";".join(filter(None, (codes.removesuffix(";"), *colours)))
            self._pen = Pen(attributes, front or old.front, behind)
            if codes:
                yield f"\x1b[{codes}m"
            yield from map(itemgetter(0), group)


def _characters(text: str) -> list[str]:
    """The characters; what combines with the one before stays with it."""
    pieces: list[str] = []
    for character in text:
        if pieces and not cell_len(character):
            pieces[-1] += character
        else:
            pieces.append(character)
    return pieces


def _differing(old: list[Cell], new: list[Cell]) -> list[tuple[int, int]]:
    """Ranges of cells to write: those that differ, joined where the gap is short."""
    ranges: list[tuple[int, int]] = []
    cells = () if old == new else enumerate(zip_longest(old, new))
    for x in [x for x, (one, other) in cells if one != other]:
        if ranges and x - ranges[-1][1] <= _GAP:
            ranges[-1] = (ranges[-1][0], x + 1)
        else:
            ranges.append((x, x + 1))
    return ranges


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
