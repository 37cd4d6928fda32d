"""Fields of many pickled events at once: operands gathered by numpy from the bytes, never as Python objects.

Every function takes ``at``, one position an event, and answers with the values, the position behind each and whether
the bytes really were such a field. Positions may stray where they were not; padding behind the data makes that safe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

I8 = NDArray[np.int64]
Bool = NDArray[np.bool_]

_LONG1, _BINGET, _LONG_BINGET, _SHORT_BINUNICODE, _MEMOIZE = 0x8A, 0x68, 0x6A, 0x8C, 0x94
_EMPTY_LIST, _MARK, _APPENDS, _APPEND, _SETITEMS, _TUPLE2 = 0x5D, 0x28, 0x65, 0x61, 0x75, 0x86

_OPERAND_BYTES = np.zeros(256, dtype=np.int64)  # of integer opcodes; LONG1 carries its own
_OPERAND_BYTES[[0x4B, 0x4D, 0x4A]] = 1, 2, 4
_UNSIGNED = np.full(256, -1, dtype=np.int64)  # BININT1 and BININT2 have no sign
_UNSIGNED[0x4B], _UNSIGNED[0x4D] = 0xFF, 0xFFFF
_REF_BYTES = np.zeros(256, dtype=np.int64)
_REF_BYTES[[_BINGET, _LONG_BINGET]] = 2, 5
_REF_MASK = np.zeros(256, dtype=np.uint64)
_REF_MASK[[_BINGET, _LONG_BINGET]] = 0xFF, 0xFFFFFFFF
_TEXT_MASK = np.array([(1 << 8 * n) - 1 for n in range(8)], dtype=np.uint64)


class Sight:
    """The bytes of a window as single bytes and as overlapping little-endian words (``word[i]`` starts at byte i)."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.byte: NDArray[np.uint8] = np.frombuffer(data, dtype=np.uint8)
        self.word: NDArray[Any] = np.ndarray((len(data) - 8,), dtype="<u8", buffer=data, strides=(1,))


def reference(number: int) -> bytes:
    """The bytes that fetch a memo entry."""
    return bytes((_BINGET, number)) if number < 256 else bytes((_LONG_BINGET,)) + number.to_bytes(4, "little")


def matches(sight: Sight, at: I8, wanted: bytes) -> Bool:
    """Where exactly ``wanted`` (up to 8 bytes) stands."""
    mask = np.uint64((1 << 8 * len(wanted)) - 1)
    return (sight.word[at] & mask) == np.uint64(int.from_bytes(wanted, "little"))


def integers(sight: Sight, at: I8) -> tuple[I8, I8, Bool]:
    """Integers of up to 64 bits: (value, behind, ok)."""
    op = sight.byte.take(at)
    size = _OPERAND_BYTES.take(op)
    start = at + 1
    is_long = op == _LONG1
    if is_long.any():
        size = np.where(is_long, sight.byte.take(start), size)
        start = start + is_long
    ok = (size > 0) & (size <= 8)
    shift = 64 - 8 * np.where(ok, size, 8)
    value = (sight.word[start].view(np.int64) << shift) >> shift
    value &= _UNSIGNED.take(op)
    return value, start + np.where(ok, size, 0), ok


def references(sight: Sight, at: I8) -> tuple[I8, I8, Bool]:
    """Memo indices of fetched entries: (index, behind, ok)."""
    op = sight.byte.take(at)
    number = (sight.word[at] >> np.uint64(8)) & _REF_MASK.take(op)
    size = _REF_BYTES.take(op)
    return number.astype(np.int64), at + size, size > 0


@dataclass(slots=True)
class Texts:
    """Texts of one field. ``reference`` is a memo index or -1; else the text is ``size`` bytes from ``start``.

    ``word`` holds a literal of up to 7 bytes together with its size; 0 for longer ones.
    """

    reference: I8
    start: I8
    size: I8
    word: NDArray[np.uint64]


def texts(sight: Sight, at: I8) -> tuple[Texts, I8, Bool]:
    """Texts, fetched from the memo or written out and memoized: (texts, behind, ok)."""
    number, behind, fetched = references(sight, at)
    start = at + 2
    literal = sight.byte.take(at) == _SHORT_BINUNICODE
    if not literal.any():
        none = np.zeros(len(at), dtype=np.uint64)
        return Texts(number, start, none.view(np.int64), none), behind, fetched
    size = np.where(literal, sight.byte.take(at + 1), 0).astype(np.int64)
    end = start + size
    literal &= sight.byte.take(end) == _MEMOIZE
    word = sight.word[start] & _TEXT_MASK.take(np.minimum(size, 7))
    word |= size.astype(np.uint64) << np.uint64(56)
    word[(size > 7) | ~literal] = 0
    short = literal & (size <= 7) & (size > 0)
    word[~short] = 0
    return (
        Texts(np.where(literal, -1, number), start, size, word),
        np.where(literal, end + 1, behind),
        (fetched | literal) & (fetched | (size > 0)),
    )


def pairs(sight: Sight, at: I8) -> tuple[I8, I8, I8, I8, Bool]:
    """Pool ids: (memo index or -1, first, second, behind, ok). A pair that is written out is memoized."""
    number, behind, fetched = references(sight, at)
    first, middle, is_first = integers(sight, at)
    second, end, is_second = integers(sight, middle)
    literal = is_first & is_second & matches(sight, end, bytes((_TUPLE2, _MEMOIZE)))
    return (
        np.where(literal, -1, number),
        first,
        second,
        np.where(literal, end + 2, behind),
        fetched | literal,
    )


FETCHED, WRITTEN = 0, 1  # what stands for the frames of an event


@dataclass(slots=True)
class Stacks:
    """Lists of frames: ``FETCHED`` from the memo, or ``WRITTEN`` as the bytes ``start`` to ``stop``, not looked at."""

    kind: NDArray[np.uint8]
    reference: I8
    start: I8
    stop: I8


def stacks(sight: Sight, at: I8, end: I8) -> tuple[Stacks, Bool]:
    """Lists of frames, the last field of events that end before ``end``: (stacks, ok)."""
    number, behind, fetched = references(sight, at)
    ok = fetched & (behind == end - 1) & (sight.byte.take(end - 1) == _SETITEMS)
    word = sight.word[at]
    written = (word & np.uint64(0xFFFF)) == np.uint64(_EMPTY_LIST | _MEMOIZE << 8)
    third = (word >> np.uint64(16)) & np.uint64(0xFF)
    tail = sight.word[end - 2] & np.uint64(0xFFFF)
    many = written & (third == _MARK) & (tail == np.uint64(_APPENDS | _SETITEMS << 8)) & (end - 2 > at + 3)
    one = written & (tail == np.uint64(_APPEND | _SETITEMS << 8))
    one &= ((third == _BINGET) & (end == at + 6)) | ((third == _LONG_BINGET) & (end == at + 9))
    empty = written & (third == _SETITEMS) & (end == at + 3)
    written = many | one | empty
    start = at + 2 + many
    return Stacks(written.astype(np.uint8), number, start, np.where(empty, start, end - 2)), ok | written
