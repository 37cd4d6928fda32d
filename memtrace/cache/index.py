"""Recordings opened through the cache: a large one is read, replayed and attributed once.

What that came to, with checkpoints from which a part of the trace can be looked at without the rest, is kept in the
user's cache folder after a large recording was read. Where that fails (no home, full disk), nothing is kept, and
that is not an error.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from memtrace.allocator.replay.initial import InitialBlocks
from memtrace.allocator.replay.replay import Replay
from memtrace.allocator.replay.segments import InitialSegments
from memtrace.analysis import Analysis, analyse, analysis_of
from memtrace.attribution.phases import Phases
from memtrace.cache import folder
from memtrace.cache.checkpoints import Checkpoints, Known, know
from memtrace.cache.part import Part
from memtrace.cache.store import Unfit, pack, unpack
from memtrace.history.timeline import LEVELS_CONTRADICT, Allocations, Timeline, build
from memtrace.snapshot.load import load
from memtrace.snapshot.model import Annotation, Blocks, Device, DeviceTrace, Segments, Snapshot
from memtrace.snapshot.stacks import Frame, StackTable

if TYPE_CHECKING:
    from memtrace.attribution.user_rules import UserRule

MIN_EVENTS = 1_000_000  # smaller recordings open in seconds
Progress = Callable[[float], None]


class Kept(NamedTuple):
    """What is kept of a recording: ``replays`` and ``known`` by device, ``name`` as the cache calls it."""

    name: str
    snapshot: Snapshot
    replays: dict[int, Replay]
    known: dict[int, Known]


_CLASSES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        Kept, Snapshot, Device, DeviceTrace, Segments, Blocks, StackTable, Frame, Annotation, Replay, InitialBlocks,
        InitialSegments, Known, Phases, Checkpoints, Allocations,
    )
}  # fmt: skip


@dataclass(slots=True)
class OpenRecording:
    """A snapshot with what is known of its devices; :meth:`timeline` and :meth:`analysis` add to that."""

    snapshot: Snapshot
    path: Path | None = None  # of what may be kept; None: nothing
    name: str = ""  # in the cache, of the recording as it was before it was read
    replays: dict[int, Replay] = field(default_factory=dict)
    known: dict[int, Known] = field(default_factory=dict)
    unwritten: bool = False  # whether more is known than is kept

    def timeline(self, device: Device, on_progress: Progress | None = None, more: bool = False) -> Timeline:
        """The device's timeline. Keeps the first replay of a large recording, unless ``more`` devices follow."""
        known = self.replays.get(device.device)
        timeline = build(self.snapshot, device, known, on_progress)
        self.replays[device.device] = timeline.replay
        self.unwritten |= known is None
        if not more:
            self._write()
        return timeline

    def analysis(self, device: Device, rules: Sequence[UserRule] = (), on_progress: Progress | None = None) -> Analysis:
        """The device's timeline, attributed. Keeps what the first time for a large recording came to."""
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

    def within(
        self,
        device: Device,
        events: str | None,
        steps: str | None,
        rules: Sequence[UserRule] = (),
        on_progress: Progress | None = None,
        of_part: bool = False,
    ) -> Analysis:
        """:meth:`analysis` with the window that a range of events or steps names; with ``of_part``, :meth:`part` does.

        Raises UsageError or NoAnswerError for a range that the recording does not have.
        """
        wanted = of_part and (events is not None or steps is not None) and not rules
        part = self.part(device, events, steps) if wanted else None
        return part or self.analysis(device, rules, on_progress).within(events, steps)

    def part(self, device: Device, events: str | None, steps: str | None) -> Analysis | None:
        """The analysis of one range of events or steps alone; None where nothing is kept that tells it.

        Raises UsageError or NoAnswerError for a range that the recording does not have.
        """
        known, replay = self.known.get(device.device), self.replays.get(device.device)
        if known is None or replay is None or self.snapshot.memtrace.get("config"):
            return None  # the estimate beside the report is of the whole
        if LEVELS_CONTRADICT in replay.notes:
            return None  # its levels are not sums of its events
        return Part(device, replay, known).analysis(self.snapshot, events, steps)

    @property
    def _is_large(self) -> bool:
        return self.path is not None and sum(len(device.trace) for device in self.snapshot.devices) >= MIN_EVENTS

    def _write(self) -> None:
        if self.path is not None and self._is_large and self.unwritten:
            self.unwritten = False
            with contextlib.suppress(OSError, RuntimeError, Unfit, MemoryError):
                if folder.name_of(self.path) == self.name:  # what was read is what is there now
                    folder.write(self.name, pack(Kept(self.name, self.snapshot, self.replays, self.known), _CLASSES))


def open_recording(
    source: str | os.PathLike[str], on_progress: Progress | None = None, use_index: bool = True
) -> OpenRecording:
    """Read a snapshot, from the cache if it is there. Raises SnapshotError like :func:`load`."""
    path, name = identified(source) if use_index else (None, "")
    kept = find(name) if path is not None else None
    if kept is not None:
        return OpenRecording(replace(kept.snapshot, source=str(path)), path, name, kept.replays, kept.known)
    return OpenRecording(load(source, on_progress), path, name)


def identified(source: str | os.PathLike[str]) -> tuple[Path | None, str]:
    """(a recording's path, its name in the cache); the path is None if it may not be kept: no regular file, or off."""
    if folder.is_off() or os.fspath(source) == "-":
        return None, ""
    path = Path(source)
    try:
        return (path, folder.name_of(path)) if path.is_file() else (None, "")
    except (OSError, ValueError):
        return None, ""


def find(name: str) -> Kept | None:
    """What is kept of a recording under this name."""
    with contextlib.suppress(OSError, Unfit, MemoryError):
        data = folder.read(name)
        kept = unpack(data, _CLASSES) if data is not None else None
        if isinstance(kept, Kept) and kept.name == name:
            return kept
    return None
