"""What all screens share: the recording, the device looked at, the cursor, and the tables made from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from memtrace.answers.report import Report
from memtrace_tui.data.eventlog import EventLog
from memtrace_tui.data.query import Term, parse
from memtrace_tui.data.rows import AllocationTable, Bool
from memtrace_tui.lru import Cache
from memtrace_tui.provider import Provider, Recording
from memtrace_tui.settings import Settings

if TYPE_CHECKING:
    from memtrace.answers.diff.comparison import Difference, Story
    from memtrace.answers.simulate import Answer
    from memtrace.explain.answer import Explanation


class Session:
    """One run of the browser over a file (and, for a diff, a second one)."""

    def __init__(self, recording: Recording, other: Recording | None = None, settings: Settings | None = None) -> None:
        self.recording = recording
        self.other = other
        self.settings = settings or Settings()
        # What is in force: jumps change these alone, so that only what someone chose is remembered.
        self.coloring = self.settings.coloring
        self.segment_sort = self.settings.segment_sort
        self.group = self.settings.group
        self.provider: Provider = recording.provider()
        self.event = self.provider.start.event
        self._tables: dict[int, AllocationTable] = {}  # by id of the provider
        self._logs: dict[int, EventLog] = {}
        self.swapped = False  # whether the cursor moves in the second file
        self.other_event = other.provider().start.event if other is not None else -1
        self._differences: Cache[tuple[int, int], Difference] = Cache(8)
        self._story: Story | None = None
        self.explained_event: int | None = None  # asked for on the findings screen; None: the device's own start
        self.whatifs: dict[int, Answer] = {}  # the last what-if replays, by id of the provider
        self._explanations: dict[tuple[int, int], Explanation] = {}
        self.filter = ""
        self.terms: tuple[Term, ...] = ()
        self._fitting: Cache[tuple[int, str], Bool] = Cache(4)

    @property
    def report(self) -> Report:
        """The budget at the cursor."""
        return self.provider.report(self.event)

    @property
    def table(self) -> AllocationTable:
        """The allocation table of the device looked at."""
        key = id(self.provider)
        if key not in self._tables:
            self._tables[key] = AllocationTable(self.provider)
        return self._tables[key]

    @property
    def log(self) -> EventLog:
        """The event log of the device looked at."""
        key = id(self.provider)
        if key not in self._logs:
            self._logs[key] = EventLog(self.table)
        return self._logs[key]

    # -- the filter

    def filter_by(self, text: str) -> None:
        """Filter all screens. Raises UsageError for a text that makes no sense, and changes nothing then."""
        self.terms = parse(text)
        self.filter = text.strip()

    @property
    def fitting(self) -> Bool | None:
        """Which rows of the allocation table the filter fits; None without one."""
        if not self.terms:
            return None
        table = self.table
        return self._fitting.get((id(table), self.filter), lambda: _mask(table, self.terms))

    @property
    def fitting_events(self) -> Bool | None:
        """Which events the filter fits; None without one."""
        if not self.terms:
            return None
        log = self.log
        return self._fitting.get((id(log), self.filter), lambda: log.fitting(self.terms))

    def live(self) -> NDArray[np.int64]:
        """Rows live at the cursor that the filter fits."""
        rows, fits = self.provider.live(self.event), self.fitting
        return rows if fits is None else rows[fits[rows]]

    @property
    def explained(self) -> tuple[int, int]:
        """(provider's id, event) that the findings are about."""
        event = self.provider.start.event if self.explained_event is None else self.explained_event
        return id(self.provider), event

    @property
    def explanation(self) -> tuple[int, Explanation] | None:
        """(event, what ``explain`` says of it); None until it has been worked out."""
        found = self._explanations.get(self.explained)
        return None if found is None else (self.explained[1], found)

    def explain(self) -> tuple[tuple[int, int], Explanation]:
        """Work the explanation out. Takes a second or two; safe in a thread, as nothing of the session changes."""
        from memtrace.explain.explain import explain_snapshot  # not before it is needed: it takes its time

        provider, key = self.provider, self.explained
        return key, explain_snapshot(provider.analysis, provider.at(key[1]))

    def simulate(self, conf: str, on_progress: Callable[[float], None]) -> Answer:
        """Replay under other settings ("" tries the sensible ones). Takes seconds; safe in a thread. Raises
        MemtraceError where the recording can't be replayed."""
        from memtrace.answers.simulate import Question, answer

        question = Question(confs=(conf,) if conf else (), search=not conf, addresses=False)
        return answer(self.provider.timeline, question, progress=on_progress)

    def keep(self, key: tuple[int, int], explanation: Explanation) -> None:
        """Remember an explanation."""
        self._explanations[key] = explanation

    def move(self, event: int) -> bool:
        """Put the cursor on the nearest event; whether that changed anything."""
        event = self.provider.clamp(event)
        changed = event != self.event
        self.event = event
        return changed

    def look_at(self, device: int) -> None:
        """Change the device; the cursor goes to that device's own start."""
        self.provider = self.recording.provider(device)
        self.explained_event = None
        self.event = self.provider.start.event

    # -- two files

    def pair(self) -> tuple[Provider, Provider]:
        """Providers of the first and the second file. Only with two files."""
        assert self.other is not None
        shown = self.provider
        rest = (self.recording if self.swapped else self.other).provider()
        return (rest, shown) if self.swapped else (shown, rest)

    def pair_events(self) -> tuple[int, int]:
        """Cursors in the first and the second file."""
        return (self.other_event, self.event) if self.swapped else (self.event, self.other_event)

    def difference(self) -> Difference:
        """The second file minus the first, each at its cursor."""
        from memtrace.answers.diff.diff import diff
        from memtrace.explain.causes import story_of

        events = self.pair_events()

        def make() -> Difference:
            (first, second), (a, b) = self.pair(), events
            if self._story is None:
                self._story = story_of(first.analysis, second.analysis)
            return replace(diff(first.analysis, second.analysis, first.at(a), second.at(b)), story=self._story)

        return self._differences.get(events, make)

    def swap(self) -> None:
        """The cursor moves in the other file from now on; this file's cursor stays where it is."""
        assert self.other is not None
        self.swapped = not self.swapped
        self.provider = (self.other if self.swapped else self.recording).provider()
        self.event, self.other_event = self.other_event, self.event
        self.explained_event = None


def _mask(table: AllocationTable, terms: tuple[Term, ...]) -> Bool:
    fits = np.zeros(len(table.table), np.bool_)
    fits[table.filtered(np.arange(len(table.table)), terms)] = True
    return fits
