"""Out-of-memory errors: saved when they happen, announced only when they end the program.

The observer cannot know whether the program will catch the error and carry on (a smaller batch, another algorithm).
So the state is saved at once under the recording's own name, and the announcement waits: an error that escapes, or
after which nothing was completed any more, is a failure; any other was handled.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memtrace.record import files, messages
from memtrace.record.phases import now_us
from memtrace.record.verdict import oom_lines

if TYPE_CHECKING:
    from memtrace.record.recorder import Recorder

_SAME_HANDLED = 3  # times that the same request in the same phase was handled before its state is no longer saved


@dataclass(slots=True)
class _Oom:
    """One error. ``completed`` is the program's progress when it happened; ``file`` is where its state is.

    ``is_older``: the same request failed again later, and its state was not saved any more.
    """

    extra: dict[str, Any]
    completed: int
    signature: tuple[int, str]
    file: Path | None
    events: int
    is_older: bool = False


class OomBook:
    """The errors of one process so far."""

    def __init__(self) -> None:
        self.last: _Oom | None = None
        self.count = 0
        self.announced = False
        self._handled: dict[tuple[int, str], int] = {}
        self._skipped = 0

    def happened(self, recorder: Recorder, device: int, requested: int, in_use: int, free: int) -> None:
        """Save the state. A newer error takes the place of one that was handled."""
        log = recorder.log
        previous = self.last
        if previous is not None and log.completed > previous.completed:
            self._handled[previous.signature] = self._handled.get(previous.signature, 0) + 1
        self.count += 1
        signature = (requested, log.name)
        if self._handled.get(signature, 0) >= _SAME_HANDLED and previous is not None:
            self._skipped += 1
            previous.completed, previous.is_older = log.completed, True
            return
        oom = {
            "message": files.BLANK,  # known only when the error arrives somewhere
            "time_us": now_us(),
            "device": device,
            "requested_bytes": requested,
            "device_in_use_bytes": in_use,
            "device_free_bytes": free,
            "phase": log.name,
            "step": log.step,
        }
        snapshot = recorder.take("oom", device, oom)
        events = sum(len(trace) for trace in snapshot["device_traces"])
        replace = previous.file if previous is not None else None
        file = recorder.write(snapshot, replace or recorder.path(), True if replace else None)
        self.last = _Oom(snapshot["memtrace"], log.completed, signature, file or replace, events)

    def pending(self, completed: int) -> bool:
        """Whether the last error has not been followed by any progress."""
        return self.last is not None and not self.announced and completed <= self.last.completed

    def failed(self, error: BaseException | None) -> None:
        """The program ends with the last error: complete the file and print the five lines."""
        if self.last is None or self.announced:
            return
        self.announced = True
        message = _oom_text(error)
        self._complete(message)
        for line in oom_lines(self.last.extra, self.last.file, self.last.events, self.last.is_older):
            messages.say(line)

    def _complete(self, message: str) -> None:
        """Write the error's text, or none, where it was left open."""
        if self.last is not None and self.last.file is not None:
            self.last.extra["oom"]["message"] = message
            with messages.guarded("adding the error's text to the file"):
                files.fill_blank(self.last.file, message)

    def set_aside(self, recorder: Recorder) -> None:
        """The program carried on: move the state of a handled error out of the way of the final file, and say so."""
        if self.last is None or self.announced:
            return
        self.announced = True
        where = "its state could not be saved"
        self._complete("")
        if self.last.file is not None:
            with messages.guarded("renaming a file"):
                self.last.file = files.rename(self.last.file, recorder.path("-oom"), recorder.options.force)
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
