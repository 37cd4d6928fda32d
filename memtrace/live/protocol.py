"""How a recorded program and its watchers talk: a Unix socket of the user's own, one JSON object a line.

The socket is ``PID.sock`` in a folder that only this user can enter (``$XDG_RUNTIME_DIR/memtrace``, else ``live`` in
memtrace's cache folder). A line has at most :data:`MAX_LINE_BYTES`; whoever sends more is hung up on. Nothing is ever
unpickled from a socket, and every text that comes over one is made printable before anything else sees it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memtrace.errors import MissingDependencyError
from memtrace.units import printable_in
from memtrace.writing import is_mine

VERSION = 1
MAX_LINE_BYTES = 1 << 20  # of what a program says
MAX_ORDER_BYTES = 4096  # of what a watcher asks for
MOMENTS = ("now", "step", "backward")  # at which blocks can be looked at: at once, after a step, before a backward pass
_SUFFIX = ".sock"
_HAS_SOCKETS = hasattr(socket, "AF_UNIX")

Message = dict[str, Any]


def folder(make: bool = False) -> Path:
    """Where the sockets are. Raises OSError where it can't be used, or others could enter it."""
    runtime, cache = os.environ.get("XDG_RUNTIME_DIR"), os.environ.get("MEMTRACE_CACHE")
    if runtime and Path(runtime).is_dir():
        found = Path(runtime) / "memtrace"
    else:
        found = Path(cache or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "memtrace") / "live"
    if make:
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
    known = found.lstat()
    if not stat.S_ISDIR(known.st_mode) or not is_mine(known) or known.st_mode & 0o077:
        raise PermissionError(f"{found}: not a folder that only you can enter")
    return found


@contextlib.contextmanager
def _at(place: Path) -> Iterator[tuple[socket.socket, str]]:
    """A socket, and what it can bind or connect to."""
    if not _HAS_SOCKETS:
        raise MissingDependencyError("watching needs Unix sockets, which this platform lacks")
    address, number = str(place), None
    if len(os.fsencode(place)) >= 100:  # a socket's path has 107 bytes at most
        number = os.open(place.parent, os.O_RDONLY)
        address = f"/proc/self/fd/{number}/{place.name}"
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        yield made, address
    except BaseException:
        made.close()
        raise
    finally:
        if number is not None:
            os.close(number)


def listen(pid: int, where: Path | None = None) -> tuple[socket.socket, Path]:
    """A socket that listens, and its place. What programs that are gone left behind is removed. Raises OSError."""
    where = where or folder(make=True)
    remove_stale(where)
    place, early = where / f"{pid}{_SUFFIX}", where / f".{pid}-{os.urandom(6).hex()}"
    with _at(early) as (made, address):
        made.bind(address)
        try:
            early.chmod(0o600)
            made.listen(64)
            made.setblocking(False)
            early.replace(place)  # whoever sees the name can connect: one that refuses is stale
        except BaseException:
            early.unlink(missing_ok=True)
            raise
        return made, place


def connect(place: Path, timeout_s: float = 2.0) -> socket.socket:
    """Connect to a program's socket. Raises OSError; ConnectionRefusedError where nobody listens any more."""
    with _at(place) as (made, address):
        made.settimeout(timeout_s)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                made.connect(address)
                break
            except BlockingIOError:  # so many are waiting to be let in
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        if not is_own(made):
            raise PermissionError(f"{place}: another user listens there")
        return made


def sockets() -> list[Path]:
    """Sockets of this user's programs that listen, by pid; stale ones are removed. Empty where there is no folder."""
    try:
        where = folder()
    except OSError:
        return []
    remove_stale(where)
    found = [place for place in where.glob(f"*{_SUFFIX}") if place.stem.isdigit()]
    return sorted(found, key=lambda place: int(place.stem))


def remove_stale(where: Path) -> None:
    """Remove sockets on which nobody listens, with the files beside them: their programs were killed."""
    for place in where.glob(f"*{_SUFFIX}"):
        try:
            connect(place, 0.2).close()
        except ConnectionRefusedError:
            remove(place)
        except OSError:  # busy, or gone by now
            continue


def sample_place(place: Path) -> Path:
    """Where the program at this socket puts what it was asked to look at."""
    return place.with_name(f"{place.stem}-blocks.pickle")


def remove(place: Path) -> None:
    """Remove a socket and what belongs to it."""
    for each in (place, sample_place(place)):
        with contextlib.suppress(OSError):
            each.unlink()


def is_own(peer: socket.socket) -> bool:
    """Whether the other end is a process of this user (where the system tells; the folder's mode holds everywhere)."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return uid == os.getuid()


def encode(message: Message) -> bytes:
    """One line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class LineReader:
    """Takes bytes as they come and gives whole messages; ``most_bytes`` bounds a line."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are complete now. Raises ValueError for what is none."""
        first, *others = data.split(b"\n")  # what waits is not searched again: it may come byte by byte
        self._rest += first
        if max(len(self._rest), *map(len, others), 0) > self.most_bytes:
            raise ValueError("a line is too long")
        if not others:
            return []
        lines = [bytes(self._rest), *others[:-1]]
        self._rest = bytearray(others[-1])
        return [_message(line) for line in lines]


def _message(line: bytes) -> Message:
    try:
        found: Message = printable_in(json.loads(line))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("not a message")
    return found
