"""The user's cache folder: what large recordings came to, so that opening them again takes a fraction of the time.

``$MEMTRACE_CACHE``, else ``memtrace`` under ``$XDG_CACHE_HOME`` or ``~/.cache``. A file there is believed because only
this user can have written it: folder and file must be the user's own, and nobody else may write to them. It is found by
what identifies the recording (device, inode, size, times of content and of status) and by memtrace's own code, so that
it is never out of date; what is no longer found is the first to go when the folder grows beyond its bound.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from memtrace._version import __version__
from memtrace.errors import UsageError
from memtrace.frozen import dataclass
from memtrace.writing import Draft, check_place, draft, is_mine

OFF = "MEMTRACE_NO_INDEX"
FOLDER = "MEMTRACE_CACHE"
MAX_BYTES = 4 << 30
_SUFFIX = ".columns"
_ROOMS = ("snapshot", "allocator", "history", "attribution", "cache")  # whose results are kept


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """What the cache holds now."""

    folder: str
    files: int
    bytes: int


def is_off() -> bool:
    """Whether the user has switched the cache off."""
    return os.environ.get(OFF, "") not in ("", "0")


def cache_folder() -> CacheFolder | None:
    """The cache as it is; None where there is none, or none that may be used."""
    try:
        folder = _folder(make=False)
        sizes = [found.stat().st_size for found in folder.glob(f"*{_SUFFIX}")]
    except (OSError, RuntimeError):
        return None
    return None if is_off() else CacheFolder(str(folder), len(sizes), sum(sizes))


def name_of(recording: Path) -> str:
    """What a recording as it is now, read by this memtrace, is called in the cache. Raises OSError."""
    import hashlib  # here and below: small recordings, which are not kept, are to open fast

    found = recording.stat()
    parts = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return hashlib.blake2b(repr((parts, __version__, _code())).encode(), digest_size=24).hexdigest()


def read(name: str) -> memoryview | None:
    """A file of the cache, mapped; None where there is none that can be believed. Changes to it stay private."""
    try:
        folder = _folder(make=False)
        number = os.open(folder / (name + _SUFFIX), os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except (OSError, RuntimeError):  # the latter where nobody has a home
        return None
    with os.fdopen(number, "rb"):
        found = os.fstat(number)
        if not (stat.S_ISREG(found.st_mode) and _only_mine(found)):
            return None
        with contextlib.suppress(OSError):
            os.utime(number)  # the oldest in this sense is the first to go
        return memoryview(mmap.mmap(number, 0, access=mmap.ACCESS_COPY)) if found.st_size else None


@contextmanager
def begun(size_bytes: int) -> Iterator[Draft]:
    """A file to fill with about so much and to :func:`keep`; it is gone afterwards unless it was kept.

    Raises OSError, for want of room, too, and RuntimeError.
    """
    import shutil

    folder = _folder(make=True)
    if size_bytes > MAX_BYTES or shutil.disk_usage(folder).free < 4 * size_bytes:
        raise OSError("no room")
    with draft(folder, 0o600) as made:
        yield made


def mapped(made: Draft) -> mmap.mmap:
    """What was written so far, once it is on disk: from then on nothing else needs to hold it. Raises OSError."""
    made.to_disk()
    with made.path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def keep(made: Draft, name: str) -> None:
    """Keep a file under a name. Raises OSError."""
    made.replace(made.path.with_name(name + _SUFFIX))
    _trim(made.path.parent)


def kept_file(name: str, make: Callable[[Path], None]) -> Path:
    """A program's file that ``make`` writes where it is not there yet. Raises UsageError where it can't be kept, or
    others could change what will be loaded."""
    try:
        folder = check_place(_folder(make=True))
        path = folder / name
        if not path.exists():
            with draft(folder, 0o700) as made:
                make(made.path)
                made.path.chmod(0o700)  # a compiler makes it as the umask says
                made.replace(path)
        if not _only_mine(path.stat()):
            raise PermissionError(f"{path}: others can write to it")
    except (OSError, RuntimeError) as error:
        raise UsageError(f"the cache folder can't be used: {error}") from None
    return path


def _folder(make: bool) -> Path:
    """The folder, if nobody else can write to it. Raises OSError, RuntimeError."""
    wanted = os.environ.get(FOLDER)
    folder = Path(wanted) if wanted else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "memtrace"
    if make and not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    if not _only_mine(folder.stat()):
        raise PermissionError(f"{folder}: others can write there")
    return folder


def _only_mine(found: os.stat_result) -> bool:
    return is_mine(found) and (os.name == "nt" or not found.st_mode & 0o022)


def _trim(folder: Path) -> None:
    """Remove the files that were used least recently until the rest is within the bound."""
    with contextlib.suppress(OSError):
        found = sorted(((each.stat(), each) for each in folder.glob(f"*{_SUFFIX}")), key=lambda pair: pair[0].st_mtime)
        over = sum(each.st_size for each, _ in found) - MAX_BYTES
        for known, path in found:
            if over <= 0:
                return
            path.unlink(missing_ok=True)
            over -= known.st_size


@lru_cache(maxsize=1)
def _code() -> str:
    """Changes with the code that decodes, replays and attributes."""
    import hashlib

    here = Path(__file__).parents[1]
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted([here / "arrays.py", *(file for room in _ROOMS for file in (here / room).rglob("*.py"))]):
        found = file.stat()
        digest.update(f"{file.relative_to(here)} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()
