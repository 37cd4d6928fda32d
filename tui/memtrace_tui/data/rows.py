"""The allocation table: chosen, filtered, sorted and grouped as arrays; a row becomes text only when it is shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memtrace.attribution.phases import Phase
from memtrace.attribution.sites import frame_label
from memtrace.history.timeline import NEVER
from memtrace.snapshot.model import DEFAULT_POOL, Action
from memtrace.units import format_bytes, format_count, printable
from memtrace_tui.data.query import KNOWN, FilterTerm, exactly
from memtrace_tui.provider import Provider

I8 = NDArray[np.int64]
Bool = NDArray[np.bool_]

GROUPS = ("none", "category", "subcategory", "site", "module", "phase", "step", "size")
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

    # -- labels, once a rule or a stack

    @cached_property
    def site_labels(self) -> list[str]:
        """Call site of each stack; one more entry for "no stack", so that -1 is valid."""
        sites = self.provider.analysis.attribution.sites
        return [printable(sites.label(stack)) for stack in range(len(sites.frame))] + [""]

    @cached_property
    def module_labels(self) -> list[str]:
        """Module of each stack, "" for -1."""
        return [*self.provider.analysis.attribution.sites.module, ""]

    @cached_property
    def purposes(self) -> list[str]:
        """``category/subcategory`` of each rule."""
        return [f"{rule.category}/{rule.subcategory}" for rule in self.rules]

    @cached_property
    def _stack_texts(self) -> list[str]:
        """Everything a word of a filter may be found in, of each stack."""
        stacks = self.provider.timeline.snapshot.stacks
        labels = [printable(f"{frame.filename} {frame_label(frame)}") for frame in stacks.frames]
        texts = [" ".join(labels[i] for i in stacks.frame_ids(s).tolist()) for s in range(len(stacks))]
        return [f"{m} {t}" for m, t in zip(self.module_labels, [*texts, ""], strict=True)]

    # -- choosing rows

    def chosen(self, event: int | None) -> I8:
        """Rows that are live at the event; all of them for None."""
        return np.arange(len(self.table)) if event is None else self.provider.live(event)

    def filtered(self, rows: I8, terms: tuple[FilterTerm, ...]) -> I8:
        """Rows that every term fits."""
        for term in terms:
            rows = rows[self.fits(partial(self._part, rows), term)]
        return rows

    def _part(self, rows: I8, name: str) -> NDArray[Any]:
        return self.column(name)[rows]

    def column(self, name: str) -> NDArray[Any]:
        """A column that filters and sorting go by."""
        table, facts = self.table, self.facts
        if name == "life":
            return np.minimum(facts.died, self.provider.count) - np.maximum(table.alloc_event, -1)
        if name == "pool":
            return table.pool * 2 + table.is_small
        columns: dict[str, NDArray[Any]] = {
            "rule": self.rule, "stack": table.stack, "phase": facts.phase, "step": facts.step, "stream": table.stream,
            "size": table.requested_bytes, "block": table.block_bytes, "address": table.address,
            "born": table.alloc_event, "freed": facts.died, "action": np.full(len(table), int(Action.ALLOC)),
        }  # fmt: skip
        return columns[name]

    def fits(self, column: Callable[[str], NDArray[Any]], term: FilterTerm) -> Bool:
        """Which records of some columns a term fits; ``rule`` is -1 where an event has no allocation."""
        found = self._fits(column, term)
        return ~found if term.negated else found

    def _fits(self, column: Callable[[str], NDArray[Any]], term: FilterTerm) -> Bool:
        if term.field == "address":
            low = column("address")
            return (low <= term.value) & (term.value < low + np.maximum(column("block"), 1))
        if term.pattern is None:
            return _COMPARE[term.operator](column(term.field), term.value)
        search = term.pattern.search

        def matches(texts: list[str]) -> Bool:
            return np.array([search(text) is not None for text in texts], dtype=np.bool_)

        if term.field == "any":
            by_rule = matches([*(f"{r.category}/{r.subcategory} {r.id} {r.evidence}" for r in self.rules), ""])
            found = by_rule[column("rule")] | matches(self._stack_texts)[column("stack")]
            actions = column("action")
            return found if (actions == Action.ALLOC).all() else found | matches(KNOWN["action"])[actions]
        if term.field in ("category", "sub", "rule", "evidence"):
            name = {"sub": "subcategory", "rule": "id"}.get(term.field, term.field)
            return matches([*(str(getattr(rule, name)) for rule in self.rules), ""])[column("rule")]
        if term.field in ("site", "module", "stack"):
            labels = {"site": self.site_labels, "module": self.module_labels, "stack": self._stack_texts}[term.field]
            return matches(labels)[column("stack")]
        if term.field in KNOWN:
            return matches(KNOWN[term.field])[column(term.field)]
        values, inverse = np.unique(column(term.field), return_inverse=True)
        if term.field == "pool":
            fits = matches([self.pool_label(value // 2, bool(value % 2)) for value in values.tolist()])
        else:
            fits = matches(list(map(str, values.tolist()))) | matches(list(map(hex, values.tolist())))
        return fits[inverse] if len(values) else np.zeros(0, np.bool_)

    def pool_label(self, pool: int, is_small: bool) -> str:
        """``large``, or ``(1, 0) small``."""
        pools = self.provider.timeline.pools
        size = "small" if is_small else "large"
        known = pools[pool] if 0 <= pool < len(pools) else DEFAULT_POOL
        return size if known == DEFAULT_POOL else f"{known} {size}"

    # -- sorting

    def sorted(self, rows: I8, column: str, descending: bool) -> I8:
        """Rows by a column; rows that are alike stay in order of birth."""
        key = self._key(column)[rows]
        if descending:
            return rows[::-1][np.argsort(key[::-1], kind="stable")][::-1]
        return rows[np.argsort(key, kind="stable")]

    def _key(self, column: str) -> NDArray[Any]:
        if column in ("purpose", "rule", "evidence"):
            texts = {
                "purpose": self.purposes,
                "rule": [rule.id for rule in self.rules],
                "evidence": [str(rule.evidence) for rule in self.rules],
            }[column]
            return _ranks(texts)[self.rule]
        if column in ("site", "module"):
            return _ranks(self.site_labels if column == "site" else self.module_labels)[self.table.stack]
        return self.column(column)

    # -- text

    def cell(self, row: int, column: str) -> tuple[str, str]:
        """(text, role) of one cell."""
        table, rule = self.table, self.rules[int(self.rule[row])]
        stack = int(table.stack[row])
        if column == "size":
            return format_bytes(int(table.requested_bytes[row])), "strong"
        if column == "block":
            return format_bytes(int(table.block_bytes[row])), "text"
        if column == "purpose":
            return f"{rule.category}/{rule.subcategory}".replace("_", " "), f"cat:{rule.category}"
        if column == "site":
            return (self.site_labels[stack], "text") if self.site_labels[stack] else ("no stack", "dim")
        if column == "born":
            born = int(table.alloc_event[row])
            return (format_count(born), "text") if born >= 0 else ("before", "dim")
        if column == "freed":
            died = int(self.facts.died[row])
            return (format_count(died), "text") if died < NEVER else ("never", "dim")
        if column == "life":
            died = min(int(self.facts.died[row]), self.provider.count)
            return format_count(died - max(int(table.alloc_event[row]), -1)), "text"
        if column == "address":
            return f"{int(table.address[row]):#x}", "dim"
        if column == "step":
            return (str(int(self.facts.step[row])), "text") if self.facts.step[row] >= 0 else ("", "dim")
        if column == "phase":
            label = Phase(int(self.facts.phase[row])).label
            return label, f"phase:{label}"
        if column == "pool":
            return self.pool_label(int(table.pool[row]), bool(table.is_small[row])), "dim"
        if column == "stream":
            return f"{int(table.stream[row]):#x}", "dim"
        if column == "module":
            return self.module_labels[stack], "text"
        return (rule.id if column == "rule" else str(rule.evidence)), "dim"

    # -- groups

    def grouped(self, rows: I8, by: str) -> list[Group]:
        """Rows summed by one of ``GROUPS``, largest first."""
        size = self.table.requested_bytes[rows]
        stack = self.table.stack[rows]
        if by in ("category", "subcategory"):
            keys = self.rule[rows].astype(np.int64)
        elif by in ("site", "module"):
            keys = stack.astype(np.int64)
        else:
            columns: dict[str, NDArray[np.generic]] = {
                "phase": self.facts.phase, "step": self.facts.step, "size": self.table.requested_bytes,
            }  # fmt: skip
            keys = columns[by][rows].astype(np.int64)
        found, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
        sums, largest = np.zeros(len(found), np.int64), np.zeros(len(found), np.int64)
        np.add.at(sums, inverse, size)
        np.maximum.at(largest, inverse, size)
        merged: dict[tuple[str, str, str], list[int]] = {}
        for key, total, count, most in zip(
            found.tolist(), sums.tolist(), counts.tolist(), largest.tolist(), strict=True
        ):
            entry = merged.setdefault(self._group_label(by, key), [0, 0, 0])
            entry[0] += total
            entry[1] += count
            entry[2] = max(entry[2], most)
        return sorted(
            (
                Group(label, word, total, count, most, role)
                for (label, word, role), (total, count, most) in merged.items()
            ),
            key=lambda group: -group.bytes,
        )

    def _group_label(self, by: str, key: int) -> tuple[str, str, str]:
        """(label, filter word, role)."""
        if by in ("category", "subcategory"):
            rule = self.rules[key]
            category = str(rule.category)
            if by == "category":
                return category.replace("_", " "), f"category:{category}", f"cat:{category}"
            label = f"{category}/{rule.subcategory}"
            return label.replace("_", " "), f"category:{category} sub:/^{rule.subcategory}$/", f"cat:{category}"
        if by in ("site", "module"):
            label = (self.site_labels if by == "site" else self.module_labels)[key]
            return (label, f"{by}:/^{exactly(label)}$/", "text") if label else (f"no {by}", f"{by}:/^$/", "dim")
        if by == "phase":
            label = Phase(key).label
            return label, f"phase:{label}", f"phase:{label}"
        if by == "step":
            return (f"step {key}" if key >= 0 else "before the first step"), f"step:{key}", "text"
        return f"{format_bytes(key)}  {format_count(key)} B", f"size={key}", "text"


def _ranks(texts: list[str]) -> I8:
    """Position of each text among the distinct ones in order."""
    order = {text: i for i, text in enumerate(sorted(set(texts)))}
    return np.array([order[text] for text in texts], dtype=np.int64)
