"""What all screens share: the recording, the device looked at, the cursor, and the tables made from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from memtrace.answers.report import Report
from memtrace.snapshot.model import I8, Bool
from memtrace_tui.data.coloring import NO_COLOURS, Coloring, coloring
from memtrace_tui.data.query import FilterTerm, parse
from memtrace_tui.data.rows import AllocationTable, EventLog
from memtrace_tui.provider import BrowsedRecording, Provider, StartView
from memtrace_tui.settings import Settings

if TYPE_CHECKING:
    from memtrace.answers.diff.comparison import Difference, Story
    from memtrace.answers.simulate import Answer
    from memtrace.explain.answer import Explanation


class Session:
    """One run of the browser over a file (and, for a diff, a second one)."""

    def __init__(
        self, recording: BrowsedRecording, other: BrowsedRecording | None = None, settings: Settings | None = None
    ) -> None:
        self.recording = recording
        self.other = other
        self.settings = settings or Settings()
        # What is in force: jumps change these alone, so that only what someone chose is remembered.
        self.coloring = self.settings.coloring
        self.segment_sort = self.settings.segment_sort
        self.group = self.settings.group
        self.provider: Provider = recording.provider()
        self.event = self.provider.start.event
        self.playing = 0  # 1 while the cursor plays forward, -1 back
        self.swapped = False  # whether the cursor moves in the second file
        self.other_event = other.provider().start.event if other is not None else -1
        self.mark: int | None = None  # event A of a comparison within one file
        self.outcome = ""  # what the second file is, where it was predicted
        self.explained_event: int | None = None  # asked for on the findings screen; None: the device's own start
        self.whatifs: dict[Provider, Answer] = {}  # the last what-if replays
        self._explanations: dict[tuple[Provider, int], Explanation] = {}
        self.filter = ""
        self.terms: tuple[FilterTerm, ...] = ()
        self._colours: tuple[object, Coloring] = (None, NO_COLOURS)

    @property
    def report(self) -> Report:
        """The budget at the cursor."""
        return self.provider.report(self.event)

    @property
    def table(self) -> AllocationTable:
        """The allocation table of the device looked at."""
        return _table(self.provider)

    @property
    def log(self) -> EventLog:
        """The event log of the device looked at."""
        return _log(self.provider)

    @property
    def by_time(self) -> bool:
        """Whether timelines have columns of equal stretches of time."""
        return self.settings.axis == "time" and self.provider.timeline.trace.time_us is not None

    # -- the filter

    def filter_by(self, text: str) -> None:
        """Filter all screens. Raises UsageError for a text that makes no sense, and changes nothing then."""
        self.terms = parse(text)
        self.filter = text.strip()

    @property
    def fitting(self) -> Bool | None:
        """Which rows of the allocation table the filter fits; None without one."""
        return _fitting(self.table, self.terms) if self.terms else None

    @property
    def fitting_events(self) -> Bool | None:
        """Which events the filter fits; None without one."""
        return _fitting(self.log, self.terms) if self.terms else None

    @property
    def twins(self) -> Bool | None:
        """Which rows are on the other side of the comparison, too: live at event A, or with the same call site and size
        at the other file's cursor. None where nothing is compared."""
        if not self.compares or self.coloring != "compared":
            return None
        (first, second), (a, b) = self.pair(), self.pair_events()
        return _twins(self.provider, *((first, a) if self.swapped or self.other is None else (second, b)))

    @property
    def ranks(self) -> tuple[int, int] | None:
        """Ranks of this file and of the other one, where both have one and they differ."""
        if self.other is None:
            return None
        from memtrace.ranks.summary import rank_of

        mine, other = (rank_of(each.timeline.snapshot, each.source) for each in self.pair())
        if mine is None or other is None or mine == other:
            return None
        return (other, mine) if self.swapped else (mine, other)

    @property
    def colours(self) -> Coloring:
        """The colours of the blocks at the cursor."""
        key = (self.provider, self.event, self.coloring, self.terms, self.mark, self.other, self.other_event)
        if key != self._colours[0]:
            layout = self.provider.layout(self.event)
            made = coloring(self.provider, layout, self.coloring, self.fitting, self.twins, self.ranks)
            self._colours = key, made
        return self._colours[1]

    def live(self) -> I8:
        """Rows live at the cursor that the filter fits."""
        rows, fits = self.provider.live(self.event), self.fitting
        return rows if fits is None else rows[fits[rows]]

    @property
    def explained(self) -> tuple[Provider, int]:
        """Device and event that the findings are about."""
        return self.provider, self.provider.start.event if self.explained_event is None else self.explained_event

    @property
    def explanation(self) -> tuple[int, Explanation] | None:
        """(event, what ``explain`` says of it); None until it has been worked out."""
        found = self._explanations.get(self.explained)
        return None if found is None else (self.explained[1], found)

    def explain(self) -> None:
        """Work the explanation out. Takes a second or two; safe in a thread, as all it does is to add it."""
        from memtrace.explain.explain import explain_snapshot  # not before it is needed: it takes its time

        provider, event = self.explained
        self._explanations[provider, event] = explain_snapshot(provider.analysis, provider.at(event))

    def simulate(self, conf: str, on_progress: Callable[[float], None]) -> Answer:
        """Replay under other settings ("" tries the sensible ones). Takes seconds; safe in a thread. Raises
        MemtraceError where the recording can't be replayed."""
        from memtrace.answers.simulate import Question, answer

        question = Question(confs=(conf,) if conf else (), search=not conf, addresses=False)
        return answer(self.provider.timeline, question, progress=on_progress)

    def predicted(self, answer: Answer, number: int) -> BrowsedRecording:
        """A run of a what-if answer as a recording of its own. Takes seconds; safe in a thread."""
        from memtrace.allocator.export import as_snapshot
        from memtrace.snapshot.load import from_raw

        snapshot = self.provider.timeline.snapshot
        made = from_raw(as_snapshot(snapshot, answer.simulations[number]),
                        f"what if {answer.runs[number].conf or 'defaults'}")  # fmt: skip
        recording = BrowsedRecording(made, StartView(self.provider.device))
        recording.provider()
        return recording

    def move(self, event: int) -> bool:
        """Put the cursor on the nearest event; whether that changed anything."""
        before, self.event = self.event, self.provider.clamp(event)
        return before != self.event

    def look_at(self, device: int) -> None:
        """Change the device; the cursor goes to that device's own start."""
        self.provider = self.recording.provider(device)
        self.explained_event = self.mark = None
        self.event = self.provider.start.event

    # -- two files, or two events of one

    @property
    def compares(self) -> bool:
        """Whether there is something to compare: a second file, or a mark."""
        return self.other is not None or self.mark is not None

    def open_other(self, other: BrowsedRecording, outcome: str = "") -> None:
        """Compare with another recording from now on; ``outcome`` says in one line what it is."""
        if self.swapped:
            self.swap()
        self.other, self.outcome = other, outcome
        self.other_event = other.provider().start.event

    def pair(self) -> tuple[Provider, Provider]:
        """Providers of the first and the second side: two files, or twice the same one."""
        shown = self.provider
        if self.other is None:
            return shown, shown
        rest = (self.recording if self.swapped else self.other).provider()
        return (rest, shown) if self.swapped else (shown, rest)

    def pair_events(self) -> tuple[int, int]:
        """Cursors of the first and the second side; with one file, the mark and the cursor."""
        if self.other is None:
            return self.event if self.mark is None else self.mark, self.event
        return (self.other_event, self.event) if self.swapped else (self.event, self.other_event)

    def difference(self) -> Difference:
        """The second side minus the first, each at its cursor."""
        return _difference(*self.pair(), *self.pair_events())

    def swap(self) -> None:
        """The cursor moves on the other side from now on; this side's stays where it is."""
        if self.other is None:
            self.event, self.mark = self.event if self.mark is None else self.mark, self.event
            return
        self.swapped = not self.swapped
        self.provider = (self.other if self.swapped else self.recording).provider()
        self.event, self.other_event = self.other_event, self.event
        self.explained_event = None


