"""What reaches the terminal: the cells that changed since the last picture; ASCII where it can show nothing else."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from textual._compositor import CompositorUpdate
from textual.strip import Strip

Cell = tuple[str, Style | str | None]  # character and style; "" and the character for its second half, if it is wide
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
        self._rows: list[list[Cell]] = []
        self._strips: list[Strip] = []

    def forget(self) -> None:
        """Something else may have written there: draw everything the next time."""
        self._rows, self._strips = [], []

    def changes(self, strips: list[Strip], console: Console) -> str:
        """The sequence that turns what is on screen into ``strips``."""
        if len(strips) != len(self._rows):
            self._rows, self._strips = [[] for _ in strips], [Strip([]) for _ in strips]
        written: list[str] = []
        for y, strip in enumerate(strips):
            if strip == self._strips[y]:
                continue
            cells = self._cells(strip)
            for start, stop in _differing(self._rows[y], cells):
                written.append(f"\x1b[{y + 1};{start + 1}H")
                written += _written(cells[start:stop], console)
            self._rows[y], self._strips[y] = cells, strip
        return "".join(written)

    def _cells(self, strip: Strip) -> list[Cell]:
        cells: list[Cell] = []
        for text, style, control in strip:
            if control:
                continue
            shown = text.translate(ASCII) if self._is_ascii else text
            if shown.isascii():
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
    for x, cell in enumerate(new):
        if x < len(old) and old[x] == cell:
            continue
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
    """In place of Textual's own update of the screen."""

    def __init__(self, terminal: Terminal, strips: list[Strip]) -> None:
        self._terminal, self._strips = terminal, strips

    def render_segments(self, console: Console) -> str:
        return self._terminal.changes(self._strips, console)
