"""Python stacks as a recording would show them, each distinct one stored once."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

Frames = list[dict[str, Any]]

_OWN = str(Path(__file__).parent)
_MACHINERY = (
    "torch/utils/_python_dispatch.py", "torch/_ops.py", "torch/_compile.py", "torch/overrides.py", "torch/_library/",
    "torch/library.py", "torch/_dynamo/", "torch/_inductor/", "torch/utils/_device.py", "torch/utils/_contextlib.py",
)  # fmt: skip
_MAX_FRAMES = 80
_KEPT, _HIDDEN, _END = 0, 1, 2


class DryStacks:
    """Interns stacks. Frames of the dry run itself and of PyTorch's dispatch are left out.

    During backward only what runs inside the autograd engine is kept: on a GPU it runs on a thread of its own.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[CodeType, int], ...], int] = {}
        self._kinds: dict[CodeType, int] = {}

    def here(self) -> int:
        """Number of the calling code's stack."""
        kinds = self._kinds
        found: list[tuple[CodeType, int]] = []
        frame: FrameType | None = sys._getframe()
        while frame is not None and len(found) < _MAX_FRAMES:
            code = frame.f_code
            kind = kinds.get(code)
            if kind is None:
                kind = kinds[code] = _kind(code)
            if kind == _END:
                break
            if kind == _KEPT:
                found.append((code, frame.f_lineno))
            frame = frame.f_back
        return self._known.setdefault(tuple(found), len(self._known))

    def frames(self) -> list[Frames]:
        """All stacks by number, innermost frame first, as PyTorch writes them."""
        frame_of: dict[tuple[CodeType, int], dict[str, Any]] = {}
        result = []
        for stack in self._known:
            for code, line in stack:
                if (code, line) not in frame_of:
                    frame_of[code, line] = {"filename": code.co_filename, "line": line, "name": code.co_name}
            result.append([frame_of[entry] for entry in stack])
        return result


def _kind(code: CodeType) -> int:
    file, name = code.co_filename.replace("\\", "/"), code.co_name
    if name == "_engine_run_backward" or (file.startswith(_OWN) and name == "_done"):
        return _END
    if file.startswith(_OWN) or any(part in file for part in _MACHINERY):
        return _HIDDEN
    return _KEPT


def caller() -> str:
    """File and line of the program's code that runs now, outside PyTorch and memtrace."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename.replace("\\", "/")
        if "/torch/" not in file and not file.startswith((_OWN, "<")):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "the autograd engine"


def followed(file: str) -> bool:
    """Whether the code that runs now was called from a file whose path ends so."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith(file):
        frame = frame.f_back
    return frame is not None
