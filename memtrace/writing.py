"""Output files: written whole or not at all, and never over what was read."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from memtrace.errors import UsageError


def check_target(path: Path, force: bool, *sources: str | None) -> None:
    """Raise UsageError before any work is done if writing ``path`` would lose something or can't succeed.

    ``sources`` are the files that are read (None and ``-`` are none): those are not overwritten even with ``force``.
    """
    if not path.name or path.is_dir():
        raise UsageError(f"{path}: a folder, not a file to write to")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent}: no such folder")
    try:
        exists = path.exists()
        for source in sources:
            if source not in (None, "-", "") and exists and Path(source).exists() and path.samefile(source):
                raise UsageError(f"{path}: is read here, too; it is never overwritten")
    except OSError as error:  # a link to itself
        raise UsageError(f"{path}: {error.strerror or error}") from None
    if path.is_symlink() and not exists:
        raise UsageError(f"{path}: a link to a file that doesn't exist")
    if path.is_file() and not force:
        raise UsageError(f"{path} exists; --force overwrites it")


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that is there, complete, after the block, and as it was before if the block fails.

    It is written beside its place and renamed. Of a symbolic link the file it points to is replaced; permissions stay.
    A device or a pipe is written to as it is. Raises UsageError where writing fails.
    """
    try:
        target = path.resolve()
        known = target.stat() if target.exists() else None
        if known is not None and not stat.S_ISREG(known.st_mode):
            with target.open("wb") as out:
                yield out
            return
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            with partial.open("wb") as out:
                yield out
            if known is not None:
                partial.chmod(stat.S_IMODE(known.st_mode))
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
