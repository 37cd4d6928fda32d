"""What a file really is, and a stream of its uncompressed bytes. Names and suffixes are never trusted."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, cast

from memtrace.errors import SnapshotError

# A real dump compresses 20 to 40 times; a bomb thousands of times. Small files get a floor instead of a ratio.
_MAX_RATIO = 400
_MIN_LIMIT_BYTES = 256 << 20

_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\x1f\x8b", "gz"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"\x28\xb5\x2f\xfd", "zst"),
)
_PACKED = tuple(magic for magic, _ in _MAGIC)
_PIPE_LIMIT_BYTES = 16 << 30
_ENDING_DEVICES = (Path(os.devnull), Path("/dev/stdin"), Path("/dev/tty"))
_PIPE_PART_BYTES = 1 << 20
LEGACY_CHECKPOINT = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # torch.save before 1.6 begins with this number


class _Bounded(io.RawIOBase):
    """A decompressed stream that refuses to grow past a bound, counts its bytes and reports progress."""

    def __init__(self, inner: IO[bytes], limit_bytes: int, on_bytes: Callable[[int], None] | None) -> None:
        self._inner = inner
        self._limit_bytes = limit_bytes
        self._on_bytes = on_bytes
        self.count_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            count: int = self._inner.readinto(buffer)  # type: ignore[attr-defined]
        except EOFError:
            raise SnapshotError("ends in the middle; the file was cut short") from None
        except Exception as error:  # each format has an error class of its own
            detail = " ".join(str(error).split())[:100]
            raise SnapshotError(f"can't be unpacked ({detail})") from None
        self.count_bytes += count
        if self.count_bytes > self._limit_bytes:
            raise SnapshotError(
                f"unpacks to more than {self._limit_bytes >> 20} MiB, far beyond what a snapshot of this size can hold"
            )
        if self._on_bytes is not None:
            self._on_bytes(self.count_bytes)
        return count


def zip_names(source: BinaryIO | Path) -> list[str] | None:
    """What a zip archive holds; None for a damaged one."""
    import zipfile

    try:
        with zipfile.ZipFile(source) as archive:
            return archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError):
        return None


def is_checkpoint(names: list[str]) -> bool:
    """Whether an archive of these files is one of torch.save."""
    return any(name.endswith("data.pkl") for name in names)


def _refuse_foreign(head: bytes, name: str, source: BinaryIO) -> None:
    """Raise the one line that fits for files people confuse with snapshots."""
    if not head:
        raise SnapshotError(f"{name}: the file is empty; the dump was never written or was interrupted")
    if head.startswith(b"SQLite format 3\x00"):
        raise SnapshotError(
            f"{name}: a SQLite file (a dump of a snapshot, or Nsight's), which memtrace does not read; dump a pickle"
        )
    if head.startswith(b"PK\x03\x04"):
        names = zip_names(source)
        kind = "a PyTorch checkpoint (torch.save)" if is_checkpoint(names or []) else "a zip archive"
        if names is None:
            kind = "a damaged zip archive"
        raise SnapshotError(f"{name}: {kind}, not a memory snapshot")
    if head[2:].startswith(LEGACY_CHECKPOINT):
        raise SnapshotError(f"{name}: a PyTorch checkpoint (torch.save, old format), not a memory snapshot")
    if head.startswith((b"\x89HDF", b"GGUF")) or head[8:10] == b'{"':
        raise SnapshotError(f"{name}: a file of model weights, not a memory snapshot")
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:64].lower()
    if start.startswith((b"<!doctype", b"<html", b"<head", b"<script", b"<!--")) or b"<html" in head.lower():
        raise SnapshotError(
            f"{name}: an HTML page (torch's _memory_viz embeds a snapshot in one); "
            "give memtrace the .pickle it was made from"
        )


def _decompressor(kind: str, raw: BinaryIO) -> IO[bytes]:
    if kind == "gz":
        import gzip

        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if kind == "xz":
        import lzma

        return cast(IO[bytes], lzma.LZMAFile(raw))
    import zstandard

    return cast(
        IO[bytes], zstandard.ZstdDecompressor(max_window_size=1 << 28).stream_reader(raw, read_across_frames=True)
    )


def is_pickle(head: bytes) -> bool:
    """Whether a file that begins like this can be a pickle of a snapshot."""
    return head[:1] in (b"\x80", b"(", b"]", b"}")


def is_json(head: bytes) -> bool:
    """Whether a file that begins like this can be JSON of a snapshot."""
    return head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[")


def half_of_free_memory_bytes() -> int:
    """What a stranger's file may take at most; without bound where the system does not tell (not Linux)."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 9
    except (OSError, ValueError, IndexError):
        pass
    return 1 << 62


