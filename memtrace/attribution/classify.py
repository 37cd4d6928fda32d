"""Apply the rule table: one category, subcategory and evidence for every allocation of a device."""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import cached_property
from typing import cast

import numpy as np
from numpy.typing import NDArray

from memtrace.attribution.categories import Category, Evidence, Purpose
from memtrace.attribution.facts import Facts, LateFacts, gather
from memtrace.attribution.frame_tags import Tag
from memtrace.attribution.labels import label_rule, label_rules
from memtrace.attribution.phases import Phases
from memtrace.attribution.rules import RULES, Rule
from memtrace.attribution.signals import Signals
from memtrace.attribution.sites import Sites, find_sites
from memtrace.attribution.user_rules import UserRule, as_rule, user_mask
from memtrace.frozen import dataclass
from memtrace.history.timeline import Timeline
from memtrace.snapshot.model import I8

U1 = NDArray[np.uint8]
I2 = NDArray[np.int16]

_UNATTRIBUTED = Rule("none", Purpose.UNATTRIBUTED, Evidence.NONE, lambda s: s.persistent, "no evidence speaks for it")


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

    @cached_property
    def trains_adapters(self) -> bool:
        """Whether adapters are in play: their code ran, or memory was recognised as theirs. Else what is trained are
        weights of the model itself."""
        facts = self.facts
        if facts.stacks.has(Tag.ADAPTER_INIT | Tag.LORA).any():
            return True
        names = [row.get("name") for row in facts.timeline.snapshot.labels]
        adapted = any(isinstance(name, str) and "lora_" in name for name in names)
        found = np.array([rule.id == "early-adapter" for rule in self.rules], dtype=np.bool_)[self.rule]
        return adapted or bool(found.any())

    @property
    def lora_meaning(self) -> str:
        """What the category ``lora`` holds: ``adapters``, or ``trained`` where none are in play."""
        return "adapters" if self.trains_adapters else "trained"

    def categories(self) -> NDArray[np.object_]:
        """Category of each row."""
        return np.array([rule.category for rule in self.rules], dtype=object)[self.rule]

    def rows_of(self, *wanted: Category | Purpose, rows: I8 | None = None) -> NDArray[np.bool_]:
        """Which rows (None: of all) are of any of the categories and purposes."""
        fits = np.array([rule.category in wanted or rule.purpose in wanted for rule in self.rules])
        return fits[self.rule if rows is None else self.rule[rows]]

    def serving(self, *modules: str) -> NDArray[np.bool_]:
        """Rows whose stack serves one of the modules."""
        served = np.array([module in modules for module in self.sites.module] + [False])
        return served[self.facts.timeline.allocations.stack]


def attribute(
    timeline: Timeline, user_rules: Sequence[UserRule] = (), allowed: Container[Evidence] = tuple(Evidence)
) -> Attribution:
    """Attribute every allocation. Linear in allocations; the first rule that fits decides.

    Labels that memtrace's own recorder stored come first, then ``user_rules``, then the table. ``allowed`` leaves
    rules of other kinds of evidence out, to measure what each kind is worth.
    """
    facts = gather(timeline)
    signals = Signals(facts)
    labelled = label_rules(timeline, facts.may_train)
    rules = (*(rule for rule, _ in labelled), *(as_rule(rule) for rule in user_rules), *RULES, _UNATTRIBUTED)
    rule = np.full(len(facts.size), len(rules) - 1, dtype=np.int16)
    is_open = np.ones(len(facts.size), dtype=np.bool_)

    def decide(number: int, fits: NDArray[np.bool_]) -> None:
        fits = is_open & fits
        if fits.any():
            np.copyto(rule, np.int16(number), where=fits)
            np.logical_xor(is_open, fits, out=is_open)

    number = 0
    for _, mask in labelled:
        decide(number, mask)
        number += 1
    for user_rule in user_rules:
        decide(number, user_mask(user_rule, timeline))
        number += 1
    for entry in RULES:
        if not is_open.any():
            break
        if entry.evidence in allowed:
            decide(number, entry.test(signals))
        number += 1
    return Attribution(rules, rule, facts)


def as_known(timeline: Timeline, rule: I2, labelled: Sequence[str], phases: Phases) -> Attribution:
    """An :class:`Attribution` again from what :func:`attribute` found without rules of the user's.

    ``labelled`` are the purposes of the labels that were found, in order.
    """
    rules = (*(label_rule(Purpose(purpose)) for purpose in labelled), *RULES, _UNATTRIBUTED)
    return Attribution(rules, rule, cast(Facts, LateFacts(timeline, phases)))
