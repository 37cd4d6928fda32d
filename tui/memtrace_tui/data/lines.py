"""Lines of text with roles instead of colours: what the data side hands to the drawing side.

A *role* is a name the palette turns into a style: ``text``, ``dim``, ``strong``, ``title``, ``good``, ``warn``,
``bad``, ``accent``, ``hole``, ``cat:lora``, ``phase:forward``, ``ramp:3``, ``hue:2``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Span = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Goto:
    """A screen ("" the present one), and what to show there: an event for the cursor, a filter, a segment or a block.

    ``address`` selects the segment or block that holds it. With ``frame`` (a number in the table of stacks) or
    ``history`` (a range of addresses) no screen but a list of what is known of it opens.
    """

    view: str = ""
    event: int | None = None
    filter: str | None = None
    address: int | None = None
    frame: int | None = None
    history: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """One line; ``target`` is what Enter opens (None: the line can't be selected)."""

    spans: tuple[Span, ...]
    target: object | None = None

    @property
    def plain(self) -> str:
        """The text alone."""
        return "".join(text for text, _ in self.spans)


def line(*spans: Span | str, target: object | None = None) -> Line:
    """A line from (text, role) pairs; a bare string has the role ``text``."""
    return Line(tuple((span, "text") if isinstance(span, str) else span for span in spans), target)


BLANK = Line(())


def stacked(parts: Sequence[tuple[int, str]], total: int, width: int) -> list[Span]:
    """Cells of a stacked bar: (size, role) parts scaled to ``total``; remainders go to the largest fractions.

    Every part above 0 gets at least one cell where there is room for all of them.
    """
    if total <= 0 or width <= 0:
        return []
    exact = [size / total * width for size, _ in parts]
    cells = [max(int(part), 1) if size > 0 else 0 for part, (size, _) in zip(exact, parts, strict=True)]
    goal = min(width, round(sum(exact)))
    while sum(cells) > goal and max(cells) > 1:
        cells[cells.index(max(cells))] -= 1
    for i in sorted(range(len(parts)), key=lambda i: int(exact[i]) - exact[i]):
        cells[i] += sum(cells) < goal and parts[i][0] > 0
    return [("█" * n, role) for n, (_, role) in zip(cells, parts, strict=True) if n]


def wrap(spans: Iterable[Span], width: int, indent: int = 0) -> list[Line]:
    """Break at spaces into lines of at most ``width``; later lines are indented. Roles are kept."""
    words = [(word, role) for text, role in spans for word in re.findall(" |[^ ]+", text)]
    lines: list[Line] = []
    now: list[Span] = []
    used = 0
    for word, role in words:
        if used + len(word) > width and used > indent:
            lines.append(Line(tuple(now)))
            now, used = [(" " * indent, "text")], indent
            if word == " ":
                continue
        if word == " " and used == indent and lines:
            continue
        while len(word) > (piece := max(width - used, 1)):
            now.append((word[:piece], role))
            lines.append(Line(tuple(now)))
            word, now, used = word[piece:], [(" " * indent, "text")], indent
        now.append((word, role))
        used += len(word)
    return [*lines, Line(tuple(now))] if now else lines


def indented(lines: Iterable[Line], by: int) -> list[Line]:
    """The lines, moved to the right."""
    return [Line(((" " * by, "text"), *each.spans), each.target) for each in lines]
