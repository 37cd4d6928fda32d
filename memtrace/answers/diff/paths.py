"""Call paths in a form that two recordings share: frames as numbers that mean the same function, and line, in both.

A path is a tuple of numbers, innermost frame first. Frames of machinery (module calls, decorators, launchers, the
interpreter, C++) come and go with versions and recorder settings; *landmark* paths leave them out. Which file and line
of one recording is which of the other (moved checkouts, renamed files, shifted lines) rests on names alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import takewhile

from memtrace.attribution.origin import is_cpp
from memtrace.frozen import dataclass
from memtrace.snapshot.stacks import StackTable

_MACHINERY = re.compile(
    r"torch/(nn/modules/module|_ops|_compile|overrides|_tensor|utils/(_contextlib|checkpoint|_device)|autograd/\w+)\.py$"
    r"|torch/(_dynamo|_library|library|_inductor|_jit_internal|_functorch)\b"
    r"|(^|/)(contextlib|functools|runpy|threading)\.py$|^<frozen|^importlib/"
    r"|transformers/utils/(generic|output_capturing|deprecation|import_utils)\.py$"
    r"|accelerate/(hooks|utils/operations)\.py$|memtrace/record/"
)
_INSTALLED = re.compile(r"^.*?(?:site-packages|dist-packages)/")
_MIN_SHARED = 0.5  # share of function names two files must have in common to be one file under two names
_NODE = re.compile(r"(\w+Backward\d*)(?:::apply)?\b")


@dataclass(frozen=True, slots=True)
class CallPaths:
    """The stacks of one recording. ``function[f]``, ``place[f]``: number of frame f's function, without and with line.

    Numbers mean the same in both recordings of a comparison. ``landmark[f]`` is false for machinery and native frames;
    ``common[f]`` is true for landmarks whose function the other recording has as well. What only one side has (another
    launcher, a new wrapper) can't help to match, and is left out of paths.
    """

    table: StackTable
    function: tuple[int, ...]
    place: tuple[int, ...]
    landmark: tuple[bool, ...]
    common: tuple[bool, ...]

    def whole(self, stack: int) -> tuple[int, ...]:
        """Every frame: Python by function and line, native code by function."""
        return tuple(self.place[f] for f in self.table.frame_ids(stack).tolist())

    def places(self, stack: int, depth: int | None = None) -> tuple[int, ...]:
        """Common landmarks by function and line, the innermost ``depth`` of them."""
        return tuple(self.place[f] for f in self._common(stack)[:depth])

    def functions(self, stack: int, depth: int | None = None) -> tuple[int, ...]:
        """Common landmarks by function, the innermost ``depth`` of them."""
        return tuple(self.function[f] for f in self._common(stack)[:depth])

    def starts_common(self, stack: int) -> bool:
        """Whether the innermost landmark, the code that allocated, is a function of both recordings."""
        return next((self.common[f] for f in self.table.frame_ids(stack).tolist() if self.landmark[f]), False)

    def node(self, stack: int) -> str:
        """The innermost autograd node in the stack (``MmBackward0``); empty if none."""
        for f in self.table.frame_ids(stack).tolist():
            found = _NODE.search(self.table.frames[f].name)
            if found and not self.landmark[f]:
                return found[1]
        return ""

    def has_landmarks(self, stack: int) -> bool:
        """Whether anything of the stack is Python code that people write."""
        return any(self.landmark[f] for f in self.table.frame_ids(stack).tolist())

    def _common(self, stack: int) -> list[int]:
        return [f for f in self.table.frame_ids(stack).tolist() if self.common[f]]


def align(before: StackTable, after: StackTable) -> tuple[CallPaths, CallPaths]:
    """Number the frames of two recordings so that equal numbers mean the same function (and line)."""
    seen_before, seen_after = _seen(before), _seen(after)
    files = match_files(seen_before, seen_after)
    lines_after: dict[tuple[str, str], set[int]] = {}
    for path, functions in seen_after.items():
        for name, numbers_seen in functions.items():
            lines_after.setdefault((files.get(path, path), name), set()).update(numbers_seen)
    lines = {
        (path, name): match_lines(seen_before.get(path, {}).get(name, ()), seen)
        for (path, name), seen in lines_after.items()
    }
    numbers: dict[object, int] = {}
    first = _numbered(before, numbers, {}, None)
    second = _numbered(after, numbers, files, lines)
    return _paths(before, first, second), _paths(after, second, first)


def _numbered(
    table: StackTable,
    numbers: dict[object, int],
    files: dict[str, str],
    lines: dict[tuple[str, str], dict[int, int]] | None,
) -> list[tuple[int, int, bool]]:
    """(function, place, landmark) of each frame. ``lines`` is None for the recording that the numbers follow."""
    found = []
    for frame in table.frames:
        native = is_cpp(frame.filename, frame.name)
        path = plain_path(frame.filename)
        key = ("", frame.name) if native else (files.get(path, path), frame.name)
        line: object = 0 if native else frame.line
        if lines is not None and not native:
            line = lines.get(key, {}).get(frame.line, ("only after", frame.line))
        function = numbers.setdefault(("function", key), len(numbers))
        place = numbers.setdefault(("place", key, line), len(numbers))
        found.append((function, place, not native and not _MACHINERY.search(path)))
    return found


def _paths(table: StackTable, own: list[tuple[int, int, bool]], other: list[tuple[int, int, bool]]) -> CallPaths:
    known = {function for function, _, _ in other}
    return CallPaths(
        table,
        function=tuple(function for function, _, _ in own),
        place=tuple(place for _, place, _ in own),
        landmark=tuple(landmark for _, _, landmark in own),
        common=tuple(landmark and function in known for function, _, landmark in own),
    )


def _seen(table: StackTable) -> dict[str, dict[str, set[int]]]:
    """Path -> function -> lines of the Python frames."""
    found: dict[str, dict[str, set[int]]] = {}
    for frame in table.frames:
        if not is_cpp(frame.filename, frame.name):
            found.setdefault(plain_path(frame.filename), {}).setdefault(frame.name, set()).add(frame.line)
    return found


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
    for score in (_common_end, lambda a, b: _shared_functions(a, b, set(before[a]), set(after[b]))):
        left = [path for path in before if path not in found.values()]
        right = [path for path in after if path not in found]
        found |= _mutual_best(left, right, score)
    return found


def _common_end(a: str, b: str) -> float:
    """Number of path parts the two share at their end."""
    pairs = zip(reversed(a.split("/")), reversed(b.split("/")), strict=False)
    return sum(1.0 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _shared_functions(a: str, b: str, in_a: set[str], in_b: set[str]) -> float:
    """Share of function names in common, with like paths as the tie-breaker; 0 below the minimum."""
    shared = len(in_a & in_b) / max(1, len(in_a | in_b))
    if shared < _MIN_SHARED:
        return 0.0
    parts_a, parts_b = set(re.split(r"[/_.]", a)), set(re.split(r"[/_.]", b))
    return shared * len(in_a & in_b) + len(parts_a & parts_b) / max(1, len(parts_a | parts_b))


def _mutual_best(left: list[str], right: list[str], score: Callable[[str, str], float]) -> dict[str, str]:
    """Right -> left of the pairs that are the only best ones of both."""
    table = {(a, b): value for a in left for b in right if (value := score(a, b)) > 0}
    of_left: dict[str, list[float]] = {}
    of_right: dict[str, list[float]] = {}
    for (a, b), value in table.items():
        of_left.setdefault(a, []).append(value)
        of_right.setdefault(b, []).append(value)
    return {
        b: a
        for (a, b), value in table.items()
        if all(value == max(rivals) and rivals.count(value) == 1 for rivals in (of_left[a], of_right[b]))
    }


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
