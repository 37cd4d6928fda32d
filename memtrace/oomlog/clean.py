"""A raw stretch of log -> its lines, without colour codes, boxes, progress bars and line prefixes.

Everything a terminal, a launcher or a logger adds is taken off, and what it tells (rank, process) is kept beside the
line. Lines of one process are then joined without white space: a message that was wrapped at any width, even in the
middle of a word, reads the same again.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from itertools import accumulate, pairwise

from memtrace.frozen import dataclass

ANSI = re.compile(
    r"(?:\x1b|\\u001b)(?:\[[0-9;?]{0,20}[ -/]?[@-~]|\][^\x07\x1b\n]{0,300}(?:\x07|\x1b\\)|[@-Z\\^_=>])"
    r"|\[\d{1,3}(?:;\d{1,3}){0,4}m"  # a colour code that lost its escape character
    r"|\x08{2,}"  # a spinner; one alone may be a device number (PyTorch 2.3)
)
_BAR = re.compile(
    r"\d{1,3}(?:\.\d+)?%\s?\|[^|\n]{0,200}\|\s{0,6}[\d.,]{1,14}[kKMGT]?i?B?\s?/\s?[\d.,?]{1,14}[kKMGT]?i?B?"
    r"\s{0,4}\[[^\]\n]{0,160}\]"
    r"|\d{1,10}(?:it|ex|examples?)\s\[\d[^\]\n]{0,80}\]"
    r"|[━╸╺╴╶█▉▊▋▌▍▎▏]{3,}[^\n]{0,60}?\d{1,2}:\d\d(?::\d\d)?"
)
_BAR_NAME = re.compile(r"(?<![\w.])(?!\w*(?:Error|Exception):)[A-Za-z][\w .()/-]{0,40}:\s{1,4}$")
_BOX = re.compile("[\u2500-\u257f\ufffd\ufeff\u200b\xa0]")

_STRIPPED = re.compile(
    r"\s+"
    r"|\[?(?:default|rank|local_rank|local rank|global_rank)[ :=]{0,2}(?P<rank>\d{1,5})\]:?"
    r"|(?:rank|default)[ :]{0,2}(?P<bare>\d{1,5})\s?:"
    r"|\[(?:(?P<pid>pid[ :=]{0,2}\d{1,9})|(?!errno|enforce|m)[^\[\]\n]{1,64})\]:?"
    r"|\((?:(?P<ray>[^()\n]{0,60}pid=\d{1,9}[^()\n]{0,60})|(?P<paren>rank[ :=]{0,2}\d{1,5}|raylet))\)"
    r"|\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
    r"|\d\d[/.-]\d\d[/.-]\d{2,4} \d\d:\d\d:\d\d(?:[.,]\d{1,9})?"
    r"|\d\d:\d\d:\d\d(?:[.,]\d{1,9})?"
    r"|(?:[A-Z][a-z]{2} ){1,2}\s?\d{1,2} \d\d:\d\d:\d\d(?: \d{4})?"
    r"|(?-i:INFO|WARNING|WARN|ERROR|CRITICAL|DEBUG|FATAL|STDERR|STDOUT|stderr|stdout)\b"
    r"|(?P<host>(?!EL\d)(?:[A-Za-z][\w.-]{0,80}[.-])?[A-Za-z]{0,40}\d{1,5}):\s"
    r"|(?P<task>\d{1,4}):\s"
    r"|E\s{2,}|#\d{1,3} \d{1,6}\.\d{1,3}"
    r"|[-:>|#*]+(?=\s|$)|[>\"'`]+",
    re.IGNORECASE,
)
_RANK_IN_PREFIX = re.compile(r"\[?\b(?:local_rank|rank|default)\s?[:=]?\s?(\d{1,5})\]?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class TextLine:
    """One line: ``text`` without its prefix, ``prefix`` as it stood, ``tag`` naming the process that wrote it."""

    number: int
    text: str
    prefix: str
    tag: str
    rank: int | None


@dataclass(frozen=True)
class TextFlow:
    """The lines of one process, joined without white space in ``text``; ``starts`` are their places in it."""

    lines: tuple[TextLine, ...]
    starts: tuple[int, ...]
    text: str

    def line_at(self, place: int) -> TextLine:
        """The line that character ``place`` of ``text`` came from."""
        return self.lines[self.index_at(place)]

    def index_at(self, place: int) -> int:
        """Index of that line."""
        return max(0, bisect_right(self.starts, place) - 1)

    def line_start(self, place: int) -> int:
        """Where in ``text`` that line begins."""
        return self.starts[self.index_at(place)]

    def pieces(self, start: int, end: int) -> list[str]:
        """``text[start:end]`` cut where the lines were."""
        first = self.index_at(start)
        bounds = [start, *(s for s in self.starts[first + 1 : bisect_left(self.starts, end)] if s > start), end]
        return [self.text[a:b] for a, b in pairwise(bounds)]


def clean_lines(data: bytes, first_line: int) -> list[TextLine]:
    """Lines of a stretch of log; empty ones are left out."""
    text = ANSI.sub("", data.decode("utf-8", "replace"))
    lines: list[TextLine] = []
    for offset, physical in enumerate(text.split("\n")):
        for part in physical.split("\r"):
            line = _clean(part, first_line + offset)
            if line is not None:
                lines.append(line)
    return lines


def process_of(line: str) -> str:
    """What a line's prefix tells of the process that wrote it; "" if nothing."""
    return next((clean.tag for clean in clean_lines(line.encode(), 1)), "")


def _clean(part: str, number: int) -> TextLine | None:
    if "%" in part or "it [" in part or "━" in part or "█" in part:
        part = _without_bars(part)
    if not part.isascii():
        part = _BOX.sub(" ", part)
    if not part or part.isspace():
        return None
    body = 0
    tags: list[str] = []
    while body < len(part):
        match = _STRIPPED.match(part, body)
        if match is None:
            break
        body = match.end()
        name = match.lastgroup
        if name is not None:
            tags.append(f"{'rank' if name == 'bare' else name}{match[name].strip().lower()}")
    prefix, text = part[:body], part[body:].rstrip()
    if not text:
        return None
    found = _RANK_IN_PREFIX.search(prefix) if prefix else None
    return TextLine(number, text, prefix, " ".join(tags), int(found[1]) if found else None)


def _without_bars(part: str) -> str:
    """A line without progress bars and the names in front of them."""
    kept: list[str] = []
    place = 0
    for bar in _BAR.finditer(part):
        before = part[place : bar.start()]
        name = _BAR_NAME.search(before, max(0, len(before) - 50))
        kept.append(before[: name.start()] if name else before)
        place = bar.end()
    kept.append(part[place:])
    return " ".join(kept)


def flows(lines: list[TextLine]) -> list[TextFlow]:
    """The lines of each process joined; a line without a tag continues the tagged line before it.

    An untagged line also stays in a flow of its own kind, so that a message of an unmarked process between the
    marked lines of another is whole there; the reader drops what it then sees twice.
    """
    found: dict[str, list[TextLine]] = {}
    owner = ""
    for line in lines:
        found.setdefault(line.tag, []).append(line)
        owner = line.tag or owner
        if owner != line.tag:
            found[owner].append(line)
    return [_join(own) for own in found.values()]


def _join(lines: list[TextLine]) -> TextFlow:
    pieces = ["".join(line.text.split()) for line in lines]
    starts = accumulate(map(len, pieces), initial=0)
    return TextFlow(tuple(lines), tuple(starts)[:-1], "".join(pieces))
