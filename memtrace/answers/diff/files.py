"""Which source file and line of one recording is which of another: moved checkouts, renamed files, shifted lines.

Both maps lead from the second recording to the first. They rest on names alone (paths and functions), so that they
hold across library versions.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

_INSTALLED = re.compile(r"^.*?(?:site-packages|dist-packages)/")
_MIN_SHARED = 0.5  # share of function names two files must have in common to be one file under two names


def plain_path(filename: str) -> str:
    """The path with ``/`` separators and without what lies in front of an installed package."""
    return _INSTALLED.sub("", filename.replace("\\", "/"))


def match_files(before: Mapping[str, Collection[str]], after: Mapping[str, Collection[str]]) -> dict[str, str]:
    """Path in ``after`` -> path in ``before`` of the same file; paths without a counterpart are absent.

    The arguments map each path to the functions seen in it. Equal paths come first, then paths with the longest common
    end (a checkout elsewhere), then files that hold much the same functions (a renamed file). A choice that is not
    the only best one, seen from both sides, is not made.
    """
    found = {path: path for path in after if path in before}
    for score in (_common_end, _shared_functions):
        left = [path for path in before if path not in found.values()]
        right = [path for path in after if path not in found]
        found |= _mutual_best(left, right, lambda a, b, score=score: score(a, b, before[a], after[b]))
    return found


def _common_end(a: str, b: str, _: Collection[str], __: Collection[str]) -> float:
    """Number of path parts the two share at their end."""
    count = 0
    for x, y in zip(reversed(a.split("/")), reversed(b.split("/")), strict=False):
        if x != y:
            break
        count += 1
    return float(count)


def _shared_functions(a: str, b: str, in_a: Collection[str], in_b: Collection[str]) -> float:
    """Share of function names in common, with like paths as the tie-breaker; 0 below the minimum."""
    shared = len(set(in_a) & set(in_b)) / max(1, len(set(in_a) | set(in_b)))
    if shared < _MIN_SHARED:
        return 0.0
    parts_a, parts_b = set(re.split(r"[/_.]", a)), set(re.split(r"[/_.]", b))
    return shared * len(set(in_a) & set(in_b)) + len(parts_a & parts_b) / max(1, len(parts_a | parts_b))


def _mutual_best(left: list[str], right: list[str], score: object) -> dict[str, str]:
    assert callable(score)
    table = {(a, b): value for a in left for b in right if (value := score(a, b)) > 0}
    best_of: dict[tuple[int, str], list[float]] = {}
    for (a, b), value in table.items():
        best_of.setdefault((0, a), []).append(value)
        best_of.setdefault((1, b), []).append(value)
    pairs = {}
    for (a, b), value in table.items():
        rows, columns = best_of[0, a], best_of[1, b]
        if value == max(rows) == max(columns) and rows.count(value) == columns.count(value) == 1:
            pairs[b] = a
    return pairs


def match_lines(before: Iterable[int], after: Iterable[int]) -> dict[int, int]:
    """Line in ``after`` -> line in ``before`` of the same function; lines without a counterpart are absent.

    The arguments are the lines of one function seen in each recording. A shift that brings at least half of the
    smaller set together is taken to be the edit; failing that, equally many lines are paired in order.
    """
    a, b = sorted(set(before)), sorted(set(after))
    if not a or not b:
        return {}
    in_a = set(a)
    overlap: dict[int, int] = {}
    for x in a:
        for y in b:
            overlap[y - x] = overlap.get(y - x, 0) + 1
    shift = min(overlap, key=lambda s: (-overlap[s], abs(s), s))
    if 2 * overlap[shift] >= min(len(a), len(b)):
        return {y: y - shift for y in b if y - shift in in_a}
    if len(a) == len(b):
        return dict(zip(b, a, strict=True))
    return {}
