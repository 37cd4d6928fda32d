"""An index beside a large snapshot, so that opening it again takes a fraction of the time.

``FILE.memtrace-index`` holds the columns and the replay. It is written after a large snapshot was read, atomically, and
never where that fails (read-only folders, full disks). It is used only if the snapshot has not changed since (size,
time, and a hash of samples of its bytes), the same version of memtrace wrote it, and it carries this user's seal: a
stranger's index would be believed blindly. Deleting it is always safe; ``--no-index`` and ``MEMTRACE_NO_INDEX=1``
turn it off.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

import memtrace
from memtrace.allocator.initial import InitialBlocks
from memtrace.allocator.replay import Replay
from memtrace.allocator.segments import InitialSegments
from memtrace.snapshot.load import load
from memtrace.snapshot.model import Annotation, Blocks, Device, DeviceTrace, Segments, Snapshot
from memtrace.snapshot.stacks import Frame, StackTable
from memtrace.snapshot.store import Unfit, pack, unpack
from memtrace.timeline import Timeline, build

SUFFIX = ".memtrace-index"
SWITCH = "MEMTRACE_NO_INDEX"
MIN_EVENTS = 1_000_000  # smaller recordings open in seconds and stay without litter
_MAGIC = b"memtrace index 1\n"
_SEAL_BYTES = 32
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 14
_CLASSES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        Snapshot, Device, DeviceTrace, Segments, Blocks, StackTable, Frame, Annotation, Replay, InitialBlocks,
        InitialSegments,
    )
}  # fmt: skip


@dataclass(slots=True)
class Recording:
    """A snapshot with the replays that are known; :meth:`timeline` adds to them."""

    snapshot: Snapshot
    path: Path | None  # where an index may be written; None: nowhere
    replays: dict[int, Replay] = field(default_factory=dict)

    def timeline(self, device: Device) -> Timeline:
        """The device's timeline. Writes the index after the first replay of a large snapshot."""
        known = self.replays.get(device.device)
        timeline = build(self.snapshot, device, known)
        if known is None:
            self.replays[device.device] = timeline.replay
            self._write()
        return timeline

    def _write(self) -> None:
        if self.path is None or sum(len(device.trace) for device in self.snapshot.devices) < MIN_EVENTS:
            return
        with contextlib.suppress(OSError, Unfit, MemoryError):
            _write(self.path, self.snapshot, self.replays)


def open_recording(
    source: str | os.PathLike[str], on_progress: Callable[[float], None] | None = None, use_index: bool = True
) -> Recording:
    """Read a snapshot, from its index if there is a good one. Raises SnapshotError like :func:`load`."""
    path = _indexable(source) if use_index else None
    if path is not None:
        with contextlib.suppress(OSError, Unfit, MemoryError):
            found = _read(path)
            if found is not None:
                snapshot, replays = found
                return Recording(replace(snapshot, source=str(path)), path, replays)
    return Recording(load(source, on_progress), path)


def index_path(snapshot: Path) -> Path:
    """Where a snapshot's index lies."""
    return snapshot.with_name(snapshot.name + SUFFIX)


def _indexable(source: str | os.PathLike[str]) -> Path | None:
    """The snapshot's path if it may have an index: a regular file, and the switch is not set."""
    if os.environ.get(SWITCH, "") not in ("", "0") or os.fspath(source) == "-":
        return None
    path = Path(source)
    try:
        return path if path.is_file() else None
    except OSError:
        return None


def _read(path: Path) -> tuple[Snapshot, dict[int, Replay]] | None:
    index = index_path(path)
    if not index.is_file():
        return None
    key = _user_key(make=False)
    if key is None:
        return None
    data = np.fromfile(index, dtype=np.uint8)
    view = memoryview(data.data)
    start = len(_MAGIC) + _SEAL_BYTES
    if bytes(view[: len(_MAGIC)]) != _MAGIC or len(view) < start + 8:
        return None
    mark_length = int.from_bytes(view[start : start + 8], "little")
    mark = bytes(view[start + 8 : start + 8 + mark_length])
    if mark != _mark(path):
        return None
    seal = hashlib.blake2b(view[start:], key=key, digest_size=_SEAL_BYTES).digest()
    if not hmac.compare_digest(seal, bytes(view[len(_MAGIC) : start])):
        return None
    snapshot, replays = unpack(view[start + 8 + mark_length :], _CLASSES)
    return snapshot, replays


def _write(path: Path, snapshot: Snapshot, replays: dict[int, Replay]) -> None:
    key = _user_key(make=True)
    if key is None:
        return
    mark = _mark(path)
    parts = [len(mark).to_bytes(8, "little"), mark, *pack((snapshot, replays), _CLASSES)]
    size_bytes = sum(len(part) for part in parts)
    if shutil.disk_usage(path.parent).free < 4 * size_bytes:
        return
    seal = hashlib.blake2b(key=key, digest_size=_SEAL_BYTES)
    for part in parts:
        seal.update(part)
    target = index_path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with partial.open("xb") as out:
            out.write(_MAGIC + seal.digest())
            for part in parts:
                out.write(part)
        if _mark(path) == mark:  # not while the snapshot is being written
            partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _mark(path: Path) -> bytes:
    """What must be the same for an index to be good: the snapshot's size, time and samples, and memtrace itself."""
    found = path.stat()
    digest = hashlib.blake2b(digest_size=32)
    with path.open("rb") as file:
        for place in np.linspace(0, max(0, found.st_size - _SAMPLE_BYTES), _SAMPLES).astype(np.int64).tolist():
            file.seek(place)
            digest.update(file.read(_SAMPLE_BYTES))
    known: dict[str, Any] = {
        "bytes": found.st_size,
        "time_ns": found.st_mtime_ns,
        "samples": digest.hexdigest(),
        "memtrace": memtrace.__version__,
        "code": _code(),
    }
    return json.dumps(known).encode()


@lru_cache(maxsize=1)
def _code() -> str:
    """Changes with the code that decodes and replays."""
    here = Path(__file__).parent
    digest = hashlib.blake2b(digest_size=16)
    for folder in ("snapshot", "allocator"):
        for file in sorted((here / folder).glob("*.py")):
            found = file.stat()
            digest.update(f"{file.name} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _user_key(make: bool) -> bytes | None:
    """This user's secret, made on first use; None where there can be none."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "memtrace"
    file = folder / "index.key"
    with contextlib.suppress(OSError, RuntimeError):
        if not file.exists() and make:
            folder.mkdir(parents=True, exist_ok=True)
            partial = folder / f"index.key.{os.getpid()}"
            partial.touch(mode=0o600)
            partial.write_bytes(secrets.token_bytes(32))
            try:
                os.link(partial, file)  # the first of two writers wins
            except FileExistsError:
                pass
            finally:
                partial.unlink()
        key = file.read_bytes()
        return key if len(key) == 32 else None
    return None
