"""Out-of-memory errors: saved when they happen, announced only when they end the program.

The observer cannot know whether the program will catch the error and carry on (a smaller batch, another algorithm).
So the state is saved at once under the recording's own name, and the announcement waits: an error that escapes, or
after which nothing was completed any more, is a failure; any other was handled.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memtrace.record import files, messages
from memtrace.record.phases import PhaseLog
from memtrace.record.verdict import oom_lines

_SAME_HANDLED = 3  # times that the same request in the same phase was handled before its state is no longer saved


@dataclass(slots=True)
class SavedOom:
    """One error. ``extra`` is the snapshot's ``memtrace`` dictionary, ``completed`` the program's progress then.

    ``is_older``: the same request failed again later, and its state was not saved any more.
    """

    extra: dict[str, Any]
    completed: int
    file: Path | None
    events: int
    is_older: bool = False

    @property
    def signature(self) -> tuple[int, str]:
        """What makes two errors the same: bytes asked for, and the phase."""
        return self.extra["oom"]["requested_bytes"], self.extra["oom"]["phase"]


class OomBook:
    """The errors of one process so far."""

    def __init__(self) -> None:
        self.last: SavedOom | None = None
        self.count = 0
        self.announced = False
        self._handled: Counter[tuple[int, str]] = Counter()

    def is_known(self, requested_bytes: int, log: PhaseLog) -> bool:
        """Count an error; whether the program has handled it so often that the state saved last may stand for it."""
        self.count += 1
        if self.last is None:
            return False
        if log.completed > self.last.completed:
            self._handled[self.last.signature] += 1
        if self._handled[requested_bytes, log.name] < _SAME_HANDLED:
            return False
        self.last.completed, self.last.is_older = log.completed, True
        return True

    def pending(self, completed: int) -> bool:
        """Whether the last error has not been followed by any progress."""
        return self.last is not None and not self.announced and completed <= self.last.completed

    def failed(self, error: BaseException | None) -> None:
        """The program ends with the last error: complete the file and print the five lines."""
        if self.last is None or self.announced:
            return
        self.announced = True
        message = _oom_text(error)
        if self.last.file is not None and message:
            self.last.extra["oom"]["message"] = message
            with messages.guarded("adding the error's text to the file"):
                files.add_oom_message(self.last.file, message)
        for line in oom_lines(self.last.extra, self.last.file, self.last.events, self.last.is_older):
            messages.say(line)

    def set_aside(self, wanted: Path, force: bool) -> None:
        """The program carried on: move the state of a handled error out of the way of the final file, and say so."""
        if self.last is None or self.announced:
            return
        self.announced = True
        where = "its state could not be saved"
        if self.last.file is not None:
            with messages.guarded("renaming a file"):
                self.last.file = files.rename(self.last.file, wanted, force)
            where = f"the state at the last one saved is in {self.last.file}"
        times = "an out-of-memory error was" if self.count == 1 else f"{self.count} out-of-memory errors were"
        messages.say(f"{times} handled by the program itself; {where}")


def is_oom(error: BaseException | None) -> bool:
    """Whether an exception is a GPU out-of-memory error, or was raised because of one."""
    return bool(_oom_text(error))


def _oom_text(error: BaseException | None) -> str:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if type(error).__name__ == "OutOfMemoryError" or "out of memory" in str(error).lower():
            return str(error)
        error = error.__cause__ or error.__context__
    return ""
