"""What the text renderers share: lines of styled pieces, a console that suits the output, headings, columns.

Renderers return lines (:class:`Text`); only verbs print. Colour disappears with NO_COLOR or in a pipe.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from memtrace.units import format_bytes, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text as Rich

_WORD = re.compile(r"\s*\S+(?: [KMGT]?i?B\b\S*)?")  # a size keeps its unit
_ASKED_FOR = ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE")  # what makes rich write into a pipe as to a terminal
_WIDTH = 100  # of a pipe, so that it doesn't wrap oddly


class Text:
    """A line: pieces of text with a style each, in rich's words. rich takes long to load and is left to terminals."""

    def __init__(self, text: str = "", style: str = "") -> None:
        self.pieces = [(text, style)]

    @classmethod
    def assemble(cls, *parts: str | tuple[str, str] | Text) -> Text:
        """A line out of texts, texts with their style, and lines."""
        line = cls()
        for part in parts:
            line.pieces += part.pieces if isinstance(part, Text) else [(part, "") if isinstance(part, str) else part]
        return line

    def append(self, text: str, style: str = "") -> None:
        """Add a piece at the end."""
        self.pieces.append((text, style))

    @property
    def plain(self) -> str:
        """The text alone."""
        return "".join(text for text, _ in self.pieces)

    def __str__(self) -> str:
        return self.plain


def _is_plain() -> bool:
    return not (sys.stdout.isatty() or any(name in os.environ for name in _ASKED_FOR))


def width() -> int:
    """Columns of the terminal, or $COLUMNS; else 100."""
    return _WIDTH if _is_plain() else _console().width


def _console() -> Console:
    from rich.console import Console

    class Quiet(Console):
        def on_broken_pipe(self) -> None:
            """Leave it to the command, whose exit code is not rich's."""
            raise BrokenPipeError

    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Quiet(file=sys.stdout, width=None if known else _WIDTH, highlight=False, soft_wrap=True)


def heading(title: str) -> Text:
    """A section's title."""
    return Text(title, style="bold")


def warning_lines(warnings: Iterable[str]) -> list[Text]:
    """Warnings, one a line, last in every output."""
    return [Text.assemble(("warning  ", "yellow bold"), line) for line in warnings]


def columns(rows: Sequence[Sequence[str]], right: Sequence[bool], gap: int = 2) -> list[str]:
    """Rows of cells as aligned lines; ``right`` says which columns are numbers."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        aligned = zip(row, widths, right, strict=True)
        cells = [cell.rjust(width) if is_right else cell.ljust(width) for cell, width, is_right in aligned]
        lines.append((" " * gap).join(cells).rstrip())
    return lines


def table(
    rows: Sequence[Sequence[str]], right: Sequence[bool], styles: Sequence[str] = (), indent: str = ""
) -> list[Text]:
    """:func:`columns` with the first row as a heading; ``styles`` are those of the other rows."""
    head, *rest = (indent + line for line in columns(rows, right))
    return [heading(head), *(Text(line, style=style) for line, style in zip_longest(rest, styles, fillvalue=""))]


def more_line(size_bytes: int, count: int, width: int = 10, gap: str = "  ") -> Text:
    """What was left out of a list: ``  1.20 GiB  in 14 more``."""
    return Text(f"  {format_bytes(size_bytes):>{width}}{gap}in {count} more", style="dim")


def print_lines(lines: Iterable[Text | str]) -> None:
    """Print lines to stdout; where its width is known, what is wider goes on below, broken at spaces.

    No control characters reach the terminal: names in a file may come from anyone.
    """
    safe = (
        [(printable(piece), style) for piece, style in (line if isinstance(line, Text) else Text(line)).pieces]
        for line in lines
    )
    if _is_plain():
        for pieces in safe:
            print("".join(piece for piece, _ in pieces))
        return
    from rich.text import Text as Rich

    out = _console()
    width_known = sys.stdout.isatty() or "COLUMNS" in os.environ
    for pieces in safe:
        line = Rich.assemble(*pieces)
        for part in _wrapped(line, out.width) if width_known else (line,):
            out.print(part)


def _wrapped(line: Rich, width: int) -> Sequence[Rich]:
    """The line in parts of this width, indented two more than the first; words are never broken."""
    from rich.cells import cell_len

    if line.cell_len <= width:
        return (line,)
    hang = len(line.plain) - len(line.plain.lstrip(" ")) + 2
    edges, used = list[int](), 0
    for word in _WORD.finditer(line.plain):
        if used and used + cell_len(word[0]) > width:
            edges.append(word.start())
            used = hang + cell_len(word[0].lstrip())
        else:
            used += cell_len(word[0])
    first, *rest = line.divide(edges)
    indent = " " * hang
    return (first, *(type(line).assemble(indent, part[len(part.plain) - len(part.plain.lstrip()) :]) for part in rest))