@lru_cache(8)
def _table(provider: Provider) -> AllocationTable:
    return AllocationTable(provider)


@lru_cache(8)
def _log(provider: Provider) -> EventLog:
    return EventLog(_table(provider))


@lru_cache(4)
def _fitting(records: AllocationTable | EventLog, terms: tuple[FilterTerm, ...]) -> Bool:
    return records.fitting(terms)


@lru_cache(4)
def _twins(provider: Provider, other: Provider, event: int) -> Bool:
    """Which rows the other side holds at the event; in another file, those of the same call site and size."""
    mine, theirs, there = provider.timeline.allocations, other.timeline.allocations, other.live(event)
    if provider is other:
        found = np.zeros(len(mine), np.bool_)
        found[there] = True
        return found
    keys = {(other.site(row), int(theirs.requested_bytes[row])) for row in there.tolist()}
    made = zip(mine.stack.tolist(), mine.requested_bytes.tolist(), strict=True)
    return np.array([(provider.sites[stack], size) in keys for stack, size in made], dtype=np.bool_)


@lru_cache(8)
def _difference(first: Provider, second: Provider, a: int, b: int) -> Difference:
    from memtrace.answers.diff.diff import diff

    found = diff(first.analysis, second.analysis, first.at(a), second.at(b))
    return found if first is second else replace(found, story=_story(first, second))


@lru_cache(4)
def _story(first: Provider, second: Provider) -> Story:
    """Why the peaks of two files differ, wherever the cursors are."""
    from memtrace.explain.causes import story_of

    return story_of(first.analysis, second.analysis)
