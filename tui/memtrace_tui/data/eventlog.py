"""The raw log: what each event says, and search in it."""

from __future__ import annotations

import re
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from memtrace.errors import UsageError
from memtrace.snapshot.model import Action
from memtrace.units import format_bytes, format_count
from memtrace_tui.data.lines import clean
from memtrace_tui.data.rows import AllocationTable

Bool = NDArray[np.bool_]

_ROLES = {
    Action.ALLOC: "good", Action.FREE_REQUESTED: "dim", Action.FREE_COMPLETED: "text", Action.SEGMENT_ALLOC: "accent",
    Action.SEGMENT_MAP: "accent", Action.SEGMENT_FREE: "warn", Action.SEGMENT_UNMAP: "warn", Action.OOM: "bad",
}  # fmt: skip


class EventLog:
    """The events of one device as text."""

    def __init__(self, allocations: AllocationTable) -> None:
        self.allocations = allocations
        self.provider = allocations.provider
        self.trace = self.provider.timeline.trace

    @cached_property
    def row_of_event(self) -> NDArray[np.int64]:
        """For events that allocate or free: the row of the allocation table; -1 for all others."""
        rows = np.full(len(self.trace), -1, dtype=np.int64)
        table = self.provider.timeline.allocations
        for events in (table.free_completed_event, table.free_requested_event, table.alloc_event):
            known = np.flatnonzero(events >= 0)
            rows[events[known]] = known
        return rows

    def cell(self, event: int, column: str) -> tuple[str, str]:
        """(text, role) of one cell."""
        trace = self.trace
        action = Action(int(trace.action[event]))
        if column == "event":
            return format_count(event), "dim"
        if column == "time":
            seconds = self.provider.seconds(event)
            return ("" if seconds is None else f"{seconds:.6f}"), "dim"
        if column == "action":
            return clean(trace.unknown_actions.get(event, action.name.lower())), _ROLES.get(action, "text")
        if column == "size":
            return format_bytes(int(trace.size[event])), "strong"
        if column == "address":
            address = int(trace.address[event])
            return (f"{address:#x}" if address else ""), "dim"
        if column == "stream":
            return f"{trace.streams[int(trace.stream[event])]:#x}", "dim"
        row = int(self.row_of_event[event])
        if column == "purpose":
            return self.allocations.cell(row, "purpose") if row >= 0 else ("", "dim")
        label = self.allocations.site_labels[int(trace.stack[event])]
        return (label, "text") if label else ("no stack" if row >= 0 else "", "dim")

    def matches(self, text: str) -> Bool:
        """Events a search fits: an action's name, an address (``0x…``), or a word or ``/regex/`` of the stack.

        Raises UsageError for a regular expression that is none.
        """
        trace = self.trace
        word = text.strip()
        if word.lower().startswith("0x"):
            try:
                address = int(word, 16)
            except ValueError:
                raise UsageError(f"not an address: {word}") from None
            is_range = trace.action != Action.OOM
            return is_range & (trace.address <= address) & (address < trace.address + np.maximum(trace.size, 1))
        try:
            is_regex = len(word) > 2 and word[0] == word[-1] == "/"
            search = re.compile(word[1:-1] if is_regex else re.escape(word), re.IGNORECASE).search
        except re.error as error:
            raise UsageError(f"not a regular expression: {word} ({error})") from None
        by_action = np.array([search(action.name) is not None for action in Action], dtype=np.bool_)
        texts = [clean(f"{label}") for label in self.allocations.site_labels]
        by_stack = np.array([search(label) is not None for label in texts], dtype=np.bool_)
        return by_action[trace.action] | by_stack[trace.stack]
