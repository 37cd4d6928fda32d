"""Build the :class:`StackTable` while reading: each distinct stack once, whatever objects it came in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memtrace.errors import SnapshotError
from memtrace.snapshot.stacks import Frame, StackTable
from memtrace.units import printable

_FX_KEYS = ("fx_node_op", "fx_node_name", "fx_node_target", "fx_original_trace")
_MAX_DEPTH = 10_000  # the deepest of 91 public files has 303 frames


class ListRef:
    """Stands for a recorded list of frames that was not built: its number among those lists, and its stack."""

    __slots__ = ("context", "stack")

    def __init__(self, context: int, stack: int) -> None:
        self.context, self.stack = context, stack


class StackInterner:
    """Collects stacks. Frame dictionaries and lists are recognised by identity first, then by content.

    PyTorch shares frame dictionaries between stacks, so identity makes the common case a single hash of numbers.
    The dictionaries must stay alive while the interner is used, or identities could be reused.
    """

    def __init__(self) -> None:
        self._frames: dict[tuple[str, int, str], int] = {}
        self._fx: dict[int, dict[str, str]] = {}
        self._frame_of_object: dict[int, int] = {}
        self._stack_of_objects: dict[tuple[int, ...], int] = {(): 0}
        self._stacks: dict[tuple[int, ...], int] = {(): 0}
        self.returned = 0  # how many times a stand-in was added

    def add(self, frames: Any) -> int:
        """The stack's number; -1 for None (no frames recorded)."""
        if frames is None:
            return -1
        if type(frames) is ListRef:
            self.returned += 1
            return frames.stack
        if type(frames) is not list:
            if not isinstance(frames, tuple):
                raise SnapshotError("a 'frames' entry is not a list")
            frames = list(frames)
        objects = tuple(map(id, frames))
        known = self._stack_of_objects.get(objects)
        if known is None:
            if len(frames) > _MAX_DEPTH:
                raise SnapshotError(f"a stack of {len(frames)} frames; no real one is that deep")
            numbers = tuple([self._frame(frame) for frame in frames])
            known = self._stacks.setdefault(numbers, len(self._stacks))
            self._stack_of_objects[objects] = known
        return known

    def column(self, stacks: Sequence[Any]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Numbers of many stacks at once: (stack, context); see :class:`DeviceTrace`. -1 where None."""
        if not stacks:
            return np.zeros(0, np.int32), np.zeros(0, np.int32)
        objects = np.fromiter(map(id, stacks), dtype=np.int64, count=len(stacks))
        _, first, which = np.unique(objects, return_index=True, return_inverse=True)
        order = np.argsort(first)  # as they are met: addresses of objects differ from run to run, answers must not
        rank = np.empty(len(order), dtype=np.int32)
        rank[order] = np.arange(len(order), dtype=np.int32)
        add = self.add
        numbers = np.array([add(stacks[i]) for i in first[order].tolist()], dtype=np.int32)
        contexts = rank[which]
        stack = numbers[contexts]
        contexts[stack < 0] = -1
        return stack, contexts

    def _frame(self, frame: Any) -> int:
        number = self._frame_of_object.get(id(frame))
        if number is None:
            if type(frame) is not dict:
                raise SnapshotError("a frame is not a dictionary")
            line = frame.get("line", 0)
            key = (
                _text(frame.get("filename")),
                line if isinstance(line, int) and 0 <= line < 1 << 31 else 0,
                _text(frame.get("name")),
            )
            number = self._frames.setdefault(key, len(self._frames))
            self._frame_of_object[id(frame)] = number
            if len(frame) > 3:
                fx = {name: _text(frame[name]) for name in _FX_KEYS if name in frame}
                if fx:
                    self._fx[number] = fx
        return number

    def table(self) -> StackTable:
        """Everything collected so far."""
        depth = np.fromiter(map(len, self._stacks), dtype=np.int64, count=len(self._stacks))
        start = np.zeros(len(depth) + 1, dtype=np.int64)
        np.cumsum(depth, out=start[1:])
        frame = np.fromiter((f for stack in self._stacks for f in stack), dtype=np.int32, count=int(start[-1]))
        return StackTable(tuple(Frame(*key) for key in self._frames), frame, start, self._fx)


def _text(value: Any) -> str:
    """A name that is safe to print and to encode; real ones come through unchanged."""
    return printable(value) if isinstance(value, str) else "??"
