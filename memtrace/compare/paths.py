"""Call paths in a form that two recordings share: frames as numbers that mean the same function, and line, in both.

A path is a tuple of numbers, innermost frame first. Frames of machinery (module calls, decorators, launchers, the
interpreter, C++) come and go with versions and recorder settings; *landmark* paths leave them out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from memtrace.compare.files import match_files, match_lines, plain_path
from memtrace.snapshot.stacks import Frame, StackTable

_MACHINERY = re.compile(
    r"torch/(nn/modules/module|_ops|_compile|overrides|_tensor|utils/(_contextlib|checkpoint|_device)|autograd/\w+)\.py$"
    r"|torch/(_dynamo|_library|library|_inductor|_jit_internal|_functorch)\b"
    r"|(^|/)(contextlib|functools|runpy|threading)\.py$|^<frozen|^importlib/"
    r"|transformers/utils/(generic|output_capturing|deprecation|import_utils)\.py$"
    r"|accelerate/(hooks|utils/operations)\.py$|memtrace/capture/"
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

    Numbers are shared by the two recordings of a comparison. ``landmark[f]`` is false for machinery and native frames.
    """

    table: StackTable
    function: tuple[int, ...]
    place: tuple[int, ...]
    landmark: tuple[bool, ...]

    def whole(self, stack: int) -> tuple[int, ...]:
        """Every frame: Python by function and line, native code by function."""
        return tuple(self.place[f] for f in self.table.frame_ids(stack).tolist())

    def places(self, stack: int, depth: int | None = None) -> tuple[int, ...]:
        """Landmarks by function and line, the innermost ``depth`` of them."""
        return tuple(self.place[f] for f in self._landmarks(stack)[:depth])

    def functions(self, stack: int, depth: int | None = None) -> tuple[int, ...]:
        """Landmarks by function, the innermost ``depth`` of them."""
        return tuple(self.function[f] for f in self._landmarks(stack)[:depth])

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

    def _landmarks(self, stack: int) -> list[int]:
        return [f for f in self.table.frame_ids(stack).tolist() if self.landmark[f]]


def align(before: StackTable, after: StackTable) -> tuple[CallPaths, CallPaths]:
    """Number the frames of two recordings so that equal numbers mean the same function (and line)."""
    files = match_files(_functions_of(before), _functions_of(after))
    lines_before, lines_after = _lines_of(before, {}), _lines_of(after, files)
    lines = {key: match_lines(lines_before.get(key, ()), seen) for key, seen in lines_after.items()}
    numbers: dict[object, int] = {}
    return (
        _paths(before, numbers, {}, {}, "before"),
        _paths(after, numbers, files, lines, "after"),
    )


def _paths(
    table: StackTable,
    numbers: dict[object, int],
    files: dict[str, str],
    lines: dict[tuple[str, str], dict[int, int]],
    side: str,
) -> CallPaths:
    function, place, landmark = [], [], []
    for frame in table.frames:
        native = is_native(frame)
        path = plain_path(frame.filename)
        key = ("", frame.name) if native else (files.get(path, path), frame.name)
        line: object = frame.line
        if side == "after":
            line = lines.get(key, {}).get(frame.line, ("only after", frame.line))
        function.append(numbers.setdefault(("function", key), len(numbers)))
        place.append(numbers.setdefault(("place", key, 0 if native else line), len(numbers)))
        landmark.append(not native and not _MACHINERY.search(path))
    return CallPaths(table, tuple(function), tuple(place), tuple(landmark))


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
