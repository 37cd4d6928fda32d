"""Stacks while a pickle is decoded: every recorded list of frames by the memo entry that holds it.

A *context* numbers a recorded list. Lists that the fast decoder has skipped over exist only as contexts; lists that the
pickle machine has built become one when an event refers to them.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memtrace.errors import SnapshotError
from memtrace.snapshot.intern import StackInterner

I8 = NDArray[np.int64]
I4 = NDArray[np.int32]
_UNBUILT = -1  # a memo entry whose object was skipped
_BUILT = -2  # a memo entry that the machine holds
_TEXT = -3  # and below: a text of a skipped event, by its number
_FETCHES = re.compile(rb"(?:h.|j.{4})*+", re.DOTALL)
_FETCH = re.compile(rb"h(.)|j(.{4})", re.DOTALL)


class Unsupported(Exception):
    """Nothing wrong, but not for the fast decoder: the other one reads the file."""


class Column:
    """An array that grows. Growing moves pages, not bytes, where the system can."""

    def __init__(self, dtype: Any) -> None:
        self._data: NDArray[Any] = np.empty(1024, dtype=dtype)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def extend(self, values: NDArray[Any]) -> None:
        """Append values."""
        end = self._room(len(values))
        self._data[self._count : end] = values
        self._count = end

    def fill(self, value: int, count: int) -> None:
        """Append one value ``count`` times."""
        end = self._room(count)
        self._data[self._count : end] = value
        self._count = end

    def _room(self, count: int) -> int:
        end = self._count + count
        if end > len(self._data):
            self._data.resize(max(end, len(self._data) * 3 // 2), refcheck=False)
        return end

    def view(self) -> NDArray[Any]:
        """What is there so far."""
        return self._data[: self._count]

    def array(self) -> NDArray[Any]:
        """The finished array; the column is done."""
        self._data.resize(self._count, refcheck=False)
        return self._data


class ContextRef:
    """Stands on the machine's stack for a list that was skipped."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class Contexts:
    """All contexts of a file, and the interned stacks behind them."""

    def __init__(self, stacks: StackInterner, memo: dict[int, Any]) -> None:
        self.interner = stacks
        self._memo = memo
        self._of_slot = Column(np.int32)  # memo entry -> context, _UNBUILT or _BUILT
        self._stack_of = Column(np.int32)
        self._stack_of_body: dict[bytes, int] = {}
        self._of_list: dict[int, int] = {}
        self.settled: set[int] = set()  # ids of lists that were read and must not change any more

    def __len__(self) -> int:
        return len(self._stack_of)

    def skip(self, count: int) -> None:
        """Account for memo entries filled by skipped events; their lists are told to :meth:`add`."""
        self._of_slot.fill(_UNBUILT, count)

    def catch_up(self, filled: int) -> None:
        """Account for memo entries that the machine has filled meanwhile."""
        self._of_slot.fill(_BUILT, filled - len(self._of_slot))

    def add(self, slots: I8, stacks: list[int]) -> I4:
        """New contexts for skipped lists, by memo entry and stack number."""
        first = len(self._stack_of)
        self._stack_of.extend(np.array(stacks, dtype=np.int32))
        numbers = np.arange(first, first + len(slots), dtype=np.int32)
        self._of_slot.view()[slots] = numbers
        return numbers

    def of_slots(self) -> I4:
        """By memo entry: its context, or why it has none."""
        return self._of_slot.view()

    def take(self, slots: I4, stacks: I4) -> None:
        """Account for new memo entries, and for the new contexts among them, in order."""
        self._of_slot.extend(slots)
        self._stack_of.extend(stacks)

    def stack_of_body(self, body: bytes) -> int:
        """The stack of a written list; -1 if it is more than fetched frames."""
        return self._new_body(body)

    def fetch(self, slots: I8) -> I4:
        """Contexts of memo entries; -1 where an entry is not a list of frames."""
        found: I4 = self._of_slot.view()[slots]
        if (found < 0).any():
            for slot in np.unique(slots[found == _BUILT]).tolist():
                self.of_built(slot)
            found = self._of_slot.view()[slots]
            found[found < 0] = -1
        return found

    def of_built(self, slot: int) -> int:
        """The context of a memo entry that the machine holds; -1 if it is not a list of frames."""
        entry = self._memo.get(slot)
        if type(entry) is not list:
            return -1
        self._of_slot.view()[slot] = number = self.of_frames(entry)
        return number

    def at_slot(self, slot: int) -> ContextRef | None:
        """What the machine may hold for a skipped memo entry."""
        number = int(self._of_slot.view()[slot]) if 0 <= slot < len(self._of_slot) else -1
        return ContextRef(number) if number >= 0 else None

    def text_at_slot(self, slot: int) -> int | None:
        """The number of a skipped event's text."""
        number = int(self._of_slot.view()[slot]) if 0 <= slot < len(self._of_slot) else 0
        return _TEXT - number if number <= _TEXT else None

    def of_frames(self, frames: Any) -> int:
        """The context of an event's ``frames`` as the machine built it; -1 for None."""
        if frames is None:
            return -1
        if type(frames) is ContextRef:
            return frames.number
        if type(frames) is not list:
            raise Unsupported
        number = self._of_list.get(id(frames))
        if number is None:
            number = len(self._stack_of)
            self._stack_of.fill(self._stack(frames), 1)
            self._of_list[id(frames)] = number
            self.settled.add(id(frames))
        return number

    def _stack(self, frames: list[Any]) -> int:
        try:
            number = self.interner.add(frames)
        except SnapshotError:
            raise Unsupported from None  # the other decoder says what is wrong
        self.settled.update(map(id, frames))
        return number

    def of_bodies(self, data: bytes, starts: list[int], stops: list[int]) -> list[int]:
        """Stack numbers of written lists, up to the first that is more than fetched frames."""
        known = self._stack_of_body
        bodies = list(map(data.__getitem__, map(slice, starts, stops)))
        found = list(map(known.get, bodies))
        if None not in found:
            return found  # type: ignore[return-value]
        numbers: list[int] = []
        for body in bodies:
            stack = known.get(body)
            if stack is None:
                stack = self._new_body(body)
                if stack < 0:
                    break
                known[body] = stack
            numbers.append(stack)
        return numbers

    def _new_body(self, body: bytes) -> int:
        match = _FETCHES.match(body)
        if match is None or match.end() != len(body):
            return -1
        frames = []
        for short, long in _FETCH.findall(body):
            frame = self._memo.get(short[0] if short else int.from_bytes(long, "little"))
            if type(frame) is not dict:
                return -1
            frames.append(frame)
        return self._stack(frames)

    def stacks(self, contexts: I4) -> I4:
        """Stack numbers of contexts, -1 for -1."""
        padded = np.append(self._stack_of.view(), np.int32(-1))
        return padded[contexts]
