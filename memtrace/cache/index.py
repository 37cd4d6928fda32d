"""Recordings opened through the cache: a large one is read, replayed and attributed once.

What that came to is kept in the user's cache folder after a large recording was read, and mapped, not read, when it is
opened again. Where that fails (no home, full disk), nothing is kept, and that is not an error.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from memtrace.allocator.replay.replay import Allocations, Replay
from memtrace.allocator.replay.segments import InitialSegments
from memtrace.analysis import Analysis, analyse
from memtrace.attribution.categories import Evidence
from memtrace.attribution.classify import I2, as_known
from memtrace.attribution.phases import Phases
from memtrace.cache import folder
from memtrace.history.timeline import Levels, Peak, Timeline, build
from memtrace.snapshot.load import load
from memtrace.snapshot.model import Annotation, Blocks, Device, DeviceTrace, Segments, Snapshot
from memtrace.snapshot.stacks import Frame, StackTable

if TYPE_CHECKING:
    from memtrace.attribution.user_rules import UserRule
    from memtrace.cache.store import Shelf
    from memtrace.writing import Draft

MIN_EVENTS = 1_000_000  # smaller recordings open in a second
_EVENT_BYTES = {b"\x80": 24, b"{": 48}  # at the least: in a pickle, in JSON; packed, one byte
_KEPT_BYTES = 48  # an event, about
_IN_VAIN = (OSError, RuntimeError, ValueError, MemoryError)  # nothing is kept then; Unfit is a ValueError
Progress = Callable[[float], None]
Value = TypeVar("Value")


class Replayed(NamedTuple):
    """A device's replay and the curves that follow from it."""

    replay: Replay
    levels: Levels


class Known(NamedTuple):
    """What memtrace's own rules came to: a rule an allocation, the purposes of the labels that come first."""

    rule: I2
    labelled: tuple[str, ...]
    phases: Phases
    caveats: tuple[str, ...]


class Kept(NamedTuple):
    """What is kept of a recording: ``replayed`` and ``known`` by device, ``name`` as the cache calls it."""

    name: str
    snapshot: Snapshot
    replayed: dict[int, Replayed]
    known: dict[int, Known]


_CLASSES = (
    Kept, Snapshot, Device, DeviceTrace, Segments, Blocks, StackTable, Frame, Annotation, Replayed, Replay, Levels,
    Peak, InitialSegments, Known, Phases, Allocations,
)  # fmt: skip


class _Begun(NamedTuple):
    """A file of the cache under way."""

    shelf: Shelf
    made: Draft
    closing: contextlib.ExitStack


