"""A file that is believed only with its writer's seal, and read only where it is needed.

``MAGIC``, a keyed hash of the head, the head: lengths, a mark that says what the content belongs to, and a hash of each
piece of the content; then the content. A piece is hashed when it is read.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

MAGIC = b"memtrace index 2\n"
_SEAL_BYTES = 32
_DIGEST_BYTES = 16
_PIECE_BYTES = 1 << 18
_LENGTHS = 2  # of the mark and of the content, 8 bytes each
_MAX_MARK_BYTES = 1 << 16


class Broken(ValueError):
    """Not a sealed file, not by this key, or damaged since."""


def write_sealed(out: BinaryIO, key: bytes, mark: bytes, parts: Sequence[bytes | memoryview]) -> None:
    """Write a sealed file."""
    digests = b"".join(_digest(piece) for piece in _pieces(parts))
    size = sum(len(part) for part in parts)
    head = len(mark).to_bytes(8, "little") + size.to_bytes(8, "little") + mark + digests
    out.write(MAGIC + _seal(head, key) + head)
    for part in parts:
        out.write(part)


def sealed_bytes(mark: bytes, parts: Sequence[bytes | memoryview]) -> int:
    """How large :func:`write_sealed` makes a file."""
    size = sum(len(part) for part in parts)
    return len(MAGIC) + _SEAL_BYTES + 8 * _LENGTHS + len(mark) + -(-size // _PIECE_BYTES) * _DIGEST_BYTES + size


class Sealed:
    """A sealed file that was opened with its key. Raises Broken where it is not what it should be."""

    def __init__(self, path: Path, key: bytes) -> None:
        self._file = path.open("rb", buffering=0)
        try:
            self._read_head(key)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; nothing more can be read."""
        self._file.close()

    def _read_head(self, key: bytes) -> None:
        start = len(MAGIC) + _SEAL_BYTES
        begin = self._file.read(start + 8 * _LENGTHS)
        lengths = begin[start:]
        if not begin.startswith(MAGIC) or len(lengths) < 8 * _LENGTHS:
            raise Broken("no index")
        mark_bytes, self._size = int.from_bytes(lengths[:8], "little"), int.from_bytes(lengths[8:], "little")
        digest_bytes = -(-self._size // _PIECE_BYTES) * _DIGEST_BYTES
        self._begin = len(begin) + mark_bytes + digest_bytes
        if mark_bytes > _MAX_MARK_BYTES or os.fstat(self._file.fileno()).st_size != self._begin + self._size:
            raise Broken("cut short")
        rest = self._file.read(mark_bytes + digest_bytes)
        seal = begin[len(MAGIC) : start]
        if not hmac.compare_digest(_seal(lengths + rest, key), seal):
            raise Broken("not sealed by this key")
        self.mark, self._digests = rest[:mark_bytes], rest[mark_bytes:]

    def read(self, first: int, stop: int) -> memoryview:
        """Bytes ``first`` to ``stop - 1`` of the content."""
        if not 0 <= first <= stop <= self._size:
            raise Broken("beyond the end")
        low = first // _PIECE_BYTES * _PIECE_BYTES
        high = min(-(-stop // _PIECE_BYTES) * _PIECE_BYTES, self._size)
        data = bytearray(max(high - low, 0))
        view = memoryview(data)
        self._file.seek(self._begin + low)
        done = 0
        while done < len(data):
            count = self._file.readinto(view[done:])
            if not count:
                raise Broken("cut short")
            done += count
        for at in range(0, len(data), _PIECE_BYTES):
            digest = (low + at) // _PIECE_BYTES * _DIGEST_BYTES
            if _digest(view[at : at + _PIECE_BYTES]) != self._digests[digest : digest + _DIGEST_BYTES]:
                raise Broken("damaged")
        return view[first - low : stop - low]


def _seal(head: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(head, key=key, digest_size=_SEAL_BYTES).digest()


def _digest(piece: bytes | memoryview) -> bytes:
    return hashlib.blake2b(piece, digest_size=_DIGEST_BYTES).digest()


def _pieces(parts: Sequence[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The parts, one behind the other, cut into pieces."""
    waiting: list[bytes | memoryview] = []
    missing = _PIECE_BYTES
    for part in parts:
        view = memoryview(part)
        while len(view):
            taken = view[:missing]
            view = view[len(taken) :]
            waiting.append(taken)
            missing -= len(taken)
            if not missing:
                yield waiting[0] if len(waiting) == 1 else b"".join(waiting)
                waiting, missing = [], _PIECE_BYTES
    if waiting:
        yield b"".join(waiting)
