"""A log of any size -> the stretches of it that are worth reading closely.

Bounded memory: the log is read in blocks of a megabyte and only a few kilobytes around each trigger are handed on.
Stretches never overlap, so no message can be seen twice.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from .triggers import MARGIN, find_triggers, is_plain

BLOCK_BYTES = 1 << 20
LOOK_BACK_BYTES = 768
LOOK_AHEAD_BYTES = 4096
"""A message of the longest format with generous wrapping and a prefix on every line fits in this."""
WINDOW_BYTES = 1 << 16
_LINE_END_SEARCH = 1024


class Readable(Protocol):
    """What a log may be: anything with ``read(n)`` that returns bytes (text is encoded)."""

    def read(self, size: int, /) -> bytes | str: ...


@dataclass(frozen=True, slots=True)
class Window:
    """``data`` begins on line ``line`` (1-based)."""

    data: bytes
    line: int


@dataclass
class Tally:
    """How much has been read so far."""

    bytes_read: int = 0
    lines_read: int = 0
    fruitless_bytes: int = 0
    """Bytes in stretches that turned out to hold no message (kept by the reader)."""


def blocks(source: Readable | bytes | str) -> Iterator[bytes]:
    """The log as UTF-8 blocks, whatever it came as: bytes, text, a stream; UTF-16 (a PowerShell redirect) too."""
    if isinstance(source, bytes | bytearray | memoryview):
        raw: Iterator[bytes] = (bytes(source[i : i + BLOCK_BYTES]) for i in range(0, len(source), BLOCK_BYTES))
    elif isinstance(source, str):
        raw = (_encode(source[i : i + BLOCK_BYTES]) for i in range(0, len(source), BLOCK_BYTES))
    else:
        raw = _read_all(source)
    first = next(raw, b"")
    encoding = _utf16(first[:4096])
    if encoding is None:
        if first:
            yield first
        yield from raw
        return
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    yield _encode(decoder.decode(first))
    for block in raw:
        yield _encode(decoder.decode(block))


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _read_all(stream: Readable) -> Iterator[bytes]:
    while chunk := stream.read(BLOCK_BYTES):
        yield _encode(chunk) if isinstance(chunk, str) else bytes(chunk)


def _utf16(head: bytes) -> str | None:
    """Name of the UTF-16 flavour ``head`` looks like, if any: a byte order mark, or a NUL in every other place."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if len(head) >= 16:
        even, odd = head[0::2], head[1::2]
        if odd.count(0) > 0.8 * len(odd) and even.count(0) < 0.1 * len(even):
            return "utf-16-le"
        if even.count(0) > 0.8 * len(even) and odd.count(0) < 0.1 * len(odd):
            return "utf-16-be"
    return None


def windows(
    source: Readable | bytes | str, tally: Tally, enough: Callable[[], bool], strict: Callable[[], bool]
) -> Iterator[Window]:
    """Stretches around every trigger, in order; ``tally`` is kept up to date.

    Once ``enough()`` is true the rest is only counted; while ``strict()`` is, triggers count only in blocks that hold
    unbroken words of a message.
    """
    buffer = b""
    line = 1  # line number of buffer[0]
    scanned = 0  # triggers before this place in the buffer are known
    pending: list[int] = []  # known triggers whose stretch may not be complete yet
    stream = blocks(source)
    block = next(stream, None)
    while block is not None:
        following = next(stream, None)
        last = following is None
        tally.bytes_read += len(block)
        tally.lines_read += block.count(b"\n") + (last and not block.endswith(b"\n"))
        if enough():
            buffer, pending, block = b"", [], following
            continue
        buffer += block
        end = len(buffer) if last else max(scanned, len(buffer) - MARGIN)
        if not strict() or is_plain(buffer[max(0, scanned - MARGIN) :]):
            pending += find_triggers(buffer, scanned, end, at_end=last)
        scanned = end
        taken = 0
        while pending:
            group, rest = _split_group(pending, buffer)
            limit = rest if rest is not None else len(buffer)
            if rest is None and not last and group[-1] + LOOK_AHEAD_BYTES + _LINE_END_SEARCH > len(buffer):
                break
            start = max(taken, _line_start(buffer, group[0]))
            stop = max(start, min(limit, _line_end(buffer, group[-1] + LOOK_AHEAD_BYTES)))
            yield Window(buffer[start:stop], line + buffer.count(b"\n", 0, start))
            taken = stop
            pending = pending[len(group) :]
        keep = max(taken, scanned - LOOK_BACK_BYTES)
        if pending:
            keep = max(taken, min(keep, _line_start(buffer, pending[0])))
        line += buffer.count(b"\n", 0, keep)
        buffer = buffer[keep:]
        scanned -= keep
        pending = [at - keep for at in pending]
        block = following


def _split_group(hits: list[int], buffer: bytes) -> tuple[list[int], int | None]:
    """First hits that belong in one stretch, and where the next stretch must begin at the earliest (None: open).

    Hits closer than the look-ahead share a stretch. A log that is nothing but triggers is cut at the beginning of a
    line where the distance between two of them is largest, which is between two messages rather than inside one.
    """
    half = 0
    for index in range(1, len(hits)):
        if hits[index] - hits[index - 1] > LOOK_AHEAD_BYTES + LOOK_BACK_BYTES:
            return hits[:index], hits[index] - LOOK_BACK_BYTES
        if not half and hits[index] - hits[0] > WINDOW_BYTES // 2:
            half = index
        if hits[index] - hits[0] > WINDOW_BYTES:
            widest = max(range(half, index + 1), key=lambda i: hits[i] - hits[i - 1])
            before, after = hits[widest - 1], hits[widest]
            newline = buffer.rfind(b"\n", before, after)
            return hits[:widest], newline + 1 if newline >= 0 else max(before + 1, after - 128)
    return hits, None


def _line_start(buffer: bytes, at: int) -> int:
    """Beginning of a line some lines before the one of ``at``, within the look-back; or the look-back itself.

    Several lines, for a progress bar may be drawn twice between two halves of "out of memory".
    """
    low = max(0, at - LOOK_BACK_BYTES)
    place = at
    for _ in range(8):
        newline = max(buffer.rfind(b"\n", low, place), buffer.rfind(b"\r", low, place))
        if newline < 0:
            break
        place = newline
    else:
        return place + 1
    if low == 0:
        return 0
    return place + 1 if place < at else low


def _line_end(buffer: bytes, at: int) -> int:
    newline = buffer.find(b"\n", at, at + _LINE_END_SEARCH)
    return newline + 1 if newline >= 0 else min(len(buffer), at)
