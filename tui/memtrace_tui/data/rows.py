"""The allocation table: chosen, filtered, sorted and grouped as arrays; a row becomes text only when it is shown."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from memtrace.attribution.phases import Phase
from memtrace.attribution.sites import frame_label
from memtrace.history.timeline import NEVER
from memtrace.snapshot.model import DEFAULT_POOL
from memtrace.units import format_bytes, format_count
from memtrace_tui.data.lines import clean
from memtrace_tui.data.query import Term
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
        return [clean(sites.label(stack)) for stack in range(len(sites.frame))] + [""]

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
        labels = [clean(f"{frame.filename} {frame_label(frame)}") for frame in stacks.frames]
        texts = [" ".join(labels[i] for i in stacks.frame_ids(s).tolist()) for s in range(len(stacks))]
        return [f"{m} {t}" for m, t in zip(self.module_labels, [*texts, ""], strict=True)]

    # -- choosing rows

    def chosen(self, event: int | None) -> I8:
        """Rows that are live at the event; all of them for None."""
        return np.arange(len(self.table)) if event is None else self.provider.live(event)

    def filtered(self, rows: I8, terms: tuple[Term, ...]) -> I8:
        """Rows that every term fits."""
        for term in terms:
            fits = self._fits(rows, term)
            rows = rows[~fits if term.negated else fits]
        return rows

    def _fits(self, rows: I8, term: Term) -> Bool:
        if term.pattern is None:
            sizes = self.table.requested_bytes if term.field == "size" else self.table.block_bytes
            return _COMPARE[term.operator](sizes[rows], term.size_bytes)
        search = term.pattern.search

        def matches(texts: list[str]) -> Bool:
            return np.array([search(text) is not None for text in texts], dtype=np.bool_)

        if term.field == "any":
            by_rule = matches([f"{r.category}/{r.subcategory} {r.id} {r.evidence}" for r in self.rules])
            return by_rule[self.rule[rows]] | matches(self._stack_texts)[self.table.stack[rows]]
        if term.field in ("category", "sub", "rule", "evidence"):
            name = {"category": "category", "sub": "subcategory", "rule": "id", "evidence": "evidence"}[term.field]
            return matches([str(getattr(rule, name)) for rule in self.rules])[self.rule[rows]]
        if term.field in ("site", "module"):
            labels = self.site_labels if term.field == "site" else self.module_labels
            return matches(labels)[self.table.stack[rows]]
        if term.field == "phase":
            return matches([phase.label for phase in Phase])[self.facts.phase[rows]]
        values = {"step": self.facts.step, "stream": self.table.stream}.get(term.field)
        if values is not None:
            found, inverse = np.unique(values[rows], return_inverse=True)
            return matches([str(value) for value in found.tolist()])[inverse] if len(rows) else np.zeros(0, np.bool_)
        pools, inverse = np.unique(self.table.pool[rows] * 2 + self.table.is_small[rows], return_inverse=True)
        return matches([self.pool_label(p // 2, bool(p % 2)) for p in pools.tolist()])[inverse]

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

    def _key(self, column: str) -> NDArray[np.generic]:
        table = self.table
        numbers: dict[str, NDArray[np.generic]] = {
            "size": table.requested_bytes, "block": table.block_bytes, "born": table.alloc_event,
            "freed": self.facts.died, "address": table.address, "stream": table.stream, "step": self.facts.step,
            "phase": self.facts.phase,
        }  # fmt: skip
        if column == "life":
            died = np.minimum(self.facts.died, self.provider.count)
            return died - np.maximum(table.alloc_event, -1)
        if column in numbers:
            return numbers[column]
        if column == "pool":
            return table.pool * 2 + table.is_small
        if column in ("purpose", "rule", "evidence"):
            texts = {
                "purpose": self.purposes,
                "rule": [rule.id for rule in self.rules],
                "evidence": [str(rule.evidence) for rule in self.rules],
            }[column]
            return _ranks(texts)[self.rule]
        return _ranks(self.site_labels if column == "site" else self.module_labels)[table.stack]

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


def exactly(text: str) -> str:
    """For between slashes in a filter: blanks would end the word, so they become ``\\s``."""
    return re.escape(text).replace("\\ ", "\\s").replace("/", "\\/")
