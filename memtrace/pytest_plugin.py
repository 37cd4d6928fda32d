"""pytest plugin: fail a test by its peak of GPU memory, and print what the memory was for.

``@pytest.mark.limit_gpu_memory("2 GiB")`` fails a test whose peak of allocated memory, on any GPU and with what was
live before it, exceeds the limit. ``--memtrace`` records every test and lists the largest peaks at the end. The
fixture ``gpu_forecast`` fails a test whose run would not fit, without a GPU; ``--memtrace-dryrun`` runs all tests on a
card that is not there. Nothing heavy is imported, and nothing is recorded, for tests that use none of them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from memtrace.estimate.forecast import Forecast

MARKER = "limit_gpu_memory"
_PROPERTY = "memtrace"
_LISTED = 10
_DRY = pytest.StashKey[Any]()  # the dry device


@pytest.fixture
def gpu_forecast() -> Callable[..., Forecast]:
    """``gpu_forecast(model, lengths, limit="22 GiB", batch=2, checkpointing=False, …)``: the forecast of that run.

    The test fails if the run would die. Options are those of ``memtrace.estimate.options.RunOptions``.
    """

    def fits(model: str, lengths: Sequence[int], *, limit: str | int, **options: Any) -> Forecast:
        from memtrace.allocator.config import AllocatorConfig
        from memtrace.estimate.forecast import RunPlan, forecast
        from memtrace.estimate.options import RunOptions
        from memtrace.estimate.presets import model_shape
        from memtrace.estimate.schedule import steps_of
        from memtrace.estimate.source import ShapeSource
        from memtrace.units import format_bytes, parse_size

        asked = RunOptions(**{"sequence": 2, "embeddings_require_grad": options.get("checkpointing", True), **options})
        steps = steps_of(lengths, batch=asked.batch, accumulation=asked.accumulation)
        limit_bytes = parse_size(str(limit))
        found = forecast(
            RunPlan(ShapeSource(model_shape(model)), asked, steps), AllocatorConfig(limit_bytes=limit_bytes)
        )
        if found.oom is not None:
            refused = format_bytes(found.oom.requested_bytes)
            pytest.fail(
                f"the run would die in step {found.oom.step} ({found.oom.phase}): {refused} refused under a limit of "
                f"{format_bytes(limit_bytes)}",
                pytrace=False,
            )
        return found

    return fits


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--memtrace``, ``--memtrace-dryrun``."""
    add = parser.getgroup("memtrace", "GPU memory").addoption
    add("--memtrace", action="store_true", help="record every test's GPU memory and list the largest peaks")
    add("--memtrace-dryrun", action="store_true", help="run the tests on a GPU that is not there: memory, no values")
    add("--memtrace-gpu", default="h200", metavar="PRESET", help="which GPU that is (default h200)")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Put the dry device in place before a conftest imports PyTorch."""
    asked = early_config.known_args_namespace
    if not asked.memtrace_dryrun:
        return
    from memtrace.errors import MemtraceError

    try:
        from memtrace.estimate.dryrun.assumed import Assumptions
        from memtrace.estimate.dryrun.script import DryBackend, DryDevice
        from memtrace.estimate.presets import gpu_preset
        from memtrace.record import backend

        gpu = gpu_preset(asked.memtrace_gpu)
        early_config.stash[_DRY] = device = DryDevice(gpu, gpu.total_bytes, Assumptions())
    except MemtraceError as error:
        raise pytest.UsageError(f"--memtrace-dryrun: {error}") from None
    in_use = contextlib.ExitStack()
    in_use.enter_context(backend.use(DryBackend(device)))
    early_config.add_cleanup(in_use.close)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker; with ``--memtrace``, make sure that there is something to measure."""
    config.addinivalue_line(
        "markers", f'{MARKER}(size): fail the test if its peak of allocated GPU memory exceeds size, "2 GiB" say'
    )
    if config.getoption("memtrace"):
        from memtrace.errors import MemtraceError
        from memtrace.record import backend

        try:
            backend.get().require()
        except MemtraceError as error:
            raise pytest.UsageError(f"--memtrace: {error}") from None


