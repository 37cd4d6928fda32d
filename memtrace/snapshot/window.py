"""A window that moves over a stream of bytes, so that a file of any size is decoded in a few megabytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO, Protocol

WINDOW_BYTES = 4 << 20
PADDING_BYTES = 4096  # zeros behind the end: reading a few fields too far finds no opcode instead of an IndexError


class Reader(Protocol):
    """Anything with ``read``."""

    def read(self, size: int = -1, /) -> bytes:
        """Up to ``size`` bytes; empty at the end."""


class Window:
    """``data[:end]`` are the bytes now in sight; ``base`` is where they begin in the whole stream."""

    def __init__(self, stream: BinaryIO | Reader, size_bytes: int = WINDOW_BYTES) -> None:
        self._stream = stream
        self._size_bytes = size_bytes
        self.data = bytes(PADDING_BYTES)
        self.end = 0
        self.base = 0
        self.at_end = False
        self.on_move: Callable[[], None] | None = None  # called after every move

    def move(self, start: int, wanted_bytes: int = 0) -> None:
        """Drop what is before ``start`` and read on, at least until ``wanted_bytes`` are in sight if there are so many.

        Positions shrink by ``start``.
        """
        kept = self.data[start : self.end]
        missing = max(self._size_bytes, wanted_bytes) - len(kept)
        parts = [kept]
        while missing > 0:
            # Never ask for more than a window at once: a length read from a hostile file is only a claim.
            part = self._stream.read(min(missing, self._size_bytes))
            if not part:
                self.at_end = True
                break
            parts.append(part)
            missing -= len(part)
        parts.append(bytes(PADDING_BYTES))
        self.base += start
        self.data = b"".join(parts)
        self.end = len(self.data) - PADDING_BYTES
        if self.on_move is not None:
            self.on_move()
