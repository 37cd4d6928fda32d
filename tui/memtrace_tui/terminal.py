"""What reaches the terminal: the cells that changed since the last picture; ASCII where it can show nothing else."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby, zip_longest
from operator import itemgetter

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from textual._compositor import ChopsUpdate, CompositorUpdate, LayoutUpdate
from textual.strip import Strip

Cell = tuple[str, Style | str | None]  # character and style; "" and the character for its second half, if it is wide
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
        written: list[str] = []
        for y, line in groupby(pieces, key=itemgetter(0)):
            before = self._rows.get(y, [])
            row = self._rows[y] = before.copy()
            for _, x, strip in line:
                cells = self._cells(strip)
                row += [_UNKNOWN] * (x - len(row))
                row[x : x + len(cells)] = cells
            for first, stop in _differing(before, row):
                written.append(f"\x1b[{y + 1};{first + 1}H")
                written += _written(row[first:stop], console)
        return "".join(written)

    def _cells(self, strip: Strip) -> list[Cell]:
        cells: list[Cell] = []
        for text, style, control in strip:
            if control:
                continue
            shown = text.translate(ASCII) if self._is_ascii else text
            if _NARROW(shown):
                cells += [(character, style) for character in shown]
                continue
            for piece in _characters(shown):
                cells += [(piece, style), *[("", piece)] * (cell_len(piece) - 1)]
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


def _written(cells: list[Cell], console: Console) -> Iterator[str]:
    for style, group in groupby((cell for cell in cells if cell[0]), key=itemgetter(1)):
        run = "".join(map(itemgetter(0), group))
        yield style.render(run, color_system=console._color_system) if isinstance(style, Style) else run


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
