"""Markdown pages taken apart: fenced blocks, inline code, links, anchors. No Markdown library is needed."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_FENCE = re.compile(r"^(?P<indent> *)(?P<marks>`{3,}|~{3,})(?P<info>[^`]*)$")
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_HTML_LINK = re.compile(r"<(?:img|a)\b[^>]*?(?:src|href)=\"([^\"]+)\"")
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$")


@dataclass(frozen=True)
class Block:
    """A fenced block. ``first`` is the 0-based index of its first content line in the page's lines."""

    language: str
    first: int
    indent: str
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        """The content, each line ended."""
        return "".join(line + "\n" for line in self.lines)


def pages() -> list[Path]:
    """Every page of the documentation, and the Markdown files beside it that people read first."""
    beside = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return [*sorted(DOCS.rglob("*.md")), *(path for path in beside if path.is_file())]


def name_of(page: Path) -> str:
    """A page's path below the repository, for messages and test ids."""
    return page.relative_to(ROOT).as_posix()


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found, lines, index = [], text.split("\n"), 0
    while index < len(lines):
        opening = _FENCE.match(lines[index])
        index += 1
        if opening is None:
            continue
        first, indent, marks = index, opening["indent"], opening["marks"]
        while index < len(lines) and not re.fullmatch(rf" *{re.escape(marks[0])}{{{len(marks)},}} *", lines[index]):
            index += 1
        content = tuple(line.removeprefix(indent) for line in lines[first:index])
        language = (opening["info"].split() or [""])[0]
        found.append(Block(language, first, indent, content))
        index += 1
    return found


def prose(text: str) -> str:
    """The page without its fenced blocks; line numbers stay."""
    lines = text.split("\n")
    for block in blocks(text):
        for index in range(block.first - 1, min(block.first + len(block.lines) + 1, len(lines))):
            lines[index] = ""
    return "\n".join(lines)


def spans(text: str) -> list[str]:
    """Inline code, outside fenced blocks."""
    return _SPAN.findall(prose(text))


def links(text: str) -> list[str]:
    """Targets of links and images, Markdown's and HTML's, outside code."""
    bare = _SPAN.sub("code", prose(text))
    return _LINK.findall(bare) + _HTML_LINK.findall(bare)


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings that mean the same on the built site and on a code host.

    Both rules drop punctuation and lower the case; they differ in non-ASCII letters and in runs of blanks.
    """
    site: set[str] = set()
    host: set[str] = set()
    for line in prose(text).split("\n"):
        match = _HEADING.match(line)
        if match is None:
            continue
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match[1]).replace("`", "")
        plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
        site.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
        host.add(re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-"))
    return site & host
