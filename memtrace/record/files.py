"""Files that are either whole or not there, and never take an older file's place.

A snapshot is linked to its final name when it is whole, which fails if that name is taken; the next free number is
used then.
"""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path
from typing import Any

from memtrace.writing import draft

PICKLE_PROTOCOL = 4  # the newest that PyTorch's own web viewer reads


def writable_folder(folder: Path) -> tuple[Path, str | None]:
    """``folder``, created where missing, or a fresh temporary folder and why the wanted one can't be used."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Path(tempfile.mkdtemp(prefix="memtrace-")), f"cannot write to {folder}: {error.strerror or error}"
    return folder, None


def write_snapshot(snapshot: dict[str, Any], wanted: Path, force: bool = False, mode: int = 0o666) -> Path:
    """Pickle a snapshot under ``wanted``, or under a numbered name where that exists. Raises OSError.

    With ``force`` an existing file is replaced, atomically.
    """
    with draft(wanted.parent, mode) as made:
        pickle.dump(snapshot, made.out, protocol=PICKLE_PROTOCOL)
        return made.replace(wanted) if force else made.take_free_name(wanted)


def add_oom_message(path: Path, text: str) -> None:
    """Put an error's text into a snapshot that this process wrote before it was known. Raises OSError."""
    with path.open("rb") as stream:
        snapshot = pickle.load(stream)
    snapshot["memtrace"]["oom"]["message"] = text
    write_snapshot(snapshot, path, force=True)