def _pipe_limit_bytes() -> int:
    """How much of a pipe is held at most."""
    return min(half_of_free_memory_bytes(), _PIPE_LIMIT_BYTES)


def _read_pipe(stream: BinaryIO, name: str) -> tuple[BinaryIO, str, int]:
    """All of a stream that can't be rewound, or enough to tell that it is not a snapshot: (content, name, bytes).

    Raises SnapshotError for a stream that doesn't end.
    """
    limit_bytes = _pipe_limit_bytes()
    content = io.BytesIO()
    while part := stream.read(_PIPE_PART_BYTES):
        content.write(part)
        size = content.tell()
        if size > limit_bytes:
            raise SnapshotError(f"{name}: no end after {limit_bytes >> 20} MiB; save it to a file and give that")
        if size <= _PIPE_PART_BYTES:
            head = content.getvalue()[:4096]
            if len(head) == 4096 and not (head.startswith(_PACKED) or is_pickle(head) or is_json(head)):
                break  # whatever it is, its beginning tells
    size = content.tell()
    content.seek(0)
    return content, name, size


def _open_raw(source: str | os.PathLike[str]) -> tuple[BinaryIO, str, int]:
    """A seekable byte stream, its name for messages, and its size in bytes."""
    if os.fspath(source) == "-":
        return _read_pipe(cast(BinaryIO, sys.stdin.buffer), "stdin")
    path = Path(source)
    try:
        if path.is_dir():
            raise SnapshotError(f"{path}: a folder, not a snapshot file")
        raw = path.open("rb")
    except FileNotFoundError:
        raise SnapshotError(f"{path}: no such file") from None
    except OSError as error:
        raise SnapshotError(f"{path}: {error.strerror or error}") from None
    if not raw.seekable():  # a pipe or /dev/stdin
        with raw:
            return _read_pipe(cast(BinaryIO, raw), str(path))
    return cast(BinaryIO, raw), str(path), os.fstat(raw.fileno()).st_size


def never_ends(path: Path) -> bool:
    """Whether it is a device such as ``/dev/zero``."""
    return path.is_char_device() and path not in _ENDING_DEVICES


def read_at_most(path: Path, most_bytes: int, what: str) -> bytes:
    """A small file's content. Raises SnapshotError if it can't be read or is larger."""
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except (OSError, ValueError) as error:
        raise SnapshotError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > most_bytes:
        raise SnapshotError(f"{path}: too large for a {what}")
    return content


class Source(NamedTuple):
    """An opened file: its uncompressed content from the start, that content's first bytes, and what it is on disk.

    ``rewind`` gives a new stream of the content from the start; the old one is then done.
    """

    stream: BinaryIO
    head: bytes
    name: str
    size_bytes: int
    is_compressed: bool
    rewind: Callable[[], BinaryIO]


@contextmanager
def open_stream(source: str | os.PathLike[str], on_progress: Callable[[float], None] | None = None) -> Iterator[Source]:
    """Yield the file's uncompressed content.

    ``on_progress`` is called with the share (0 to 1) of the file on disk that has been read.
    Raises SnapshotError for what is not a snapshot, is too large once unpacked, or can't be opened.
    """
    raw, name, size_bytes = _open_raw(source)
    with raw:
        head = raw.read(4096)
        raw.seek(0)
        kind = next((kind for magic, kind in _MAGIC if head.startswith(magic)), "")
        limit_bytes = max(_MIN_LIMIT_BYTES, _MAX_RATIO * size_bytes) if kind else 1 << 62

        def report(_: int) -> None:
            if on_progress is not None:
                on_progress(min(1.0, raw.tell() / max(size_bytes, 1)))

        def start() -> io.BufferedReader:
            raw.seek(0)
            inner: IO[bytes] = _decompressor(kind, raw) if kind else raw
            # A growing file may outrun the size first seen: only unpacked data is bounded.
            bounded = _Bounded(inner, limit_bytes, report if on_progress else None)
            return io.BufferedReader(bounded, buffer_size=1 << 18)

        if not kind:
            _refuse_foreign(head, name, raw)
        stream = start()
        if kind:
            try:
                head = stream.peek(4096)[:4096]
            except SnapshotError as error:
                raise SnapshotError(f"{name}: {error}") from None
            _refuse_foreign(head, name, io.BytesIO())
        yield Source(cast(BinaryIO, stream), head, name, size_bytes, bool(kind), lambda: cast(BinaryIO, start()))
