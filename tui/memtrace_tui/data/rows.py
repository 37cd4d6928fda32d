"""The allocation table and the event log: chosen, filtered, sorted and grouped as arrays; a row becomes text only when
it is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memtrace.arrays import distinct
from memtrace.attribution.phases import Phase
from memtrace.attribution.sites import frame_label
from memtrace.history.timeline import NEVER
from memtrace.snapshot.model import DEFAULT_POOL, I8, Action, Bool
from memtrace.units import format_bytes, format_count, printable
from memtrace_tui.data.layers import layer_of_rows
from memtrace_tui.data.query import KNOWN, FilterTerm, exactly
from memtrace_tui.provider import Provider

Cell = tuple[str, str]  # text, role
GROUPS = ("none", "category", "subcategory", "site", "module", "layer", "phase", "step", "size")
_COMPARE: dict[str, Callable[[I8, int], Bool]] = {
    "<": np.less, ">": np.greater, "=": np.equal, "<=": np.less_equal, ">=": np.greater_equal,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of one group: ``key`` is the filter word that shows them alone."""

    label: str
    key: str
    bytes: int
    count: int
    largest: int
    role: str


class AllocationTable:
    """Columns of one device's allocations in the form the browser sorts, filters and shows."""

    def __init__(self, provider: Provider) -> None:
        self.provider = provider
        self.table = provider.timeline.allocations
        self.facts = provider.analysis.attribution.facts
        self.rules = provider.analysis.attribution.rules
        self.rule = provider.analysis.attribution.rule
        self._sorted: dict[tuple[str, bool], I8] = {}  # the last order of all rows

    # -- labels, once a rule or a stack

    @cached_property
    def module_labels(self) -> list[str]:
        """Module of each stack, "" for -1."""
        return [*self.provider.analysis.attribution.sites.module, ""]

    @cached_property
    def stack_texts(self) -> list[str]:
        """Everything a word of a filter may be found in, of each stack."""
        stacks = self.provider.timeline.snapshot.stacks
        labels = [printable(f"{frame.filename} {frame_label(frame)}") for frame in stacks.frames]
        texts = [" ".join(labels[i] for i in stacks.frame_ids(s).tolist()) for s in range(len(stacks))]
        return [f"{m} {t}" for m, t in zip(self.module_labels, [*texts, ""], strict=True)]

    @cached_property
    def words(self) -> Mapping[str, tuple[Sequence[str], str]]:
        """For fields that are words: the word of each number, the last for -1, and the column of the numbers."""
        rules, purposes = self.rules, self.provider.purposes
        called = [purpose.partition("/")[0] for purpose in purposes]
        by_rule = {
            "purpose": purposes,
            "category": [name if name == rule.category else f"{name} {rule.category}"  # by its key, too
                         for name, rule in zip(called, rules, strict=True)],
            "sub": [rule.subcategory for rule in rules], "rule": [rule.id for rule in rules],
            "evidence": [str(rule.evidence) for rule in rules],
            "why": [f"{purpose} {rule.id} {rule.evidence}" for purpose, rule in zip(purposes, rules, strict=True)],
        }  # fmt: skip
        by_stack = {"site": self.provider.sites, "module": self.module_labels, "stack": self.stack_texts}
        return {
            **{field: (KNOWN[field], field) for field in ("phase", "action")},
            **{field: ([*texts, ""], "rule") for field, texts in by_rule.items()},
            **{field: (texts, "stack") for field, texts in by_stack.items()},
        }

    def pool_label(self, pool: int, is_small: bool) -> str:
        """``large``, or ``(1, 0) small``."""
        pools = self.provider.timeline.pools
        size = "small" if is_small else "large"
        known = pools[pool] if 0 <= pool < len(pools) else DEFAULT_POOL
        return size if known == DEFAULT_POOL else f"{known} {size}"

    # -- filtering

    def column(self, name: str) -> NDArray[Any]:
        """A column that filters and sorting go by."""
        return _COLUMNS[name](self)

    def fitting(self, terms: tuple[FilterTerm, ...]) -> Bool:
        """Rows that every term of a filter fits."""
        return self.fits(self.column, terms, len(self.table))

    def fits(self, column: Callable[[str], NDArray[Any]], terms: tuple[FilterTerm, ...], count: int) -> Bool:
        """Which of ``count`` records with some columns fit; ``rule`` is -1 where an event has no allocation."""
        found = np.ones(count, np.bool_)
        for term in terms:
            found &= self._fits(column, term) ^ term.negated
        return found

    def _fits(self, column: Callable[[str], NDArray[Any]], term: FilterTerm) -> Bool:
        if term.field == "address":
            low = column("address")
            return (low <= term.value) & (term.value < low + np.maximum(column("block"), 1))
        if term.pattern is None:
            return _COMPARE[term.operator](column(term.field), term.value)
        search = term.pattern.search

        def matches(texts: Iterable[str]) -> Bool:
            return np.array([search(text) is not None for text in texts], dtype=np.bool_)

        if term.field in self.words:
            texts, by = self.words[term.field]
            return matches(texts)[column(by)]
        if term.field == "any":
            found = self._fits(column, replace(term, field="why")) | self._fits(column, replace(term, field="stack"))
            actions = column("action")
            return found if (actions == Action.ALLOC).all() else found | matches(KNOWN["action"])[actions]
        values, inverse = _distinct(column(term.field))
        if term.field == "pool":
            fits = matches(self.pool_label(value // 2, bool(value % 2)) for value in values.tolist())
        else:
            fits = matches(map(str, values.tolist())) | matches(map(hex, values.tolist()))
        return fits[inverse] if len(values) else np.zeros(0, np.bool_)

    # -- sorting and grouping

    @cached_property
    def all_rows(self) -> I8:
        """Every allocation, in order of birth."""
        return np.arange(len(self.table))

    @cached_property
    def sizes(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """The different requested sizes, ascending, and which of them each allocation has."""
        found, which = _distinct(self.table.requested_bytes)
        return found, which.astype(np.min_scalar_type(len(found)))

    def sorted(self, rows: I8 | None, column: str, descending: bool) -> I8:
        """Rows by a column; rows that are alike stay in order of birth. All of them (None) are sorted once."""
        if rows is None:
            if (column, descending) not in self._sorted:
                self._sorted = {(column, descending): self.sorted(self.all_rows, column, descending)}
            return self._sorted[column, descending]
        key = self._key(column)
        key = key if rows is self.all_rows else key[rows]
        if descending:
            return rows[::-1][np.argsort(key[::-1], kind="stable")][::-1]
        return rows[np.argsort(key, kind="stable")]

    def _key(self, column: str) -> NDArray[Any]:
        if column == "size":
            return self.sizes[1]  # sorts many times as fast
        if column in ("phase", "pool") or column not in self.words:
            return self.column(column)
        texts, by = self.words[column]
        order = {text: place for place, text in enumerate(sorted(set(texts)))}
        return np.array([order[text] for text in texts], dtype=np.int64)[self.column(by)]

    def grouped(self, rows: I8, by: str) -> list[Group]:
        """Rows summed by one of ``GROUPS``, largest first."""
        part = slice(None) if rows is self.all_rows else rows
        size = self.table.requested_bytes[part]
        column = {"category": "rule", "subcategory": "rule", "site": "stack", "module": "stack"}.get(by, by)
        found, inverse = self.sizes if by == "size" else _distinct(self.column(column)[part])
        inverse = inverse[part] if by == "size" else inverse
        counts = np.bincount(inverse, minlength=len(found))
        sums, largest = np.zeros(len(found), np.int64), np.zeros(len(found), np.int64)
        np.add.at(sums, inverse, size)
        np.maximum.at(largest, inverse, size)
        groups: dict[tuple[str, str, str], tuple[int, int, int]] = {}
        met = counts > 0
        figures = zip(*(each[met].tolist() for each in (found, sums, counts, largest)), strict=True)
        for key, total, count, most in figures:
            name = self._group_label(by, key)
            before = groups.get(name, (0, 0, 0))
            groups[name] = before[0] + total, before[1] + count, max(before[2], most)
        made = [Group(label, word, *sizes, role) for (label, word, role), sizes in groups.items()]
        return sorted(made, key=lambda group: -group.bytes)

    def _group_label(self, by: str, key: int) -> tuple[str, str, str]:
        """(label, filter word, role)."""
        if by in ("category", "subcategory"):
            rule = self.rules[key]
            name, sub = ("", "") if by == "category" else (f"/{rule.subcategory}", f" sub:/^{rule.subcategory}$/")
            called = self.provider.purposes[key].partition("/")[0]
            return f"{called}{name}".replace("_", " "), f"category:{called}{sub}", f"cat:{rule.category}"
        if by in ("site", "module"):
            label = (self.provider.sites if by == "site" else self.module_labels)[key]
            return (label, f"{by}:/^{exactly(label)}$/", "text") if label else (f"no {by}", f"{by}:/^$/", "dim")
        if by == "phase":
            label = Phase(key).label
            return label, f"phase:{label}", f"phase:{label}"
        if by in ("step", "layer"):
            none = "before the first step" if by == "step" else "no layer told"
            return (f"{by} {key}" if key >= 0 else none), f"{by}:{key}", "text"
        return f"{format_bytes(key)}  {format_count(key)} B", f"size={key}", "text"

    # -- text

    def cell(self, row: int, column: str) -> Cell:
        """One cell."""
        return _CELLS[column](self, row)

    def _phase(self, row: int) -> Cell:
        label = Phase(int(self.facts.phase[row])).label
        return label, f"phase:{label}"

    def _born(self, row: int) -> Cell:
        born = int(self.table.alloc_event[row])
        return (format_count(born), "text") if born >= 0 else ("before", "dim")

    def _freed(self, row: int) -> Cell:
        died = int(self.facts.died[row])
        return (format_count(died), "text") if died < NEVER else ("never", "dim")


def _distinct(values: NDArray[Any]) -> tuple[NDArray[Any], I8]:
    """The different values, ascending, and which of them each is: ``np.unique``, many times as fast on what repeats,
    as most of what there is shows in a few thousand of the values."""
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    if high - low < 1 << 16:
        seen = np.zeros(high - low + 1, np.bool_)
        places = np.subtract(values, low, dtype=np.int64)
        seen[places] = True
        return np.flatnonzero(seen) + low, (np.cumsum(seen) - 1)[places]
    found = distinct(values[:: len(values) // 4096 + 1])
    which = np.searchsorted(found[:-1], values)
    missed = values[found[which] != values] if len(found) else found
    if len(missed):
        found = distinct(np.concatenate([found, missed]))
        which = np.searchsorted(found, values)
    return found, which


_COLUMNS: dict[str, Callable[[AllocationTable], NDArray[Any]]] = {
    "rule": lambda t: t.rule, "stack": lambda t: t.table.stack, "stream": lambda t: t.table.stream,
    "size": lambda t: t.table.requested_bytes, "block": lambda t: t.table.block_bytes,
    "address": lambda t: t.table.address, "pool": lambda t: t.table.pool * 2 + t.table.is_small,
    "phase": lambda t: t.facts.phase, "step": lambda t: t.facts.step, "layer": lambda t: layer_of_rows(t.provider),
    "born": lambda t: t.table.alloc_event, "freed": lambda t: t.facts.died,
    "life": lambda t: np.minimum(t.facts.died, t.provider.count - 1) - np.maximum(t.table.alloc_event, -1),
    "action": lambda t: np.full(len(t.table), int(Action.ALLOC)),
}  # fmt: skip
_CELLS: dict[str, Callable[[AllocationTable, int], Cell]] = {
    "size": lambda t, row: (format_bytes(int(t.table.requested_bytes[row])), "strong"),
    "block": lambda t, row: (format_bytes(int(t.table.block_bytes[row])), "text"),
    "purpose": lambda t, row: t.provider.purpose(row),
    "site": lambda t, row: (label, "text") if (label := t.provider.site(row)) else ("no stack", "dim"),
    "born": AllocationTable._born,
    "freed": AllocationTable._freed,
    "life": lambda t, row: (format_count(
        min(int(t.facts.died[row]), t.provider.count - 1) - max(int(t.table.alloc_event[row]), -1)), "text"),
    "address": lambda t, row: (f"{int(t.table.address[row]):#x}", "dim"),
    "step": lambda t, row: (str(int(t.facts.step[row])) if t.facts.step[row] >= 0 else "", "text"),
    "layer": lambda t, row: (str(layer) if (layer := int(t.column("layer")[row])) >= 0 else "", "text"),
    "phase": AllocationTable._phase,
    "pool": lambda t, row: (t.pool_label(int(t.table.pool[row]), bool(t.table.is_small[row])), "dim"),
    "stream": lambda t, row: (f"{int(t.table.stream[row]):#x}", "dim"),
    "module": lambda t, row: (t.module_labels[int(t.table.stack[row])], "text"),
    "rule": lambda t, row: (t.rules[int(t.rule[row])].id, "dim"),
    "evidence": lambda t, row: (str(t.rules[int(t.rule[row])].evidence), "dim"),
}  # fmt: skip


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
    def row_of_event(self) -> NDArray[np.int32]:
        """For events that allocate or free: the row of the allocation table; -1 for all others."""
        rows = np.full(len(self.trace), -1, dtype=np.int32)
        table = self.provider.timeline.allocations
        for events in (table.free_completed_event, table.free_requested_event, table.alloc_event):
            known = np.flatnonzero(events >= 0)
            rows[events[known]] = known
        return rows

    def cell(self, event: int, column: str) -> Cell:
        """One cell."""
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
        label = self.provider.sites[int(trace.stack[event])]
        return (label, "text") if label else ("no stack" if row >= 0 else "", "dim")

    def fitting(self, terms: tuple[FilterTerm, ...]) -> Bool:
        """Events that every term of a filter fits."""
        return self.allocations.fits(self._column, terms, len(self.trace))

    def _column(self, name: str) -> NDArray[Any]:
        """As :meth:`AllocationTable.column`, for events: the event's own where it has one, else its allocation's."""
        trace, phases = self.trace, self.allocations.facts.phases
        if name in ("phase", "step"):
            return (phases.phase if name == "phase" else phases.step)[phases.span_of(np.arange(len(trace)))]
        if name in ("stack", "size", "block", "action"):
            return getattr(trace, "size" if name == "block" else name)
        if name == "address":
            return np.where(trace.action == Action.OOM, -1, trace.address)
        if name == "stream":
            return np.array(trace.streams, dtype=np.int64)[trace.stream]
        rows = self.row_of_event
        values = self.allocations.column(name)
        return np.where(rows >= 0, values[rows], -1) if len(values) else np.full(len(rows), -1)
