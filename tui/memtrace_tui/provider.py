"""One recording for the screens: the analysis of each device, what it says at the cursor, and where to jump.

Nothing here imports Textual. Every number comes from the dataclasses that ``--json`` prints.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from memtrace.analysis import Analysis
from memtrace.answers.curves import live_curve
from memtrace.answers.report import Moment, Report, moment_of, report
from memtrace.attribution.categories import category_name
from memtrace.attribution.phases import Phase
from memtrace.attribution.user_rules import UserRule
from memtrace.cache.index import OpenRecording, open_recording
from memtrace.errors import MemtraceError
from memtrace.history.layout import Layout, layout_at
from memtrace.history.timeline import At, Peak, Window
from memtrace.ranges import peak_within
from memtrace.snapshot.devices import choose_device
from memtrace.snapshot.model import I8, Device, Snapshot
from memtrace.units import printable


class Cancelled(Exception):
    """Raised inside a loading thread once the user has given up on it."""


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """A stretch of one phase: ``start <= event < stop``; ``step`` is -1 while the model is loaded."""

    start: int
    stop: int
    phase: str
    step: int


@dataclass(frozen=True, slots=True)
class StartView:
    """What to open a recording on: ``device``, ``at`` and the ranges are as the command line has them."""

    device: int | None = None
    at: str | None = None
    events: str | None = None
    steps: str | None = None


class Provider:
    """Everything the browser shows of one device. The cursor is an event; -1 is the state before the first one.

    ``report``, ``layout`` and ``live`` answer for an event: the budget, segments and blocks, and the rows of the
    allocation table that the program held (pending frees are no longer the program's). The latest answers are kept.
    """

    def __init__(self, analysis: Analysis, view: StartView | None = None) -> None:
        self.analysis = analysis
        self.timeline = timeline = analysis.timeline
        self.device = timeline.device.device
        self.source = printable(timeline.snapshot.source)  # safe to print
        self.count = len(timeline)  # of events
        view = view or StartView()
        part = analysis.within(view.events, view.steps)
        self.window = part.timeline.span  # what the chart shows at first; the cursor may go anywhere
        self.start = part.at(view.at)
        self.layout: Callable[[int], Layout] = lru_cache(8)(lambda event: layout_at(timeline, event))
        self.report: Callable[[int], Report] = lru_cache(32)(
            lambda event: report(analysis, self.at(event), self.layout(event))
        )
        self.live: Callable[[int], I8] = lru_cache(8)(self.timeline.held_rows)

    def clamp(self, event: int) -> int:
        """The nearest event that exists."""
        return max(min(event, self.count - 1), -1)

    def prepare(self) -> None:
        """What takes a while and is often the next to be asked for. Safe in a thread."""
        facts = self.analysis.attribution.facts
        _ = self.timeline.reserved_bytes, self.live_bytes, facts.phase, facts.step, self._by_address

    # -- at the cursor

    def at(self, event: int) -> At:
        """The event with the name it deserves: oom, peak, reserved-peak, end, or plain event."""
        names = {self.count - 1: "end", self.peaks[2].event: "reserved-peak", self.peaks[1].event: "peak"}
        kind = "oom" if event in self.ooms else names.get(event, "event")
        return At(kind, event, self.timeline.time_us(event))

    def moment(self, event: int) -> Moment:
        """Phase and step there."""
        return moment_of(self.analysis, event)

    def seconds(self, event: int) -> float | None:
        """Seconds since the first event; None where the file has no times."""
        times = self.timeline.trace.time_us
        return None if times is None or not len(times) else int(times[max(event, 0)] - times[0]) / 1e6

    # -- the whole recording

    @cached_property
    def live_bytes(self) -> I8:
        """Requested bytes that the program held after each event."""
        return live_curve(self.analysis)

    @cached_property
    def spans(self) -> tuple[PhaseSpan, ...]:
        """The phases in order."""
        phases = self.analysis.attribution.facts.phases
        parts = zip(pairwise(phases.start.tolist()), phases.phase.tolist(), phases.step.tolist(), strict=True)
        return tuple(PhaseSpan(*ends, Phase(phase).label, step) for ends, phase, step in parts)

    @cached_property
    def ooms(self) -> tuple[int, ...]:
        """Events at which a request was refused."""
        return tuple(self.timeline.oom_events)

    @cached_property
    def peaks(self) -> tuple[Peak, Peak, Peak]:
        """Peaks of requested, allocated and reserved bytes."""
        return self.timeline.peaks()

    @cached_property
    def step_peaks(self) -> tuple[int, ...]:
        """The event of most allocated bytes of each step, of the first 2,000."""
        edges = [*self._step_starts, self.count]
        return tuple(
            peak_within(self.timeline, Window(first, stop)).event
            for first, stop in list(pairwise(edges))[:2000] if stop > first
        )  # fmt: skip

    @cached_property
    def capacity_bytes(self) -> int | None:
        """What the process could have had, where the file tells: its limit or the device's memory."""
        outside = self.report(self.start.event).outside_allocator or {}
        known = [size for size in (outside.get("limit_bytes"), outside.get("device_total_bytes")) if size]
        return min(known) if known else None

    # -- the address space

    @cached_property
    def _by_address(self) -> tuple[I8, I8, NDArray[np.int32], I8]:
        """The addresses where blocks began; where the blocks end that began there or before; the rows by address; and
        where those of each address begin among them."""
        table = self.timeline.allocations
        rows = np.argsort(table.address, kind="stable").astype(np.int32)
        starts, ends = table.address[rows], (table.address + np.maximum(table.block_bytes, 1))[rows]
        first = np.flatnonzero(np.append(True, starts[1:] != starts[:-1])[: len(rows)])
        reach = np.maximum.accumulate(np.maximum.reduceat(ends, first)) if len(rows) else ends
        return starts[first], reach, rows, np.append(first, len(rows))

    def tenants(self, start: int, stop: int) -> I8:
        """Rows of the allocation table that ever lay in ``start <= address < stop``, the last first."""
        table, (address, reach, rows, first) = self.timeline.allocations, self._by_address
        low, high = np.searchsorted(reach, start, side="right"), np.searchsorted(address, stop)
        found: I8 = rows[first[min(low, high)] : first[high]].astype(np.int64)
        found = found[table.address[found] + np.maximum(table.block_bytes[found], 1) > start]
        return found[np.argsort(table.alloc_event[found], kind="stable")[::-1]]

    # -- labels

    @cached_property
    def purposes(self) -> list[str]:
        """``category/subcategory`` of each rule, as people call it."""
        attribution = self.analysis.attribution
        return [category_name(f"{rule.category}/{rule.subcategory}", attribution.lora_meaning)
                for rule in attribution.rules]  # fmt: skip

    @cached_property
    def sites(self) -> list[str]:
        """Call site of each stack; one more entry for "no stack", so that -1 is valid."""
        sites = self.analysis.attribution.sites
        return [printable(sites.label(stack)) for stack in range(len(sites.frame))] + [""]

    def purpose(self, row: int) -> tuple[str, str]:
        """What an allocation is for, and the role of its category."""
        rule = int(self.analysis.attribution.rule[row])
        return self.purposes[rule].replace("_", " "), f"cat:{self.analysis.attribution.rules[rule].category}"

    def site(self, row: int) -> str:
        """Call site of an allocation, "" without a stack."""
        return self.sites[int(self.timeline.allocations.stack[row])]

    # -- jumps

    @cached_property
    def _step_starts(self) -> list[int]:
        return [span.start for i, span in enumerate(self.spans) if i == 0 or span.step != self.spans[i - 1].step]

    def neighbour(self, event: int, direction: int, what: str) -> int:
        """The next (1) or previous (-1) start of a ``phase`` or ``step``; the event itself if none."""
        starts = self._step_starts if what == "step" else [span.start for span in self.spans]
        if direction > 0:
            return next((start for start in starts if start > event), event)
        return max((start for start in starts if start < event), default=event)

    def named(self, where: str) -> int:
        """The event that a person names; see :func:`memtrace.ranges.find_event`."""
        return self.analysis.at(where.strip() or None).event


class BrowsedRecording:
    """A file: its snapshot, and one provider a device, built when first asked for."""

    def __init__(
        self, source: Snapshot | OpenRecording, view: StartView | None = None, rules: Sequence[UserRule] = ()
    ) -> None:
        self._source = source if isinstance(source, OpenRecording) else OpenRecording(source)
        self.snapshot = self._source.snapshot
        self._rules, self._view = rules, view or StartView()
        chosen, self.why_device = choose_device(self.snapshot, self._view.device)
        self.device = chosen.device
        self.devices = tuple(device.device for device in self.snapshot.devices)  # with data
        self._providers: dict[int, Provider] = {}

    @classmethod
    def open(
        cls,
        source: str | os.PathLike[str],
        view: StartView | None = None,
        on_progress: Callable[[float], None] | None = None,
        rules: Sequence[UserRule] = (),
        use_index: bool = True,
        on_read: Callable[[Device], object] = lambda device: None,
    ) -> BrowsedRecording:
        """Load and analyse a file. ``on_progress`` gets shares 0 to 1 and may raise to cancel; ``on_read`` gets what
        the file holds of the device: without its trace while that is read, then whole, before anything is worked out.
        Raises MemtraceError."""
        done = 0.0

        def tell(share: float) -> None:  # never back, though the loader may begin again in another way
            nonlocal done
            done = max(done, share)
            if on_progress is not None:
                on_progress(done)

        def state(snapshot: Snapshot) -> None:
            wanted = view.device if view is not None else None
            if wanted is not None or len(snapshot.devices) == 1:  # else the traces say which it will be
                with suppress(MemtraceError):  # of a device that has nothing but a trace
                    on_read(choose_device(snapshot, wanted)[0])

        recording = cls(open_recording(source, lambda share: tell(share * 0.7), use_index, state), view, rules)
        on_read(recording.snapshot.device(recording.device))
        recording.provider(on_progress=lambda share: tell(0.7 + share / 4))
        tell(1.0)
        return recording

    def provider(self, device: int | None = None, on_progress: Callable[[float], None] | None = None) -> Provider:
        """The provider of a device (default: the chosen one). ``on_progress`` may raise to give up."""
        number = self.device if device is None else device
        if number not in self._providers:
            analysis = self._source.analysis(self.snapshot.device(number), self._rules, on_progress)
            view = self._view if number == self.device else None
            self._providers[number] = Provider(analysis, view)
        return self._providers[number]
