"""Output files: written whole or not at all, and never over what was read. All that memtrace writes goes through here.

A file is written beside its place, under a name that nobody can guess and that must not exist, flushed to disk, and
renamed. What a killed process leaves is removed by the next one that writes into that folder.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from memtrace.errors import UsageError
from memtrace.frozen import dataclass

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_NEW |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_PREFIX = f".memtrace-{platform.node()}-"  # on a shared file system every host minds its own
_SUFFIX = ".tmp"
_DESCRIPTOR = re.compile(r"/dev/(?:(stdout)|(stderr)|fd/(\d+))|/proc/self/fd/(\d+)")


def check_target(path: Path, force: bool, *sources: str | None) -> None:
    """Raise UsageError before any work is done if writing ``path`` would lose something or can't succeed.

    ``sources`` are the files that are read (None and ``-`` are none): those are not overwritten even with ``force``.
    """
    if _descriptor(path) is not None:
        return
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
def whole_file(path: Path, *sources: str | None) -> Iterator[IO[bytes]]:
    """A binary file that is there, complete, after the block, and as it was before if the block fails.

    Of a symbolic link the file it points to is replaced; permissions stay, but nobody may read or write the file who
    may not do so with each of the ``sources`` it is made from. A device, a pipe or a descriptor of this process
    (``/dev/stdout``) is written to as it is. Raises UsageError where writing fails.
    """
    try:
        number = _descriptor(path)
        known = path.stat() if number is None and path.exists() else None
        if number is not None or (known is not None and not stat.S_ISREG(known.st_mode)):
            if sys.stdout is not None:
                sys.stdout.flush()
            with path.open("wb") if number is None else os.fdopen(os.dup(number), "wb") as out:
                yield out
            return
        target = path.resolve()
        allowed = _allowed(sources)
        with draft(target.parent, allowed) as made:
            yield made.out
            if known is not None:
                made.path.chmod(stat.S_IMODE(known.st_mode) & allowed)
            made.replace(target)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None


@dataclass(frozen=True, slots=True)
class Draft:
    """A file that waits for its name: write to ``out``, then :meth:`replace` or :meth:`take_free_name`."""

    path: Path
    out: IO[bytes]

    def replace(self, target: Path) -> Path:
        """Take ``target``'s place at once. Raises OSError."""
        self.to_disk()
        self.path.replace(target)
        return target

    def take_free_name(self, wanted: Path) -> Path:
        """Be called ``wanted``, or the first numbered name that is free; returns it. Raises OSError."""
        self.to_disk()
        return free_name(self.path, wanted)

    def to_disk(self) -> None:
        """Wait until what was written is on disk. Raises OSError."""
        self.out.flush()
        os.fsync(self.out.fileno())


@contextmanager
def draft(folder: Path, mode: int = 0o666) -> Iterator[Draft]:
    """A new file in ``folder``, removed at the end unless it was given a name. ``mode`` is cut by the umask.

    Raises OSError.
    """
    remove_stale(folder)
    path = folder / f"{_PREFIX}{os.getpid()}-{os.urandom(8).hex()}{_SUFFIX}"
    number = os.open(path, _NEW, mode)
    try:
        with os.fdopen(number, "wb") as out:
            yield Draft(path, out)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def free_name(path: Path, wanted: Path) -> Path:
    """Rename a file to ``wanted``, or to the first numbered name that is free; returns it. Raises OSError."""
    count = 1
    while True:
        name = wanted if count == 1 else wanted.with_name(f"{wanted.stem}-{count}{wanted.suffix}")
        try:
            os.link(path, name)
        except FileExistsError:
            count += 1
        except OSError:  # a file system without hard links
            if not name.exists():
                path.replace(name)
                return name
            count += 1
        else:
            path.unlink(missing_ok=True)
            return name


def remove_stale(folder: Path) -> None:
    """Remove what processes of this host and user that are gone have left behind."""
    paths: list[Path] = []
    with contextlib.suppress(OSError):
        paths += [p for p in folder.iterdir() if p.name.startswith(_PREFIX) and p.name.endswith(_SUFFIX)]
    for path in paths:
        pid = path.name.removeprefix(_PREFIX).split("-")[0].removesuffix(_SUFFIX)
        with contextlib.suppress(OSError):
            if pid.isdigit() and int(pid) != os.getpid() and is_mine(path.lstat()) and not _alive(int(pid)):
                path.unlink()


def is_mine(found: os.stat_result) -> bool:
    """Whether a file or folder belongs to this user."""
    return not hasattr(os, "getuid") or found.st_uid == os.getuid()


def check_place(folder: Path) -> Path:
    """The folder by its real path, for what will be executed from there. Raises PermissionError if somebody else could
    put another in its place: a folder above it is theirs, or open to them and not like ``/tmp``."""
    real = folder.resolve()
    if not hasattr(os, "getuid"):
        return real
    trusted = {os.getuid(), 0, Path("/").stat().st_uid}  # the last is root's number in a container of the user's own
    for each in (real, *real.parents):
        found = each.stat()
        others = 0o002 if found.st_gid == os.getuid() else 0o022  # a group of that number is the user's alone
        if found.st_uid not in trusted or (found.st_mode & others and not found.st_mode & stat.S_ISVTX):
            raise PermissionError(f"{each}: others could put something else in its place")
    return real


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # another user's process
        return True
    return True


def _descriptor(path: Path) -> int | None:
    """The open file that ``/dev/stdout`` and its like stand for."""
    found = _DESCRIPTOR.fullmatch(str(path))
    if found is None:
        return None
    return 1 if found[1] else 2 if found[2] else int(found[3] or found[4])


def _allowed(sources: tuple[str | None, ...]) -> int:
    """The mode that a file made from ``sources`` may have at most; its owner may always read and write it."""
    mode = 0o666
    for source in sources:
        with contextlib.suppress(OSError, ValueError):
            found = Path(source or "-").stat()
            if stat.S_ISREG(found.st_mode):
                mode &= found.st_mode | 0o600
    return mode
