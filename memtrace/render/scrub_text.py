"""What a scrub removed and what it left, for people."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath

from memtrace.scrub.document import Scrubbed
from memtrace.units import format_bytes, printable

_HINTS = {
    "functions": "names of the project's own functions; --functions replaces them",
    "project files": "base names of project files, kept by --keep-names",
}
_SHOWN = 12
_WIDTH = 100


def render_scrub(source: str, output: str, size_bytes: int, answer: Scrubbed) -> list[str]:
    """Lines for the terminal after a file was written."""
    lines = [f"{PurePath(source).name} scrubbed: {output} ({format_bytes(size_bytes)})", ""]
    removed = [(kind, count) for kind, count in answer.removed.items() if count]
    if removed:
        width = max(len(f"{count:,}") for _, count in removed)
        lines += ["replaced or left out (distinct)", *(f"  {count:>{width},}  {kind}" for kind, count in removed)]
    else:
        lines.append("nothing personal was found")
    return [*lines, "", *render_kept(answer.kept, _SHOWN)]


def render_kept(kept: Mapping[str, list[str]], most: int | None = None) -> list[str]:
    """What a reader may still recognise, at most ``most`` texts a kind."""
    lines = ["still there, and perhaps recognisable"] if kept else ["nothing of the project's own is recognisable"]
    for kind, texts in kept.items():
        lines.append(f"  {kind} ({len(texts):,}): {_HINTS.get(kind, '')}".rstrip(": "))
        shown = texts if most is None else texts[:most]
        lines += [f"    {printable(text)[:_WIDTH]}" for text in shown]
        if len(shown) < len(texts):
            lines.append(f"    … {len(texts) - len(shown):,} more (--check lists all)")
    lines += ["", "Sizes, addresses, times of day, line numbers and the names of public libraries always stay."]
    return lines
