"""A log of any size -> the stretches of it that are worth reading closely.

A training log of hundreds of megabytes holds a handful of messages, so everything costly runs only near a trigger. The
log is read in blocks of a megabyte and searched for fixed words at C speed; they are chosen so that a line break or a
colour code anywhere inside a message leaves at least one of them whole: "out of memory" broken in two still shows
"out of" or "f memory". Every pattern begins with a literal, which Python's matcher looks for with its fast search;
what makes the literal meaningful is checked only where it occurs. Stretches never overlap, so no message is seen twice.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

_TRIGGERS: tuple[re.Pattern[bytes], ...] = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        # out of memory, out of device memory, out of resource; broken over lines or boxed
        rb"out of(?=[^\n\r]{0,24}(?:mem|resource)|[^a-z]{1,120}m|[^a-z0-9]{0,160}[\n\r]|[\\\x1b])",
        rb"mem(?:(?<=f mem)|(?<=outofmem)|(?<=f_mem)|(?<=ice_mem)|(?<=low on mem)|(?<=enough mem)|(?<=cache mem)"
        rb"|(?<=status_mem)|oryerror|oryallocation|ory_utiliz"
        rb"|ory (?:summary, dev|for the cache|utiliz|segment|object|\(shm))",
        # to allocate, unable to allocate, allocation on device, ALLOC_FAILED, bad_alloc, CUDACachingAllocator.cpp
        rb"alloc(?:at(?:e(?![drs])|ing|ion (?:on d|fail|was p)|or\.cpp)|_?failed| async|\W)",
        rb"total capac",
        rb"oom(?:(?<=with oom)|[-_ ]?kill|_reaper)",
        rb"kill(?:(?<=sigkill)|ed(?=\s|$|\W))",
        rb"exit ?(?:code|status)\W{0,12}(?:-9|137)\b",
        rb"_not_initialized",
        rb"valid cudnn algo",
        rb"resource(?:(?<=of_resource)|(?<=ofresource))",
        rb"nvml_success",
        rb"invalid buffer size",
        rb"paging file is too small",
    )
)
_SETTING = re.compile(rb"_ALLOC_CONF|xpandable_segments(?: is)? not supported|support expandable_segments")
_HINT = re.compile(rb"ry setting|to avoid|Memory Management")
_MOST_SETTINGS = 64
BLOCK_BYTES = 1 << 20
LOOK_BACK_BYTES = 768
LOOK_AHEAD_BYTES = 4096
"""A message of the longest format with generous wrapping and a prefix on every line fits in this."""
WINDOW_BYTES = 1 << 16
_MARGIN = 160  # bytes past a hit that deciding about it may need
_LINE_END_SEARCH = 1024


class Readable(Protocol):
    """What a log may be: anything with ``read(n)`` that returns bytes (text is encoded)."""

    def read(self, size: int, /) -> bytes | str: ...


@dataclass(frozen=True, slots=True)
class TextWindow:
    """``data`` begins on line ``line`` (1-based)."""

    data: bytes
    line: int


@dataclass
class Tally:
    """How much has been read so far."""

    bytes_read: int = 0
    lines_read: int = 0
    settings: dict[str, None] = field(default_factory=dict)
    """Lines that set the allocator, or say that a setting has no effect."""

    def note_settings(self, buffer: bytes, start: int) -> None:
        """Keep such lines of a buffer from ``start`` on; an error's hint is none."""
        for hit in _SETTING.finditer(buffer, start):
            low, high = buffer.rfind(b"\n", 0, hit.start()) + 1, buffer.find(b"\n", hit.end())
            line = buffer[max(low, hit.start() - 200) : min(high if high >= 0 else len(buffer), hit.end() + 200)]
            if len(self.settings) < _MOST_SETTINGS and not _HINT.search(line):
                self.settings[line.decode("utf-8", "replace").strip()] = None


def blocks(source: Readable | bytes | str) -> Iterator[bytes]:
    """The log as UTF-8 blocks, whatever it came as: bytes, text, a stream; UTF-16 (a PowerShell redirect) too."""
    if isinstance(source, bytes | str):
        pieces: Iterator[bytes | str] = (source[i : i + BLOCK_BYTES] for i in range(0, len(source), BLOCK_BYTES))
    else:
        pieces = iter(lambda: source.read(BLOCK_BYTES) or b"", b"")
    decoder: codecs.IncrementalDecoder | None = None
    for number, piece in enumerate(pieces):
        if isinstance(piece, str):
            yield piece.encode("utf-8", "replace")
            continue
        encoding = _utf16(piece[:4096]) if number == 0 else None
        if encoding is not None:
            decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
        yield bytes(piece) if decoder is None else decoder.decode(bytes(piece)).encode("utf-8", "replace")


def _utf16(head: bytes) -> str | None:
    """Name of the UTF-16 flavour ``head`` looks like, if any: a byte order mark, or a NUL in every other place."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    for name, letters, nuls in (("utf-16-le", head[0::2], head[1::2]), ("utf-16-be", head[1::2], head[0::2])):
        if len(head) >= 16 and nuls.count(0) > 0.8 * len(nuls) and letters.count(0) < 0.1 * len(letters):
            return name
    return None


def windows(source: Readable | bytes | str, tally: Tally, enough: Callable[[], bool]) -> Iterator[TextWindow]:
    """Stretches around every trigger, in order; ``tally`` is kept up to date, and once ``enough()`` is true the rest is
    only counted."""
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
        tally.note_settings(buffer, max(0, scanned - _MARGIN))
        end = len(buffer) if last else max(scanned, len(buffer) - _MARGIN)
        pending += _triggers(buffer, scanned, end)
        scanned = end
        taken = 0
        while pending:
            group, rest = _split_group(pending, buffer)
            limit = rest if rest is not None else len(buffer)
            if rest is None and not last and group[-1] + LOOK_AHEAD_BYTES + _LINE_END_SEARCH > len(buffer):
                break
            start = max(taken, _line_start(buffer, group[0]))
            stop = max(start, min(limit, _line_end(buffer, group[-1] + LOOK_AHEAD_BYTES)))
            yield TextWindow(buffer[start:stop], line + buffer.count(b"\n", 0, start))
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


def _triggers(block: bytes, start: int, end: int) -> list[int]:
    """Positions in ``block[start:end]`` at which a message may be, ascending."""
    low = block.lower()
    reach = min(len(low), end + _MARGIN)
    return sorted(hit.start() for words in _TRIGGERS for hit in words.finditer(low, start, reach) if hit.start() < end)


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
            return 0 if low == 0 else place + 1 if place < at else low
        place = newline
    return place + 1


def _line_end(buffer: bytes, at: int) -> int:
    newline = buffer.find(b"\n", at, at + _LINE_END_SEARCH)
    return newline + 1 if newline >= 0 else min(len(buffer), at)
