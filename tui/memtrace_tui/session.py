"""What all screens share: the recording, the device looked at, the cursor, and the tables made from them."""

from __future__ import annotations

from memtrace.report import Report
from memtrace_tui.data.eventlog import EventLog
from memtrace_tui.data.rows import AllocationTable
from memtrace_tui.provider import Provider, Recording
from memtrace_tui.settings import Settings


class Session:
    """One run of the browser over a file (and, for a diff, a second one)."""

    def __init__(self, recording: Recording, other: Recording | None = None, settings: Settings | None = None) -> None:
        self.recording = recording
        self.other = other
        self.settings = settings or Settings()
        self.provider: Provider = recording.provider()
        self.event = self.provider.start.event
        self._tables: dict[int, AllocationTable] = {}
        self._logs: dict[int, EventLog] = {}

    @property
    def report(self) -> Report:
        """The budget at the cursor."""
        return self.provider.report(self.event)

    @property
    def table(self) -> AllocationTable:
        """The allocation table of the device looked at."""
        device = self.provider.device
        if device not in self._tables:
            self._tables[device] = AllocationTable(self.provider)
        return self._tables[device]

    @property
    def log(self) -> EventLog:
        """The event log of the device looked at."""
        device = self.provider.device
        if device not in self._logs:
            self._logs[device] = EventLog(self.table)
        return self._logs[device]

    def move(self, event: int) -> bool:
        """Put the cursor on the nearest event; whether that changed anything."""
        event = self.provider.clamp(event)
        changed = event != self.event
        self.event = event
        return changed

    def look_at(self, device: int) -> None:
        """Change the device; the cursor goes to that device's own start."""
        self.provider = self.recording.provider(device)
        self.event = self.provider.start.event
