"""Interned stacks: every distinct call stack of a snapshot is stored once, as numbers.

A stack is innermost frame first, as PyTorch records it. Frame ``f`` is ``(files[file[f]], line[f], names[name[f]])``;
stack ``s`` is ``frame[start[s]:start[s + 1]]``. Stack 0 is always the empty stack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memtrace.frozen import dataclass


class Frame(NamedTuple):
    """One source position."""

    filename: str
    line: int
    name: str


@dataclass(frozen=True, slots=True)
class StackTable:
    """All distinct frames and stacks of a snapshot. ``fx`` holds the FX keys of frames that carry them."""

    frames: tuple[Frame, ...]
    frame: NDArray[np.int32]
    start: NDArray[np.int64]
    fx: Mapping[int, Mapping[str, str]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.start) - 1

    def frame_ids(self, stack: int) -> NDArray[np.int32]:
        """Frame numbers of a stack, innermost first; empty for -1."""
        if stack < 0:
            return self.frame[:0]
        return self.frame[self.start[stack] : self.start[stack + 1]]

    def stack(self, stack: int) -> tuple[Frame, ...]:
        """The frames of a stack, innermost first; () for -1 (no stack recorded)."""
        return tuple(self.frames[i] for i in self.frame_ids(stack))

    def called(self, file_part: str, name: str) -> bool:
        """Whether a function of that name, in a file whose path contains ``file_part``, is on any stack."""
        return any(frame.name == name and file_part in frame.filename.replace("\\", "/") for frame in self.frames)
