"""What the text renderers share: a console that suits the output, headings, columns, and safe printing.

Renderers return lines (:class:`rich.text.Text`); only verbs print. Colour disappears with NO_COLOR or in a pipe.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from memtrace.units import format_bytes, printable

_WORD = re.compile(r"\s*\S+(?: [KMGT]?i?B\b\S*)?")  # a size keeps its unit


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the command, whose exit code is not rich's."""
        raise BrokenPipeError


def console() -> Console:
    """A console on stdout, as wide as the terminal or $COLUMNS; else 100 columns, so that pipes don't wrap oddly."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 100
    return _Console(file=sys.stdout, width=width, highlight=False, soft_wrap=True)


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
    """Print lines to stdout; where its width is known, what is wider goes on below, broken at spaces."""
    out = console()
    width_known = sys.stdout.isatty() or "COLUMNS" in os.environ
    for line in lines:
        safe = _safe(line)
        for part in _wrapped(safe, out) if width_known else (safe,):
            out.print(part, markup=False)


def _wrapped(line: Text | str, out: Console) -> Sequence[Text | str]:
    """The line in parts of the console's width, indented two more than the first; words are never broken."""
    text = line if isinstance(line, Text) else Text(line)
    if text.cell_len <= out.width:
        return (line,)
    hang = len(text.plain) - len(text.plain.lstrip(" ")) + 2
    edges, used = list[int](), 0
    for word in _WORD.finditer(text.plain):
        if used and used + cell_len(word[0]) > out.width:
            edges.append(word.start())
            used = hang + cell_len(word[0].lstrip())
        else:
            used += cell_len(word[0])
    first, *rest = text.divide(edges)
    return (first, *(Text.assemble(" " * hang, part[len(part.plain) - len(part.plain.lstrip()) :]) for part in rest))


def _safe(line: Text | str) -> Text | str:
    """No control characters reach the terminal: names in a file may come from anyone."""
    if isinstance(line, str):
        return printable(line)
    if line.plain.isprintable():
        return line
    return Text.assemble(*(Text(printable(part.plain), part.style) for part in line.divide(_edges(line))))


def _edges(line: Text) -> list[int]:
    return sorted({edge for span in line.spans for edge in (span.start, span.end) if 0 < edge < len(line.plain)})
