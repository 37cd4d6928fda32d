"""What the program was doing when: phase and step marks on the clock of the events (µs since the Unix epoch)."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import Any

# Names that memtrace itself uses; a program may mark any others.
LOAD, FORWARD, BACKWARD, OPTIMIZER = "load", "forward", "backward", "optimizer"
BETWEEN, EVALUATION = "between", "evaluation"

MAX_MARKS = 200_000  # about 40 thousand steps; a ring of events never reaches that far back


def now_us() -> int:
    """Microseconds since the Unix epoch: the clock that the allocator's events are written in."""
    return time.time_ns() // 1000


class PhaseLog:
    """The marks of one process. A mark says: from ``time_us`` on, phase ``name`` of step ``step``.

    Steps count from 0 and grow with every optimizer step, unless the program counts them itself.
    """

    def __init__(self) -> None:
        self.name = LOAD
        self.step = 0
        self.completed = 0  # forward passes, backward passes and steps that came to their end
        self.counted_by_program = False
        self.autocast = False  # whether a forward pass was called under autocast
        self.run: dict[str, Any] = {}  # batch, length and loss of the run, see AutoHooks
        self.marks: deque[tuple[int, str, int]] = deque([(now_us(), LOAD, 0)], maxlen=MAX_MARKS)
        self.on_enter: Callable[[str, str], None] | None = None  # called with the phase that ends and the next one

    def enter(self, name: str) -> None:
        """Begin a phase; nothing happens when it is already on."""
        if name != self.name:
            if (tell := self.on_enter) is not None:  # another thread may set it to None
                tell(self.name, name)
            self.name = name
            self.marks.append((now_us(), name, self.step))

    def next_step(self, by_program: bool) -> bool:
        """Count a step; the automatic count stops as soon as the program counts. Returns whether it counted."""
        if by_program and not self.counted_by_program:
            self.counted_by_program = True
            if self.step > 0:  # this very step has been counted already, perhaps several times
                self.step = 1
                return True
        elif not by_program and self.counted_by_program:
            return False
        self.step += 1
        self.marks.append((now_us(), self.name, self.step))
        return True

    def rows(self, since_us: int) -> list[dict[str, Any]]:
        """The marks that matter for events from ``since_us`` on: the last one before, and all after."""
        marks = list(self.marks)
        first = max(0, bisect_right(marks, since_us, key=lambda mark: mark[0]) - 1)
        return [{"time_us": at, "name": name, "step": step} for at, name, step in marks[first:]]
