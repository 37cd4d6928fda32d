"""Which input is a snapshot and which a log: decided by content."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, cast

from memtrace.errors import SnapshotError
from memtrace.explain.log_moment import lines_before
from memtrace.oomlog import LogReading, read_log
from memtrace.snapshot.container import open_stream

_PACKED = (b"\x1f\x8b", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd")
_OLD_PICKLE = re.compile(rb"^(\(dp|\(lp|\}q|\]q|\(d|\(l)[\x00-\xff]")
_JSON_KEYS = re.compile(rb'"(segments|device_traces|blocks|total_size|allocator_settings)"')
_BINARY = (b"PK\x03\x04", b"SQLite format 3\x00", b"\x89HDF", b"GGUF", b"\x7fELF")
_HEAD_BYTES = 4096
_TWICE_BYTES = 64 << 20


_SNAPSHOT_NAMES = (".pickle", ".pkl", ".pickle.gz", ".pickle.xz", ".pickle.zst")


def looks_like_snapshot(head: bytes) -> bool:
    """Whether the (unpacked) beginning of a file is a snapshot's: a pickle, or JSON with a snapshot's keys.

    Other binary formats count too, so that the loader says what they are.
    """
    if head.startswith(b"\x80") or head.startswith(_BINARY) or _OLD_PICKLE.match(head):
        return True
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    return start in (b"{", b"[") and bool(_JSON_KEYS.search(head))


def is_snapshot(source: str) -> bool:
    """Sniff a file, or stdin for ``-`` without consuming it. Raises SnapshotError if it can't be read."""
    if source == "-":
        stdin = cast(io.BufferedReader, sys.stdin.buffer)
        return looks_like_snapshot(stdin.peek(_HEAD_BYTES)[:_HEAD_BYTES])
    head = _head(source)
    if head.startswith(_PACKED):
        with open_stream(source) as opened:
            return looks_like_snapshot(opened.head)
    return looks_like_snapshot(head)


def _head(source: str) -> bytes:
    with _open(source) as raw:
        return raw.read(_HEAD_BYTES)


def _open(source: str) -> BinaryIO:
    path = Path(source)
    try:
        if path.is_dir():
            raise SnapshotError(f"{path}: a folder, neither a snapshot nor a log")
        return path.open("rb")
    except FileNotFoundError:
        raise SnapshotError(f"{path}: no such file") from None
    except OSError as error:
        raise SnapshotError(f"{path}: {error.strerror or error}") from None


def read_logs(sources: Sequence[str]) -> LogReading:
    """All logs in order as one reading, plain or packed; ``-`` is stdin. Lines are numbered within each log."""
    readings = [_read(source) for source in sources]
    first = readings[0]
    return replace(
        first,
        messages=tuple(message for reading in readings for message in reading.messages),
        summaries=tuple(summary for reading in readings for summary in reading.summaries),
        bytes_read=sum(reading.bytes_read for reading in readings),
        lines_read=sum(reading.lines_read for reading in readings),
        stopped_early=any(reading.stopped_early for reading in readings),
    )


def refuse_foreign(sources: Sequence[str]) -> None:
    """Raise SnapshotError for what can't be a log, once no message was found in it: a web page, a file of other
    content under a snapshot's name. A log under such a name is a log all the same."""
    for source in sources:
        head = b"" if source == "-" else _head(source)
        start = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:64].lower()
        if start.startswith((b"<!doctype", b"<html")):
            raise SnapshotError(f"{source}: an HTML page, neither a snapshot nor a log with an out-of-memory message")
        if source.lower().endswith(_SNAPSHOT_NAMES):
            what = "neither a snapshot nor a log with an out-of-memory message" if head else "the file is empty"
            raise SnapshotError(f"{source}: {what}")


def lines_of(sources: Sequence[str], line: int) -> list[str]:
    """The log up to a line, its last few hundred lines; [] for stdin, several logs, packed or very large ones, which
    are not read twice."""
    if len(sources) != 1 or sources[0] == "-" or line <= 0:
        return []
    path = Path(sources[0])
    if path.stat().st_size > _TWICE_BYTES or _head(sources[0]).startswith(_PACKED):
        return []
    with path.open(encoding="utf-8", errors="replace", newline="\n") as text:
        return lines_before(text, line)


def _read(source: str) -> LogReading:
    if source == "-":
        return read_log(sys.stdin.buffer)
    if _head(source).startswith(_PACKED):
        with open_stream(source) as opened:
            return read_log(opened.stream)
    with _open(source) as raw:
        return read_log(raw)
