"""The raw log: what each event says, and which events a filter fits."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memtrace.snapshot.model import Action
from memtrace.units import format_bytes, format_count, printable
from memtrace_tui.data.query import FilterTerm
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
            return printable(trace.unknown_actions.get(event, action.name.lower())), _ROLES.get(action, "text")
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

    def fitting(self, terms: tuple[FilterTerm, ...]) -> Bool:
        """Events that every term of a filter fits."""
        fits = np.ones(len(self.trace), np.bool_)
        for term in terms:
            fits &= self.allocations.fits(self._column, term)
        return fits

    def _column(self, name: str) -> NDArray[Any]:
        """As :meth:`AllocationTable.column`, for events: the event's own where it has one, else its allocation's."""
        trace, phases = self.trace, self.allocations.facts.phases
        if name in ("phase", "step"):
            return (phases.phase if name == "phase" else phases.step)[phases.span_of(np.arange(len(trace)))]
        own: dict[str, NDArray[Any]] = {"stack": trace.stack, "size": trace.size, "block": trace.size}
        if name in own:
            return own[name]
        if name == "action":
            return trace.action
        if name == "address":
            return np.where(trace.action == Action.OOM, -1, trace.address)
        if name == "stream":
            return np.array(trace.streams, dtype=np.int64)[trace.stream]
        rows = self.row_of_event
        values = self.allocations.column(name)
        return np.where(rows >= 0, values[rows], -1) if len(values) else np.full(len(rows), -1)
