"""An index beside a large snapshot, so that opening it again takes a fraction of the time.

``FILE.memtrace-index`` holds the columns, the replay, what each allocation is for, and checkpoints, from which a part
of the trace can be looked at without reading the rest. It is written after a large snapshot was read, atomically, and
never where that fails (read-only folders, full disks). It is used only if the snapshot has not changed since (size,
time, and a hash of samples of its bytes), the same version of memtrace wrote it, and it carries this user's seal: a
stranger's index would be believed blindly. Deleting it is always safe; ``--no-index`` and ``MEMTRACE_NO_INDEX=1``
turn it off.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import memtrace
from memtrace.allocator.replay.initial import InitialBlocks
from memtrace.allocator.replay.replay import Replay
from memtrace.allocator.replay.segments import InitialSegments
from memtrace.analysis import Analysis, analyse, analysis_of
from memtrace.attribution.phases import Phases
from memtrace.cache.checkpoints import Checkpoints, Known, know
from memtrace.cache.sealed import Broken, Sealed, sealed_bytes, write_sealed
from memtrace.history.timeline import Allocations, Timeline, build
from memtrace.snapshot.load import load
from memtrace.snapshot.model import Annotation, Blocks, Device, DeviceTrace, Segments, Snapshot
from memtrace.snapshot.stacks import Frame, StackTable
from memtrace.snapshot.store import Stored, Unfit, pack

if TYPE_CHECKING:
    from memtrace.attribution.user_rules import UserRule

SUFFIX = ".memtrace-index"
SWITCH = "MEMTRACE_NO_INDEX"
MIN_EVENTS = 1_000_000  # smaller recordings open in seconds and stay without litter
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 14
_STALE_S = 3600.0
UNUSABLE = (OSError, Unfit, Broken, MemoryError)
_CLASSES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        Snapshot, Device, DeviceTrace, Segments, Blocks, StackTable, Frame, Annotation, Replay, InitialBlocks,
        InitialSegments, Known, Phases, Checkpoints, Allocations,
    )
}  # fmt: skip
Progress = Callable[[float], None]


@dataclass(slots=True)
class Recording:
    """A snapshot with what is known of its devices; :meth:`timeline` and :meth:`analysis` add to that."""

    snapshot: Snapshot
    path: Path | None  # where an index may be written; None: nowhere
    replays: dict[int, Replay] = field(default_factory=dict)
    known: dict[int, Known] = field(default_factory=dict)
    mark: bytes = b""  # of the snapshot as it was before it was read
    unwritten: bool = False  # whether more is known than the index holds

    def timeline(self, device: Device, on_progress: Progress | None = None, more: bool = False) -> Timeline:
        """The device's timeline. Writes the index after the first replay of a large snapshot, unless ``more`` devices
        are to follow."""
        known = self.replays.get(device.device)
        timeline = build(self.snapshot, device, known, on_progress)
        self.replays[device.device] = timeline.replay
        self.unwritten |= known is None
        if not more:
            self._write()
        return timeline

    def analysis(self, device: Device, rules: Sequence[UserRule] = (), on_progress: Progress | None = None) -> Analysis:
        """The device's timeline, attributed. Writes the index after the first time for a large snapshot."""
        known = self.known.get(device.device)
        timeline = self.timeline(device, on_progress, more=not rules)
        if rules:
            return analyse(timeline, rules)
        if known is not None:
            return analysis_of(timeline, known.attribution(timeline))
        analysis = analyse(timeline)
        if self._is_large:
            self.known[device.device] = know(analysis)
            self.unwritten = True
            self._write()
        return analysis

    @property
    def _is_large(self) -> bool:
        return self.path is not None and sum(len(device.trace) for device in self.snapshot.devices) >= MIN_EVENTS

    def _write(self) -> None:
        if self.path is not None and self._is_large and self.unwritten:
            self.unwritten = False
            with contextlib.suppress(*UNUSABLE):
                _write(self.path, self.mark, (self.snapshot, self.replays, self.known))


def open_recording(
    source: str | os.PathLike[str], on_progress: Progress | None = None, use_index: bool = True
) -> Recording:
    """Read a snapshot, from its index if there is a good one. Raises SnapshotError like :func:`load`."""
    path = indexable(source) if use_index else None
    mark = b""
    if path is not None:
        with contextlib.suppress(*UNUSABLE):
            mark = _mark(path)
            found = _read(path, mark)
            if found is not None:
                snapshot, replays, known = found
                return Recording(replace(snapshot, source=str(path)), path, replays, known, mark)
    return Recording(load(source, on_progress), path if mark else None, mark=mark)


def index_path(snapshot: Path) -> Path:
    """Where a snapshot's index lies."""
    return snapshot.with_name(snapshot.name + SUFFIX)


def indexable(source: str | os.PathLike[str]) -> Path | None:
    """The snapshot's path if it may have an index: a regular file, and the switch is not set."""
    if os.environ.get(SWITCH, "") not in ("", "0") or os.fspath(source) == "-":
        return None
    path = Path(source)
    try:
        return path if path.is_file() else None
    except OSError:
        return None


def open_index(path: Path, mark: bytes | None = None) -> Sealed | None:
    """A snapshot's index, if there is one that belongs to it as it is now. Raises OSError or Broken."""
    index = index_path(path)
    if not index.is_file():
        return None
    key = _user_key(make=False)
    if key is None:
        return None
    sealed = Sealed(index, key)
    if sealed.mark == (_mark(path) if mark is None else mark):
        return sealed
    sealed.close()
    return None


def stored_in(sealed: Sealed) -> Stored:
    """The content: (snapshot, replays by device, what else is known by device)."""
    return Stored(sealed.read, _CLASSES)


def _read(path: Path, mark: bytes | None = None) -> tuple[Snapshot, dict[int, Replay], dict[int, Known]] | None:
    sealed = open_index(path, mark)
    if sealed is None:
        return None
    with contextlib.closing(sealed):
        snapshot, replays, known = stored_in(sealed).root.value()
        return snapshot, replays, known


def _write(path: Path, mark: bytes, content: tuple[Snapshot, dict[int, Replay], dict[int, Known]]) -> None:
    key = _user_key(make=True)
    if key is None:
        return
    target = index_path(path)
    _remove_stale(target)
    parts = pack(content, _CLASSES)
    if shutil.disk_usage(path.parent).free < 4 * sealed_bytes(mark, parts):
        return
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with partial.open("xb") as out:
            write_sealed(out, key, mark, parts)
        if _mark(path) == mark:  # what was read is what is there now
            partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _remove_stale(target: Path) -> None:
    """What a process that was killed while it wrote has left behind."""
    for found in target.parent.glob(f".{_literal(target.name)}.*.partial"):
        with contextlib.suppress(OSError):
            if time.time() - found.stat().st_mtime > _STALE_S:
                found.unlink()


def _literal(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


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
    """Changes with the code that decodes, replays and attributes."""
    here = Path(__file__).parent
    digest = hashlib.blake2b(digest_size=16)
    for folder in (here, here / "snapshot", here / "allocator", here / "attribution"):
        for file in sorted(folder.glob("*.py")):
            found = file.stat()
            digest.update(f"{file.name} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _user_key(make: bool) -> bytes | None:
    """This user's secret, made on first use; None where there can be none."""
    with contextlib.suppress(OSError, RuntimeError):  # the latter where nobody has a home
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "memtrace"
        file = folder / "index.key"
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