def _limit_bytes(item: pytest.Item) -> int | None:
    """The marker's limit; None without a marker. A marker that makes no sense fails the test."""
    marker = item.get_closest_marker(MARKER)
    if marker is None:
        return None
    from memtrace.errors import UsageError
    from memtrace.units import parse_size

    if len(marker.args) != 1 or marker.kwargs or not isinstance(marker.args[0], (str, int)):
        pytest.fail(f'{MARKER} takes one size: @pytest.mark.{MARKER}("2 GiB")', pytrace=False)
    try:
        return parse_size(str(marker.args[0]))
    except UsageError as error:
        wrong = str(error)
    pytest.fail(f"{MARKER}: {wrong}", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Record the test's call if it is to be measured, and judge its peak."""
    limit = _limit_bytes(item)
    if limit is None and not item.config.getoption("memtrace"):
        return (yield)
    from memtrace.errors import MemtraceError

    recording = None
    try:
        recording = GpuMeter()
    except MemtraceError as error:
        item.user_properties.append((_PROPERTY, {"unmeasured": str(error)}))
    if recording is None:  # not within the except, which would become part of what a failing test reports
        return (yield)
    try:
        result = yield
    except BaseException:
        _note(item, recording.finish(), limit)
        raise
    measured = recording.finish()
    if _note(item, measured, limit) and limit is not None:
        pytest.fail(measured.over(limit), pytrace=False)
    return result


def _note(item: pytest.Item, measured: MeasuredTest, limit_bytes: int | None) -> bool:
    """Attach the figures (and, where a limit is exceeded or memory ran out, the budget); True if over the limit."""
    facts = {"peak_allocated_bytes": measured.peak_bytes, "largest": measured.largest, "limit_bytes": limit_bytes}
    item.user_properties.append((_PROPERTY, facts))
    exceeded = limit_bytes is not None and measured.peak_bytes > limit_bytes
    if exceeded or measured.is_oom:
        item.add_report_section("call", "GPU memory", measured.budget)
    return exceeded


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The largest peaks with ``--memtrace``; and always a word on what could not be checked, or was assumed."""
    device = terminalreporter.config.stash.get(_DRY, None)
    if device is not None:
        from memtrace.estimate.dryrun.outcome import assumed_lines

        for line in assumed_lines(device.assumed.listed.values()):
            terminalreporter.write_line(line)
    measured: list[tuple[int, str, str]] = []
    unmeasured: dict[str, int] = {}
    for outcome in ("passed", "failed", "skipped", "xfailed", "xpassed"):
        for report in terminalreporter.getreports(outcome):
            if getattr(report, "when", None) != "call":
                continue
            for name, facts in report.user_properties:
                if name != _PROPERTY:
                    continue
                if "unmeasured" in facts:
                    unmeasured[facts["unmeasured"]] = unmeasured.get(facts["unmeasured"], 0) + 1
                else:
                    measured.append((facts["peak_allocated_bytes"], report.nodeid, facts["largest"]))
    for reason, count in unmeasured.items():
        tests = "test" if count == 1 else "tests"
        terminalreporter.write_line(
            f"memtrace: the GPU memory of {count} {tests} was not measured: {reason}", yellow=True
        )
    if not terminalreporter.config.getoption("memtrace") or not measured:
        return
    from memtrace.units import format_bytes

    terminalreporter.section("largest peaks of GPU memory")
    for peak, nodeid, largest in sorted(measured, reverse=True)[:_LISTED]:
        terminalreporter.write_line(f"{format_bytes(peak):>12}  {nodeid}{f'  ({largest})' if largest else ''}")


# one test
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
        from memtrace.units import format_bytes

        before = f", {format_bytes(self.start_bytes)} of it live before the test" if self.start_bytes else ""
        return (
            f"peak of GPU memory {format_bytes(self.peak_bytes)} on GPU {self.device}{before}; the limit is "
            f"{format_bytes(limit_bytes)}. The budget is in the section 'GPU memory'."
        )


class GpuMeter:
    """Records from its creation until :meth:`finish`. Raises MemtraceError where nothing can be recorded."""

    def __init__(self) -> None:
        from memtrace.errors import NoAnswerError
        from memtrace.record import backend, recorder

        if recorder.active() is not None:
            raise NoAnswerError("memtrace is already recording this process")
        self._backend = backend.get()
        self._backend.require()
        self._backend.start("python", sys.maxsize)  # PyTorch's own default: a ring that overflowed could hide the peak

    def finish(self) -> MeasuredTest:
        """Stop recording and measure."""
        try:
            raw = self._backend.snapshot()
        finally:
            self._backend.stop()
        from memtrace.analysis import analyse
        from memtrace.answers.report import report
        from memtrace.attribution.categories import category_name
        from memtrace.history.timeline import build
        from memtrace.render.report_text import render_report
        from memtrace.snapshot.load import from_raw
        from memtrace.units import format_bytes

        snapshot = from_raw(raw, "this test")
        timelines = [build(snapshot, device) for device in snapshot.devices]
        timeline = max(timelines, key=lambda line: line.peaks()[1].size_bytes)
        budget = report(analyse(timeline))
        largest = max(budget.categories, key=lambda name: budget.categories[name])
        size = budget.categories[largest]
        return MeasuredTest(
            peak_bytes=timeline.peaks()[1].size_bytes,
            start_bytes=timeline.curve_at(-1)[1],
            device=timeline.device.device,
            largest=f"{category_name(largest, budget.lora['meaning'])} {format_bytes(size)}" if size else "",
            budget="\n".join(line.plain for line in render_report(budget)),
            is_oom=bool(timeline.oom_events),
        )
