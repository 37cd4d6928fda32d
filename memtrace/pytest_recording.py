"""What the pytest plugin does around one test: record, then measure the peak and tell what it was for."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from memtrace.errors import NoAnswerError
from memtrace.record import backend
from memtrace.record.recorder import active
from memtrace.units import format_bytes

_MAX_ENTRIES = sys.maxsize  # PyTorch's own default: a ring that overflowed could hide the peak


@dataclass(frozen=True, slots=True)
class MeasuredTest:
    """A test's peak of allocated bytes on the GPU where it was highest, and the budget there as text.

    ``largest`` is the category that holds most; ``start_bytes`` were live before the test.
    """

    peak_bytes: int
    start_bytes: int
    device: int
    largest: str
    budget: str
    is_oom: bool

    def over(self, limit_bytes: int) -> str:
        """Why the test fails, in one line."""
        before = f", {format_bytes(self.start_bytes)} of it live before the test" if self.start_bytes else ""
        return (
            f"peak of GPU memory {format_bytes(self.peak_bytes)} on GPU {self.device}{before}; the limit is "
            f"{format_bytes(limit_bytes)}. The budget is in the section 'GPU memory'."
        )


class GpuMeter:
    """Records from its creation until :meth:`finish`. Raises MemtraceError where nothing can be recorded."""

    def __init__(self) -> None:
        if active() is not None:
            raise NoAnswerError("memtrace is already recording this process")
        self._backend = backend.get()
        self._backend.require()
        self._backend.start("python", _MAX_ENTRIES)

    def finish(self) -> MeasuredTest:
        """Stop recording and measure."""
        try:
            raw = self._backend.snapshot()
        finally:
            self._backend.stop()
        from memtrace.history.timeline import build
        from memtrace.snapshot.load import from_raw

        snapshot = from_raw(raw, "this test")
        timelines = [build(snapshot, device) for device in snapshot.devices]
        timeline = max(timelines, key=lambda line: line.peaks()[1].size_bytes)
        from memtrace.analysis import analyse
        from memtrace.answers.report import report
        from memtrace.render.report_text import render_report

        budget = report(analyse(timeline))
        largest = max(budget.categories, key=lambda name: budget.categories[name])
        size = budget.categories[largest]
        return MeasuredTest(
            peak_bytes=timeline.peaks()[1].size_bytes,
            start_bytes=timeline.curve_at(-1)[1],
            device=timeline.device.device,
            largest=f"{largest} {format_bytes(size)}" if size else "",
            budget="\n".join(line.plain for line in render_report(budget)),
            is_oom=bool(timeline.oom_events),
        )
