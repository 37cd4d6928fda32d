"""What all screens share: the recording, the device looked at, the cursor, and the tables made from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from memtrace.answers.report import Report
from memtrace_tui.data.eventlog import EventLog
from memtrace_tui.data.query import FilterTerm, parse
from memtrace_tui.data.rows import AllocationTable, Bool
from memtrace_tui.lru import Cache
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
        self._tables: dict[int, AllocationTable] = {}  # by id of the provider
        self._logs: dict[int, EventLog] = {}
        self.swapped = False  # whether the cursor moves in the second file
        self.other_event = other.provider().start.event if other is not None else -1
        self.mark: int | None = None  # event A of a comparison within one file
        self.outcome = ""  # what the second file is, where it was predicted
        self._differences: Cache[tuple[int, int, int, int], Difference] = Cache(8)
        self._stories: dict[tuple[int, int], Story] = {}  # why the peaks of two files differ
        self.explained_event: int | None = None  # asked for on the findings screen; None: the device's own start
        self.whatifs: dict[int, Answer] = {}  # the last what-if replays, by id of the provider
        self._explanations: dict[tuple[int, int], Explanation] = {}
        self.filter = ""
        self.terms: tuple[FilterTerm, ...] = ()
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

    @property
    def twins(self) -> Bool | None:
        """Which rows are on the other side of the comparison, too: live at event A, or with the same call site and size
        at the other file's cursor. None where nothing is compared."""
        if not self.compares or self.coloring != "compared":
            return None
        return self._fitting.get((id(self.provider), f"{self.mark} {self.other_event}"), self._twins)

    def _twins(self) -> Bool:
        rows = self.table.table
        if self.other is None:
            there = np.zeros(len(rows), np.bool_)
            there[self.provider.live(self.mark if self.mark is not None else -1)] = True
            return there
        (first, second), (a, b) = self.pair(), self.pair_events()
        rest, event = (first, a) if self.swapped else (second, b)
        other = AllocationTable(rest)
        keys = {(other.site_labels[other.table.stack[row]], int(other.table.requested_bytes[row]))
                for row in rest.live(event).tolist()}  # fmt: skip
        labels, sizes = self.table.site_labels, rows.requested_bytes.tolist()
        stacks = zip(rows.stack.tolist(), sizes, strict=True)
        return np.array([(labels[stack], size) in keys for stack, size in stacks], dtype=np.bool_)

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
    def shown_key(self) -> tuple[object, ...]:
        """What pictures of the map depend on besides the cursor and the colours' meaning."""
        return self.filter, self.mark, self.other_event, id(self.other)

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

    def predicted(self, answer: Answer, number: int) -> BrowsedRecording:
        """A run of a what-if answer as a recording of its own. Takes seconds; safe in a thread."""
        from memtrace.allocator.export import as_snapshot
        from memtrace.snapshot.load import from_raw

        snapshot = self.provider.timeline.snapshot
        name = f"what if {answer.runs[number].conf or 'defaults'}"
        made = BrowsedRecording(
            from_raw(as_snapshot(snapshot, answer.simulations[number]), name), StartView(self.provider.device)
        )
        made.provider()
        return made

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
        self.explained_event = self.mark = None
        self.event = self.provider.start.event

    # -- two files, or two events of one

    @property
    def compares(self) -> bool:
        """Whether there is something to compare: a second file, or a mark."""
        return self.other is not None or self.mark is not None

    def set_mark(self) -> None:
        """Event A is where the cursor is; from now on it is compared with where the cursor goes."""
        self.mark = self.event

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
        from memtrace.answers.diff.diff import diff
        from memtrace.explain.causes import story_of

        (first, second), (a, b) = self.pair(), self.pair_events()

        def make() -> Difference:
            found = diff(first.analysis, second.analysis, first.at(a), second.at(b))
            pair = id(first), id(second)
            if first is second:
                return found
            if pair not in self._stories:
                self._stories[pair] = story_of(first.analysis, second.analysis)
            return replace(found, story=self._stories[pair])

        return self._differences.get((id(first), id(second), a, b), make)

    def swap(self) -> None:
        """The cursor moves on the other side from now on; this side's stays where it is."""
        if self.other is None:
            self.event, self.mark = self.event if self.mark is None else self.mark, self.event
            return
        self.swapped = not self.swapped
        self.provider = (self.other if self.swapped else self.recording).provider()
        self.event, self.other_event = self.other_event, self.event
        self.explained_event = None


def _mask(table: AllocationTable, terms: tuple[FilterTerm, ...]) -> Bool:
    fits = np.zeros(len(table.table), np.bool_)
    fits[table.filtered(np.arange(len(table.table)), terms)] = True
    return fits
