"""Call paths in a form that two recordings share: frames as numbers that mean the same function, and line, in both.

A path is a tuple of numbers, innermost frame first. Frames of machinery (module calls, decorators, launchers, the
interpreter, C++) come and go with versions and recorder settings; *landmark* paths leave them out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from memtrace.answers.diff.files import match_files, match_lines, plain_path
from memtrace.snapshot.stacks import Frame, StackTable

_MACHINERY = re.compile(
    r"torch/(nn/modules/module|_ops|_compile|overrides|_tensor|utils/(_contextlib|checkpoint|_device)|autograd/\w+)\.py$"
    r"|torch/(_dynamo|_library|library|_inductor|_jit_internal|_functorch)\b"
    r"|(^|/)(contextlib|functools|runpy|threading)\.py$|^<frozen|^importlib/"
    r"|transformers/utils/(generic|output_capturing|deprecation|import_utils)\.py$"
    r"|accelerate/(hooks|utils/operations)\.py$|memtrace/record/"
)
_NATIVE = re.compile(
    r"::|^_*Py[A-Z_]|^_?unwind|^<unknown|^std\b|^_start$|^__libc_start|^__clone|^clone$|^pthread_|^start_thread"
)
_NATIVE_FILE = re.compile(r"^\?\?$|\.(cpp|cc|c|cxx|h|hpp|cu|cuh)$|^$")
_NODE = re.compile(r"(\w+Backward\d*)(?:::apply)?\b")


def is_native(frame: Frame) -> bool:
    """Whether the frame is C, C++ or the interpreter's own rather than Python."""
    return bool(_NATIVE_FILE.search(frame.filename.replace("\\", "/")) or _NATIVE.search(frame.name))


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
    files = match_files(_functions_of(before), _functions_of(after))
    lines_before, lines_after = _lines_of(before, {}), _lines_of(after, files)
    lines = {key: match_lines(lines_before.get(key, ()), seen) for key, seen in lines_after.items()}
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
        native = is_native(frame)
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


def _functions_of(table: StackTable) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for frame in table.frames:
        if not is_native(frame):
            found.setdefault(plain_path(frame.filename), set()).add(frame.name)
    return found


def _lines_of(table: StackTable, files: dict[str, str]) -> dict[tuple[str, str], set[int]]:
    found: dict[tuple[str, str], set[int]] = {}
    for frame in table.frames:
        if not is_native(frame):
            path = plain_path(frame.filename)
            found.setdefault((files.get(path, path), frame.name), set()).add(frame.line)
    return found
