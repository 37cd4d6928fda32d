"""Why memtrace put bytes where it did: rules, what they rest on, and the facts they used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from memtrace.analysis import Analysis
from memtrace.attribution.categories import MEANING, SUBCATEGORIES, Category
from memtrace.attribution.phases import Phase
from memtrace.attribution.reasons import reason
from memtrace.attribution.stack_facts import Kind
from memtrace.errors import NoAnswerError, UsageError
from memtrace.frozen import dataclass
from memtrace.history.timeline import NEVER, At


@dataclass(frozen=True, slots=True)
class Decision:
    """One rule and what it decided at the event."""

    rule: str
    category: str
    subcategory: str
    evidence: str
    why: str
    bytes: int
    count: int
    examples: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Why:
    """All decisions behind a category, a subcategory or one address at an event."""

    asked: str
    meaning: str
    at: At
    decisions: tuple[Decision, ...]


_EXAMPLES = 2


def explain_decision(analysis: Analysis, at: At, asked: str) -> Why:
    """Decisions behind ``asked`` at the event.

    Raises UsageError for an unknown name, NoAnswerError if nothing is there.
    """
    timeline, attribution = analysis.timeline, analysis.attribution
    rows = timeline.live_rows(at.event)
    rules, wanted = attribution.rules, list(range(len(attribution.rules)))
    if asked.partition("/")[0] == "trained":  # as reports call it where no adapters are in play
        asked = asked.replace("trained", Category.LORA, 1)
    category, _, sub = asked.partition("/")
    address = _address(asked)
    if address is not None:
        table = timeline.allocations
        rows = rows[(table.address[rows] <= address) & (address < table.address[rows] + table.block_bytes[rows])]
        meaning = "the allocation that holds this address"
    elif category in list(Category):
        if category == Category.FRAGMENTATION:
            raise UsageError(
                "no allocation belongs to fragmentation; memtrace.answers.fragmentation.measure says what pins it"
            )
        known_part(asked)
        meaning = MEANING[Category(category)]
        wanted = [n for n in wanted if rules[n].category == category and sub in ("", rules[n].subcategory)]
    else:
        raise UsageError(f"--why takes a category ({', '.join(Category)}), category/subcategory or an address")
    chosen = ((number, rows[attribution.rule[rows] == number]) for number in wanted)
    decisions = [_decision(analysis, number, own) for number, own in chosen if len(own)]
    if not decisions:
        raise NoAnswerError(f"nothing live at event {at.event} belongs to {asked}")
    return Why(asked, meaning, at, tuple(sorted(decisions, key=lambda decision: -decision.bytes)))


def known_part(asked: str) -> None:
    """Raise UsageError where ``category/subcategory`` names a subcategory that the category does not have."""
    category, _, sub = asked.partition("/")
    parts = SUBCATEGORIES[Category(category)]
    if sub and sub not in parts:
        raise UsageError(f"{category} has no subcategory {sub!r} (it has {', '.join(parts)})")


def _address(text: str) -> int | None:
    """The address that ``text`` is, in hexadecimal or decimal; None if it is none."""
    try:
        return int(text, 16) if text.lower().startswith("0x") else int(text, 10)
    except ValueError:
        return None


def _decision(analysis: Analysis, number: int, rows: np.ndarray) -> Decision:
    rule = analysis.attribution.rules[number]
    size = analysis.timeline.allocations.requested_bytes
    largest = rows[np.argsort(-size[rows], kind="stable")[:_EXAMPLES]]
    return Decision(
        rule=rule.id,
        category=str(rule.category),
        subcategory=rule.subcategory,
        evidence=str(rule.evidence),
        why=reason(analysis.attribution.facts, rule, rows),
        bytes=int(size[rows].sum()),
        count=len(rows),
        examples=tuple(facts_of(analysis, int(row)) for row in largest),
    )


def facts_of(analysis: Analysis, row: int) -> dict[str, Any]:
    """The facts about one allocation that rules look at, in plain values. Events are null where they never happened."""
    timeline, attribution = analysis.timeline, analysis.attribution
    facts, table = attribution.facts, timeline.allocations
    died = int(facts.died[row])
    pass_end = int(facts.pass_end[row])
    return {
        "address": int(table.address[row]),
        "requested_bytes": int(table.requested_bytes[row]),
        "block_bytes": int(table.block_bytes[row]),
        "alloc_event": int(facts.born[row]) if facts.born[row] >= 0 else None,
        "free_event": died if died < NEVER else None,
        "made_in": Phase(int(facts.phase[row])).label,
        "step": int(facts.step[row]) if facts.step[row] >= 0 else None,
        "freed_in": Phase(int(facts.death_phase[row])).label if died < NEVER else None,
        "made_by": Kind(int(facts.kind[row])).name.lower() + " code",
        "pass_ended_at_event": pass_end if 0 <= pass_end < NEVER else None,
        "site": attribution.sites.label(int(table.stack[row])),
        "stack": [
            f"{frame.filename}:{frame.line} {frame.name}"
            for frame in timeline.snapshot.stacks.stack(int(table.stack[row]))
        ],
    }
