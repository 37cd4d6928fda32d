"""Which input is a snapshot and which a log: decided by content."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from memtrace.errors import MemtraceError, SnapshotError
from memtrace.snapshot.container import never_ends, open_stream
from memtrace.snapshot.decoder.decode import bounded_memory, memory_allowance_bytes

if TYPE_CHECKING:  # here and below: what reads logs is not needed for a snapshot alone
    from memtrace.oomlog import LogReading, OomMessage

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
    return looks_like_snapshot(beginning(source))


def beginning(source: str) -> bytes:
    """The first 4 KiB of a file, unpacked. Raises SnapshotError if it can't be read."""
    with _unpacked(source) as stream:
        return stream.read(_HEAD_BYTES)


def is_log(path: Path) -> bool:
    """Whether a file that is no snapshot is a log with an out-of-memory message; False where it can't be read, or is
    larger than 64 MiB."""
    from memtrace.oomlog import read_log

    try:
        if not path.is_file() or path.stat().st_size > _TWICE_BYTES:
            return False
        if looks_like_snapshot(beginning(str(path))):
            return False
        with _unpacked(str(path)) as file:
            return bool(read_log(file).messages)
    except (MemtraceError, OSError, ValueError):
        return False


@contextmanager
def _unpacked(source: str) -> Iterator[BinaryIO]:
    """A file's content, whether packed or plain. Raises SnapshotError if it can't be read."""
    path = Path(source)
    try:
        if path.is_dir():
            raise SnapshotError(f"{path}: a folder, neither a snapshot nor a log")
        if never_ends(path):
            raise SnapshotError(f"{path}: a device that never ends, neither a snapshot nor a log")
        raw = path.open("rb")
    except FileNotFoundError:
        raise SnapshotError(f"{path}: no such file") from None
    except OSError as error:
        raise SnapshotError(f"{path}: {error.strerror or error}") from None
    with raw:
        if not raw.peek(_HEAD_BYTES).startswith(_PACKED):
            yield _printed(raw) if path.suffix == ".ipynb" else raw
            return
    with open_stream(source) as opened:
        yield opened.stream


def _printed(raw: BinaryIO) -> BinaryIO:
    """What the cells of a saved notebook printed, and their tracebacks, as a log has them; else the file itself."""
    content = raw.read(_TWICE_BYTES)
    try:
        with bounded_memory(memory_allowance_bytes(len(content), is_compressed=False)):
            outputs = [out for cell in json.loads(content)["cells"] for out in cell.get("outputs", ())]
            texts = ["\n".join(out.get("traceback", ())) or "".join(out.get("text", "")) for out in outputs]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError):
        raw.seek(0)
        return raw
    return io.BytesIO("\n".join(texts).encode(errors="replace"))


class Logs:
    """Logs read, plain or packed, in order as one reading; ``-`` is stdin. Lines are numbered within each log."""

    def __init__(self, sources: Sequence[str]) -> None:
        self.sources = tuple(sources)
        self._stdin: list[bytes] = []  # its beginning: it can't be read twice
        self._readings = readings = [self._read(source) for source in sources]
        self.reading = replace(
            readings[0],
            messages=tuple(message for reading in readings for message in reading.messages),
            stopped_early=any(reading.stopped_early for reading in readings),
            settings=tuple(line for reading in readings for line in reading.settings),
        )

    def _read(self, source: str) -> LogReading:
        from memtrace.oomlog import read_log

        if source == "-":
            return read_log(self)
        with _unpacked(source) as stream:
            return read_log(stream)

    def read(self, size: int, /) -> bytes:
        """Standard input, kept up to a bound."""
        data = sys.stdin.buffer.read(size)
        if sum(map(len, self._stdin)) < _TWICE_BYTES:
            self._stdin.append(data)
        return data

    def around(self, message: OomMessage) -> tuple[list[str], list[str]]:
        """Lines up to a message's, in its log, and behind it; none for a pipe and a very large log, which are not read
        twice."""
        from memtrace.explain.traceback import lines_around

        own = (any(one is message for one in reading.messages) for reading in self._readings)
        source = self.sources[[*own].index(True)]
        if source == "-":
            told = b"".join(self._stdin)
            return lines_around(_lines(io.BytesIO(told), told[:_HEAD_BYTES]), message.line)
        if not Path(source).is_file() or Path(source).stat().st_size > _TWICE_BYTES:
            return [], []
        with _unpacked(source) as stream:
            return lines_around(_lines(stream, beginning(source)), message.line)


def _lines(stream: BinaryIO, head: bytes) -> Iterable[bytes]:
    """Lines of a log in UTF-8, as what finds messages numbers them."""
    from memtrace.oomlog.windows import utf16

    encoding = utf16(head)
    if encoding is None:
        return stream
    return (line.encode("utf-8", "replace") for line in io.TextIOWrapper(stream, encoding, "replace", "\n"))


def refuse_foreign(sources: Sequence[str]) -> None:
    """Raise SnapshotError for what can't be a log, once no message was found in it: a web page, a file of other
    content under a snapshot's name. A log under such a name is a log all the same."""
    for source in sources:
        head = beginning(source) if source != "-" else b""
        start = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:64].lower()
        if start.startswith((b"<!doctype", b"<html")):
            raise SnapshotError(
                f"{source}: an HTML page, neither a snapshot nor a log with an out-of-memory message; "
                "of a viewer's page give the .pickle it was made from"
            )
        if source.lower().endswith(_SNAPSHOT_NAMES):
            what = "neither a snapshot nor a log with an out-of-memory message" if head else "the file is empty"
            raise SnapshotError(f"{source}: {what}")
