"""Expected output against real output, with ``…`` for what differs from machine to machine, and its rewriting.

A line that is only ``…`` stands for any number of lines; ``…`` within a line for any text.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

GAP = "…"


def _pattern(line: str) -> re.Pattern[str]:
    return re.compile(".*?".join(map(re.escape, line.rstrip().split(GAP))))


def fits(expected: Sequence[str], actual: Sequence[str]) -> bool:
    """Whether the real lines are what the page shows; blanks at line ends and empty lines at the end don't count."""
    want, have = _trimmed(expected), _trimmed(actual)
    parts: list[list[str]] = [[]]
    for line in want:
        if line.strip() == GAP:
            parts.append([])
        else:
            parts[-1].append(line)
    if len(parts) == 1:
        return len(want) == len(have) and _same(want, have)
    first, last = parts[0], parts[-1]
    if len(have) < len(first) + len(last) or not _same(first, have):
        return False
    if last and not _same(last, have[-len(last) :]):
        return False
    at, end = len(first), len(have) - len(last)
    for part in parts[1:-1]:
        while at + len(part) <= end and not _same(part, have[at:]):
            at += 1
        if at + len(part) > end:
            return False
        at += len(part)
    return True


def _same(want: Sequence[str], have: Sequence[str]) -> bool:
    return len(have) >= len(want) and all(
        _pattern(line).fullmatch(other) for line, other in zip(want, have, strict=False)
    )


def _trimmed(lines: Sequence[str]) -> list[str]:
    result = [line.rstrip() for line in lines]
    while result and not result[-1]:
        result.pop()
    return result


def renewed(expected: Sequence[str], actual: Sequence[str]) -> list[str]:
    """The real output, left out where the page leaves it out."""
    want, have = _trimmed(expected), _trimmed(actual)
    kept = [line for line in want if GAP in line and line.strip() != GAP]
    named = [next((line for line in kept if _pattern(line).fullmatch(other)), other) for other in have]
    result: list[str] = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, want, named, autojunk=False).get_opcodes():
        gap = [index for index in range(a, b) if want[index].strip() == GAP]
        if kind == "equal" or not gap:
            result += named[c:d]
            continue
        before, after = gap[0] - a, b - gap[-1] - 1
        head = named[c : min(c + before, d)]
        tail = named[max(d - after, c + len(head)) : d]
        result += [*head, want[gap[0]], *tail]
    return result
