"""A window that moves over a stream of bytes, so that a file of any size is decoded in a few megabytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO, Protocol

WINDOW_BYTES = 512 << 10  # with its columns, what stays in a processor's cache
PADDING_BYTES = 4096  # zeros behind the end: reading a few fields too far finds no opcode instead of an IndexError


class Reader(Protocol):
    """Anything with ``read``."""

    def read(self, size: int = -1, /) -> bytes:
        """Up to ``size`` bytes; empty at the end."""


_FRAME = 0x95
_FRAME_HEAD_BYTES = 9
_NEVER = 1 << 62


class ReadWindow:
    """``data[:end]`` are the bytes now in sight; ``base`` is where they begin in the whole stream.

    With ``frames_at``, the position of the first frame's head, the heads of frames are taken out, since they may stand
    anywhere between two opcodes and mean nothing. ``cuts`` are the positions where one was: an opcode whose operands
    span a cut was not written by a pickler, and its reader must refuse it. ``frames_end`` is where the frames claim to
    end; then ``base`` counts the bytes that are left.
    """

    def __init__(self, stream: BinaryIO | Reader, size_bytes: int = WINDOW_BYTES, frames_at: int | None = None) -> None:
        self._stream = stream
        self._size_bytes = size_bytes
        self.data = bytes(PADDING_BYTES)
        self.end = 0
        self.base = 0
        self.at_end = False
        self.cuts: list[int] = []
        self.frames_end = 0
        self.read_bytes = 0  # with frames taken out: from the stream, heads included
        self._next_head = _NEVER if frames_at is None else frames_at
        self._split_head = b""  # the beginning of a head that the last read ended in
        self.on_move: Callable[[], None] | None = None  # called after every move

    def move(self, start: int, wanted_bytes: int = 0) -> None:
        """Drop what is before ``start`` and read on, at least until ``wanted_bytes`` are in sight if there are so many.

        Positions shrink by ``start``.
        """
        kept = self.data[start : self.end]
        self.cuts = [cut - start for cut in self.cuts if cut >= start]
        missing = max(self._size_bytes, wanted_bytes) - len(kept)
        parts = [kept]
        while missing > 0:
            # Never ask for more than a window at once: a length read from a hostile file is only a claim.
            part = self._stream.read(min(missing, self._size_bytes))
            if not part:
                self.at_end = True
                parts.append(self._split_head)
                break
            if self._next_head != _NEVER:
                missing -= self._without_heads(part, parts)
            else:
                parts.append(part)
                missing -= len(part)
        parts.append(bytes(PADDING_BYTES))
        self.base += start
        self.data = b"".join(parts)
        self.end = len(self.data) - PADDING_BYTES
        if self.on_move is not None:
            self.on_move()

    def _without_heads(self, part: bytes, parts: list[bytes]) -> int:
        """Append a part of the stream without the heads of frames; returns the bytes appended."""
        part = self._split_head + part
        first = self.read_bytes - len(self._split_head)  # the part's position in the stream
        self.read_bytes = first + len(part)
        self._split_head = b""
        before = sum(map(len, parts))
        at = 0
        appended = 0
        while self._next_head < self.read_bytes:
            head = self._next_head - first
            if part[head] != _FRAME:
                self._next_head = _NEVER  # no more frames, or an object too large for one
                break
            parts.append(part[at:head])
            appended += head - at
            at = head
            if head + _FRAME_HEAD_BYTES > len(part):
                self._split_head = part[head:]
                return appended
            size = int.from_bytes(part[head + 1 : head + _FRAME_HEAD_BYTES], "little")
            self.cuts.append(before + appended)
            at = head + _FRAME_HEAD_BYTES
            self._next_head = first + at + size
            self.frames_end = max(self.frames_end, self._next_head)
        parts.append(part[at:])
        return appended + len(part) - at
