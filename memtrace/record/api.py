"""``with memtrace.record("run.pickle") as recording:`` for programs that name what they record."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from memtrace.errors import MissingDependencyError
from memtrace.record import backend as backend_module
from memtrace.record import messages, recorder
from memtrace.record.live import let_watchers_in
from memtrace.record.recorder import DEFAULT_MAX_ENTRIES, Recorder, RecordOptions
from memtrace.record.signals import SignalWatch


class Recording(contextlib.AbstractContextManager["Recording"]):
    """A recording in progress. Made by :func:`record`; every method does nothing where recording is not possible."""

    def __init__(self, inner: Recorder | None, owns: bool) -> None:
        self.recorder = inner
        self._owns = owns
        self._signals = SignalWatch(inner) if inner is not None and owns else None

    def __enter__(self) -> Recording:
        if self.recorder is not None and self._owns:
            with messages.guarded("starting the recording"):
                self.recorder.begin()
            if self._signals is not None:
                self._signals.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """End the recording: write the file, or announce the out-of-memory error that ended the program."""
        if self.recorder is None or not self._owns or self.recorder.finished:
            return
        if self._signals is not None:
            self._signals.remove()
        self.recorder.conclude(error)

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """``with recording.phase("validation"):`` marks a phase by name."""
        return self.recorder.phase(name) if self.recorder is not None else contextlib.nullcontext()

    def step(self) -> None:
        """Count a step, instead of one a call of ``optimizer.step``."""
        if self.recorder is not None:
            self.recorder.step()

    def count_steps_by_hand(self) -> None:
        """Leave the counting to :meth:`step` from the beginning."""
        if self.recorder is not None:
            self.recorder.log.counted_by_program = True

    def dump(self, path: str | os.PathLike[str] | None = None) -> Path | None:
        """Write the state and history so far; returns the file, ``None`` where that failed (and was said)."""
        return self.recorder.dump(path) if self.recorder is not None else None

    @property
    def file(self) -> Path | None:
        """The file written last."""
        return self.recorder.last_file if self.recorder is not None else None


def record(
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    stacks: str = "python",
    max_entries: int = DEFAULT_MAX_ENTRIES,
    steps: tuple[int, int] | None = None,
    deep: bool = False,
    live: bool = False,
    on_alarm: str = "print",
    metrics: tuple[str, ...] = (),
    force: bool = False,
    required: bool = False,
) -> Recording:
    """Record GPU memory until the ``with`` block ends, and write a snapshot that any viewer opens.

    ``path`` is the snapshot: the state at the end of the block, or at the out-of-memory error that ended it. A file
    of that name is never replaced unless ``force``; a number is added instead. ``model`` and ``optimizer`` (or lists
    of them) are found without help too; naming them makes phases exact from the first call on. ``stacks="all"`` adds
    C++ frames, ``"none"`` records no history until a watcher asks for it. ``max_entries`` bounds the ring of events;
    ``steps=(10, 12)`` records steps 10 and 11 alone. ``deep`` stamps module names on allocations. ``live`` lets
    ``memtrace live`` watch, and judges alarms: ``on_alarm`` is "print", "warn" (with
    :class:`memtrace.record.live.MemoryAlarm`) or a command that gets the alarm as JSON on its standard input.
    ``metrics`` sends each step's numbers elsewhere, ``("tensorboard:DIR",)`` say (implies ``live``). Where recording is
    not possible, one line says why and the block runs unrecorded, unless ``required``, which raises
    :class:`memtrace.errors.MissingDependencyError`.
    """
    running = recorder.active()
    if running is not None:
        messages.say("already recording; this record() adds its phases and steps to that recording")
        return Recording(running, owns=False)
    wanted = Path(path)
    options = RecordOptions(
        wanted.parent, wanted.stem, wanted.suffix or ".pickle", stacks=stacks, max_entries=max_entries, steps=steps,
        deep=deep, force=force, live=live or bool(metrics), on_alarm=on_alarm, metrics=tuple(metrics),
    )  # fmt: skip
    try:
        backend_module.get().require()
    except MissingDependencyError as error:
        if required:
            raise
        messages.say(f"not recording: {error}")
        return Recording(None, owns=False)
    return Recording(let_watchers_in(Recorder(options, model, optimizer)), owns=True)


class OfTraining:
    """What the classes for trainers share: a recording from the beginning of training to its end.

    They take the arguments of :func:`record`. The file is written when training ends; after an out-of-memory error it
    holds the state at the error, and the verdict is printed when the program ends.
    """

    recording: Recording | None = None

    def __init__(self, path: str | os.PathLike[str] = "memtrace.pickle", **options: Any) -> None:
        super().__init__()
        self.path, self.options = path, options

    def begin(self, **found: Any) -> None:
        """Begin to record; ``found`` are ``model`` and ``optimizer``, as far as they are known."""
        known = {key: value for key, value in found.items() if value is not None}
        self.recording = record(self.path, **(known | self.options)).__enter__()
        atexit.register(self._at_exit)

    def close(self, error: BaseException | None = None) -> None:
        """Write the file."""
        if self.recording is not None:
            self.recording.close(error)
            self.recording = None
            atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        """Training that never ended ran into an error; Python has already shown it."""
        self.close(getattr(sys, "last_value", None))
