"""Apply the rule table: one category, subcategory and evidence for every allocation of a device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from memtrace.attribution.categories import Category, Evidence
from memtrace.attribution.facts import Facts, gather
from memtrace.attribution.rules import RULES, Rule
from memtrace.attribution.signals import Signals
from memtrace.attribution.sites import Sites, find_sites
from memtrace.attribution.stack_facts import Kind
from memtrace.timeline import Timeline

U1 = NDArray[np.uint8]
I2 = NDArray[np.int16]

_UNATTRIBUTED = Rule(
    "none", Category.UNATTRIBUTED, "unattributed", Evidence.NONE, lambda s: s.persistent, "no evidence speaks for it"
)


@dataclass(frozen=True)
class Attribution:
    """``rule[i]`` indexes ``rules`` for row i of ``Timeline.allocations``; ``facts`` is what the rules saw."""

    rules: tuple[Rule, ...]
    rule: I2
    facts: Facts

    @cached_property
    def sites(self) -> Sites:
        """Names of call sites and modules, worked out when first asked for."""
        return find_sites(self.facts.timeline.snapshot.stacks, self.facts.stacks)

    def categories(self) -> NDArray[np.object_]:
        """Category of each row."""
        return np.array([rule.category for rule in self.rules], dtype=object)[self.rule]

    def category_mask(self, category: Category) -> NDArray[np.bool_]:
        """Rows of a category."""
        return np.array([rule.category is category for rule in self.rules])[self.rule]


def attribute(timeline: Timeline) -> Attribution:
    """Attribute every allocation. Linear in allocations; the first rule of the table that fits decides."""
    facts = gather(timeline)
    signals = Signals(facts)
    rules = (*RULES, _UNATTRIBUTED)
    decided = np.full(len(facts.size), len(rules) - 1, dtype=np.int16)
    is_open = np.ones(len(facts.size), dtype=np.bool_)
    for number, rule in enumerate(RULES):
        fits = is_open & rule.test(signals)
        decided[fits] = number
        is_open &= ~fits
        if not is_open.any():
            break
    return Attribution(rules, decided, facts)


def unattributed_reason(facts: Facts, row: int) -> str:
    """Why nothing could be said of a row, in one sentence."""
    if facts.born[row] < 0:
        if not len(facts.phases):
            return "no trace: only the final state was recorded"
        return "there before the recording began, without a stack, and no training step in the recording tells its use"
    if facts.kind[row] == Kind.NONE:
        return "recorded without a stack, outside any recognised phase"
    return "its stack is not code that memtrace knows, outside any recognised phase"
