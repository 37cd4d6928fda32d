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
from bisect import bisect_right
from collections.abc import Iterator
from itertools import chain
from typing import Protocol

from memtrace.frozen import dataclass

_TRIGGERS: tuple[re.Pattern[bytes], ...] = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        # out of memory, out of device memory, out of resource; broken over lines or boxed
        rb"out of(?=[^\n\r]{0,24}(?:mem|resource)|[^a-z]{1,120}m|[^a-z0-9]{0,160}[\n\r]|[\\\x1b])",
        rb"mem(?:(?<=f mem)|(?<=outofmem)|(?<=f_mem)|(?<=ice_mem)|(?<=low on mem)|(?<=enough mem)|(?<=cache mem)"
        rb"|(?<=status_mem)|oryerror|oryallocation|ory_utiliz"
        rb"|ory (?:for the cache|utiliz|segment|object|\(shm))",
        # to allocate, unable to allocate, allocation on device, ALLOC_FAILED, bad_alloc, CUDACachingAllocator.cpp
        rb"alloc(?:at(?:e(?![drs])|ing|ion (?:on d|fail|was p)|or\.cpp)|_?failed| async|\W)",
        rb"total capac",
        rb"oom(?:(?<=with oom)|[-_ ]?kill|_reaper)",
        rb"kill(?:(?<=sigkill)|ed(?=\s|$|\W))",
        rb"exit(?:ed with)? ?(?:code|status)\W{0,12}(?:-9|137)\b",
        rb"_not_initialized",
        rb"valid cudnn algo",
        rb"resource(?:(?<=of_resource)|(?<=ofresource)|(?<=low on resource))",
        rb"all available ram",
        rb"nvml_success",
        rb"invalid buffer size",
        rb"paging file is too small",
    )
)
_SETTING = re.compile(rb"_ALLOC_CONF|xpandable_segments(?: is)? not supported|support expandable_segments")
_HINT = re.compile(rb"ry setting|to avoid|Memory Management")
_MOST_SETTINGS = 64
_AROUND_BYTES = 200
BLOCK_BYTES = 1 << 20
LOOK_BACK_BYTES = 768
LOOK_AHEAD_BYTES = 4096
"""A message of the longest format with generous wrapping and a prefix on every line fits in this."""
WINDOW_BYTES = 1 << 16
_MARGIN = 160  # bytes past a trigger's beginning that deciding about it may need
_LINE_END_SEARCH = 1024


class Readable(Protocol):
    """What a log may be."""

    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class TextWindow:
    """``data`` begins on line ``line`` (1-based)."""

    data: bytes
    line: int


def blocks(log: Readable) -> Iterator[bytes]:
    """The log as UTF-8 blocks; it may be UTF-16, as PowerShell redirects."""
    decoder: codecs.IncrementalDecoder | None = None
    for number, piece in enumerate(iter(lambda: log.read(BLOCK_BYTES) or b"", b"")):
        encoding = utf16(piece[:4096]) if number == 0 else None
        if encoding is not None:
            decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
        yield piece if decoder is None else decoder.decode(piece).encode("utf-8", "replace")


def _noting(stream: Iterator[bytes], settings: dict[str, None]) -> Iterator[bytes]:
    """The blocks as they are. Lines in them that set the allocator, or say that a setting has no effect, are added to
    ``settings``, each as far as 200 bytes around; an error's hint is none."""
    text, told = b"", 0
    for block in chain(stream, (b"",)):
        text += block
        end = len(text) - 2 * _AROUND_BYTES if block else len(text)  # what follows the others is still to come
        for hit in _SETTING.finditer(text, told):
            if hit.start() >= end or len(settings) >= _MOST_SETTINGS:
                break
            before = text[max(0, hit.start() - _AROUND_BYTES) : hit.start()].rpartition(b"\n")[2]
            line = before + text[hit.start() : hit.end() + _AROUND_BYTES].partition(b"\n")[0]
            if not _HINT.search(line):
                settings.setdefault(line.decode("utf-8", "replace").strip())
        done = max(0, max(told, end) - _AROUND_BYTES)
        text, told = text[done:], max(told, end) - done
        if block:
            yield block


def utf16(head: bytes) -> str | None:
    """Name of the UTF-16 flavour ``head`` looks like, if any: a byte order mark, or a NUL in every other place."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    for name, letters, nuls in (("utf-16-le", head[0::2], head[1::2]), ("utf-16-be", head[1::2], head[0::2])):
        if len(head) >= 16 and nuls.count(0) > 0.8 * len(nuls) and letters.count(0) < 0.1 * len(letters):
            return name
    return None


def windows(log: Readable, settings: dict[str, None]) -> Iterator[TextWindow]:
    """Stretches around every trigger, in order; lines that set the allocator are added to ``settings``."""
    buffer, line = b"", 1  # line: number of buffer[0]
    stream = _noting(blocks(log), settings)
    block = next(stream, None)
    while block is not None:
        following = next(stream, None)
        buffer += block
        block = following
        taken, keep = 0, len(buffer) - LOOK_BACK_BYTES - _MARGIN
        for group, limit in _groups(_triggers(buffer), buffer):
            if following is not None and group[-1] + LOOK_AHEAD_BYTES + _LINE_END_SEARCH > len(buffer):
                keep = min(keep, _line_start(buffer, group[0]))  # its stretch may not be complete yet
                break
            start = max(taken, _line_start(buffer, group[0]))
            taken = max(start, min(limit, _line_end(buffer, group[-1] + LOOK_AHEAD_BYTES)))
            yield TextWindow(buffer[start:taken], line + buffer.count(b"\n", 0, start))
        keep = max(taken, keep)
        line += buffer.count(b"\n", 0, keep)
        buffer = buffer[keep:]


def _triggers(block: bytes) -> list[int]:
    """Positions at which a message may be, ascending."""
    low = block.lower()
    return sorted(hit.start() for words in _TRIGGERS for hit in words.finditer(low))


def _groups(hits: list[int], buffer: bytes) -> Iterator[tuple[list[int], int]]:
    """Hits that belong in one stretch, and where that must end at the latest.

    Hits closer than the look-ahead share a stretch. A log that is nothing but triggers is cut at the beginning of a
    line where the distance between two of them is largest, which is between two messages rather than inside one.
    """
    apart = LOOK_AHEAD_BYTES + LOOK_BACK_BYTES
    while hits:
        far = (i for i in range(1, len(hits)) if hits[i] - hits[i - 1] > apart or hits[i] - hits[0] > WINDOW_BYTES)
        cut = next(far, len(hits))
        limit = hits[cut] - LOOK_BACK_BYTES if cut < len(hits) else len(buffer)
        if cut < len(hits) and hits[cut] - hits[cut - 1] <= apart:
            half = bisect_right(hits, hits[0] + WINDOW_BYTES // 2)
            cut = max(range(half, cut + 1), key=lambda i: hits[i] - hits[i - 1])
            before, after = hits[cut - 1], hits[cut]
            limit = buffer.rfind(b"\n", before, after) + 1 or max(before + 1, after - 128)
        yield hits[:cut], limit
        hits = hits[cut:]


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
