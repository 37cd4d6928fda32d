"""Files that are either whole or not there, and never take an older file's place.

A snapshot is written to a hidden temporary file in the same folder, flushed to disk, and then linked to its final name,
which fails if that name is taken; the next free number is used then. A process killed in the middle leaves only the
temporary file, which the next recording in that folder removes.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import tempfile
from pathlib import Path
from typing import Any

PICKLE_PROTOCOL = 4  # the newest that PyTorch's own web viewer reads
BLANK = " " * 70_000  # stands for a text that is not known yet; longer than a pickle's frames (64 KiB)
_BINUNICODE = b"X"
_TEMPORARY = f".memtrace-{socket.gethostname()}-"  # on a shared file system every host minds its own


def writable_folder(folder: Path) -> tuple[Path, str | None]:
    """``folder``, created where missing, or a fresh temporary folder and why the wanted one can't be used."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Path(tempfile.mkdtemp(prefix="memtrace-")), f"cannot write to {folder}: {error.strerror or error}"
    return folder, None


def write_snapshot(snapshot: dict[str, Any], wanted: Path, force: bool = False) -> Path:
    """Pickle a snapshot under ``wanted``, or under a numbered name where that exists. Raises OSError.

    With ``force`` an existing file is replaced, atomically.
    """
    remove_stale(wanted.parent)
    temporary = wanted.parent / f"{_TEMPORARY}{os.getpid()}.tmp"
    try:
        with temporary.open("wb") as stream:
            pickle.dump(snapshot, stream, protocol=PICKLE_PROTOCOL)
            stream.flush()
            os.fsync(stream.fileno())
        if force:
            temporary.replace(wanted)
            return wanted
        return _publish(temporary, wanted)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _publish(temporary: Path, wanted: Path) -> Path:
    number = 1
    while True:
        name = wanted if number == 1 else wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}")
        try:
            os.link(temporary, name)
            return name
        except FileExistsError:
            number += 1
        except OSError:  # a file system without hard links
            if not name.exists():
                temporary.replace(name)
                return name
            number += 1


def rename(path: Path, wanted: Path, force: bool = False) -> Path:
    """Give a file another name, a numbered one where that is taken. Raises OSError."""
    if force:
        path.replace(wanted)
        return wanted
    renamed = _publish(path, wanted)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    return renamed


def fill_blank(path: Path, text: str) -> None:
    """Put ``text`` in the place of the one string of ``BLANK`` in a snapshot, atomically. Raises OSError.

    So long a string stands outside the pickle's frames, so its length may change. Does nothing where there is none.
    """
    content = path.read_bytes()
    header = _BINUNICODE + len(BLANK).to_bytes(4, "little")
    at = content.rfind(header + BLANK.encode())
    if at < 0:
        return
    filling = text.encode("utf-8", "replace")
    parts = [content[:at], _BINUNICODE, len(filling).to_bytes(4, "little"), filling]
    _write_whole(path, b"".join([*parts, content[at + len(header) + len(BLANK) :]]))


def _write_whole(path: Path, content: bytes) -> None:
    """Replace a file's content atomically."""
    temporary = path.parent / f"{_TEMPORARY}{os.getpid()}.tmp"
    try:
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def remove_stale(folder: Path) -> None:
    """Remove temporary files of recordings whose process is gone."""
    for path in folder.glob(f"{_TEMPORARY}*.tmp"):
        pid = path.name.removeprefix(_TEMPORARY).removesuffix(".tmp")
        if pid.isdigit() and int(pid) != os.getpid() and not _alive(int(pid)):
            with contextlib.suppress(OSError):
                path.unlink()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's process
        return True
    return True
