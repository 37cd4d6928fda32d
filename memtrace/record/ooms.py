"""Out-of-memory errors: saved when they happen, announced only when they end the program.

The observer cannot know whether the program will catch the error and carry on (a smaller batch, another algorithm).
So the state is saved at once under the recording's own name, and the announcement waits: an error that escapes, or
after which nothing was completed any more, is a failure; any other was handled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memtrace.attribution.categories import Category
from memtrace.record import files, messages
from memtrace.record.phases import PhaseLog
from memtrace.units import counted, format_bytes
from memtrace.writing import free_name

if TYPE_CHECKING:
    from memtrace.explain.verdict import Verdict

_SAME_HANDLED = 3  # times that the same request in the same phase was handled before its state is no longer saved


@dataclass(slots=True)
class SavedOom:
    """One error. ``extra`` is the snapshot's ``memtrace`` dictionary, ``completed`` the program's progress then.

    ``verdict`` is None where the figures for it are not there. ``is_older``: the same request failed again later, and
    its state was not saved any more.
    """

    extra: dict[str, Any]
    completed: int
    file: Path | None
    events: int
    verdict: Verdict | None
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
        for line in oom_lines(self.last):
            messages.say(line)

    def set_aside(self, wanted: Path, force: bool) -> None:
        """The program carried on: move the state of a handled error out of the way of the final file, and say so."""
        if self.last is None or self.announced:
            return
        self.announced = True
        where = "its state could not be saved"
        if self.last.file is not None:
            with messages.guarded("renaming a file"):
                self.last.file = self.last.file.replace(wanted) if force else free_name(self.last.file, wanted)
            where = f"the state at the last one saved is in {self.last.file}"
        times = "an out-of-memory error was" if self.count == 1 else f"{self.count} out-of-memory errors were"
        messages.say(f"{times} handled by the program itself; {where}")


def verdict_on(snapshot: Mapping[str, Any]) -> Verdict | None:
    """What ``memtrace explain`` will say of the snapshot that was taken at an error."""
    with messages.guarded("judging the error"):
        from memtrace.explain.process_facts import facts_of_process  # numpy: not before the program needs it
        from memtrace.explain.verdict import judge

        extra = snapshot["memtrace"]
        trace = snapshot["device_traces"][extra["device"]]
        return judge(facts_of_process(extra, trace, snapshot.get("allocator_settings", {})))
    return None


def oom_lines(oom: SavedOom) -> list[str]:
    """Five lines: what failed, why, what holds the memory, where the state was saved, and what to run next."""
    extra, error = oom.extra, oom.extra["oom"]
    allocated, reserved = (int(extra["stats"].get(f"{n}_bytes.all.current", 0)) for n in ("allocated", "reserved"))
    rank = f" (rank {extra['rank']} of {extra['world_size']})" if extra["world_size"] > 1 else ""
    why = "why is not known"
    if oom.verdict is not None:
        sure = "" if oom.verdict.confidence == "measured" else "probably "
        why = f"{sure}{oom.verdict.verdict.replace('_', ' ')}: {' '.join(oom.verdict.because)}"
    lines = [
        f"out of memory{rank} in phase {error['phase']}, step {error['step']}: "
        f"{format_bytes(error['requested_bytes'])} more were asked for; {format_bytes(allocated)} allocated, "
        f"{format_bytes(reserved)} reserved on device {extra['device']}",
        why,
        _holders(extra["labels"], allocated),
    ]
    if oom.file is None:
        return [*lines, "the state could not be saved (see above)", "next: free space or choose another folder"]
    which = "an earlier failure of the same request" if oom.is_older else "the failure"
    events = counted(oom.events, "event")
    return [*lines, f"state at {which} saved to {oom.file} ({events})", f"next: memtrace explain {oom.file}"]


def _holders(labels: Sequence[Mapping[str, Any]], allocated_bytes: int) -> str:
    """By the labels that hold at the snapshot and lie in the allocator's memory."""
    known: Counter[str] = Counter()
    for row in labels:
        if row["until_time_us"] is None and not row.get("outside"):
            known[row["category"]] += row["bytes"]
    base, trained = known[Category.BASE_WEIGHTS], known[Category.LORA]
    rest = max(0, allocated_bytes - base - trained)
    return (
        f"of the allocated memory {format_bytes(base)} are frozen weights, {format_bytes(trained)} what is trained "
        f"(with gradients and states), {format_bytes(rest)} activations and temporaries"
    )


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