@dataclass(slots=True)
class OpenRecording:
    """A snapshot with what is known of its devices; :meth:`timeline` and :meth:`analysis` add to that."""

    snapshot: Snapshot
    path: Path | None = None  # of what may be kept; None: nothing
    name: str = ""  # in the cache, of the recording as it was before it was read
    replayed: dict[int, Replayed] = field(default_factory=dict)
    known: dict[int, Known] = field(default_factory=dict)
    unwritten: bool = False  # whether more is known than is kept
    begun: _Begun | None = None  # what is to be kept

    def timeline(self, device: Device, on_progress: Progress | None = None, more: bool = False) -> Timeline:
        """The device's timeline. Keeps the first replay of a large recording, unless ``more`` devices follow."""
        known = self.replayed.get(device.device)
        if known is not None:
            return Timeline(self.snapshot, device, known.replay, known.levels)
        with self._or_nothing():
            timeline = build(self.snapshot, device, on_progress)
        replayed = self.replayed[device.device] = self._laid(Replayed(timeline.replay, timeline.levels))
        timeline = Timeline(self.snapshot, device, *replayed)
        if self.begun is not None:
            self.begun.shelf.rest()  # most events are not looked at again
        self.unwritten = True
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
            attribution = as_known(timeline, known.rule, known.labelled, known.phases)
            return Analysis(timeline, attribution, known.caveats)
        with self._or_nothing():
            analysis = analyse(timeline)
        attribution = analysis.attribution
        labelled = tuple(str(r.purpose) for r in attribution.rules if r.evidence is Evidence.LABEL)
        self.known[device.device] = Known(attribution.rule, labelled, attribution.facts.phases, analysis.caveats)
        self.unwritten = True
        self._write()
        return analysis

    @property
    def is_large(self) -> bool:
        return sum(len(device.trace) for device in self.snapshot.devices) >= MIN_EVENTS

    def lay_down(self) -> None:
        """Write the columns at once if they are to be kept, and map them: they take memory only where they are read."""
        if self.path is not None and self.is_large and os.name != "nt":  # which renames no file that is mapped
            with contextlib.suppress(*_IN_VAIN):
                self.begun = self._begin()
            self.snapshot = self._laid(self.snapshot)

    def _begin(self) -> _Begun:
        from memtrace.cache.store import Shelf

        closing = contextlib.ExitStack()
        events = sum(len(device.trace) for device in self.snapshot.devices)
        made = closing.enter_context(folder.begun(_KEPT_BYTES * events))
        shelf = Shelf(made.out, _CLASSES)
        weakref.finalize(shelf, closing.close)  # where nothing more is asked of the recording
        return _Begun(shelf, made, closing)

    @contextlib.contextmanager
    def _or_nothing(self) -> Iterator[None]:
        """Whoever gives up leaves nothing of what was to be kept."""
        try:
            yield
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        if self.begun is not None:
            self.begun.closing.close()
            self.begun = None

    def _laid(self, value: Value) -> Value:
        """The same, its arrays mapped from what is to be kept, if that was begun and can hold it."""
        if self.begun is not None:
            try:
                return self.begun.shelf.laid(value, partial(folder.mapped, self.begun.made))
            except _IN_VAIN:
                self._give_up()
        return value

    def _write(self) -> None:
        if self.path is not None and self.is_large and self.unwritten:
            self.unwritten = False
            with contextlib.suppress(*_IN_VAIN):
                begun, self.begun = self.begun or self._begin(), None
                with begun.closing:
                    if folder.name_of(self.path) == self.name:  # what was read is what is there now
                        begun.shelf.finish(Kept(self.name, self.snapshot, self.replayed, self.known))
                        folder.keep(begun.made, self.name)


def open_recording(
    source: str | os.PathLike[str],
    on_progress: Progress | None = None,
    use_index: bool = True,
    on_state: Callable[[Snapshot], object] | None = None,
) -> OpenRecording:
    """Read a snapshot, from the cache if it is there. Arguments and errors are those of :func:`load`."""
    path, name = identified(source) if use_index else (None, "")
    kept = find(name) if path is not None else None
    snapshot = load(source, on_progress, on_state) if kept is None else replace(kept.snapshot, source=str(path))
    if kept is not None:
        return OpenRecording(snapshot, path, name, kept.replayed, kept.known)
    recording = OpenRecording(snapshot, path, name)
    del snapshot
    recording.lay_down()
    return recording


def identified(source: str | os.PathLike[str]) -> tuple[Path | None, str]:
    """(path, name in the cache) of a recording; the path is None if it is not kept: no regular file, small, or off."""
    if folder.is_off() or os.fspath(source) == "-":
        return None, ""
    path = Path(source)
    try:
        if path.is_file() and (size := path.stat().st_size) >= MIN_EVENTS:
            with path.open("rb") as file:
                event_bytes = _EVENT_BYTES.get(file.read(1), 1)
            if size >= event_bytes * MIN_EVENTS:
                return path, folder.name_of(path)
    except (OSError, ValueError):
        pass
    return None, ""


def find(name: str) -> Kept | None:
    """What is kept of a recording under this name."""
    from memtrace.cache.store import unpack

    with contextlib.suppress(*_IN_VAIN):
        data = folder.read(name)
        kept = unpack(data, _CLASSES) if data is not None else None
        if isinstance(kept, Kept) and kept.name == name:
            return kept
    return None
