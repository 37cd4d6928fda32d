"""Why a rule decided, in one sentence that says only what the recording shows of the allocations in question.

Rules leave places open: ``{there}`` (how it came to be there), ``{stays}`` and ``{ended}`` (what became of it).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memtrace.attribution.facts import Facts
from memtrace.attribution.phases import Phase
from memtrace.attribution.rules import Rule
from memtrace.attribution.stack_facts import Kind
from memtrace.history.timeline import NEVER


def reason(facts: Facts, rule: Rule, rows: NDArray[np.int64]) -> str:
    """Why ``rule`` decided ``rows``."""
    if rule.id == "none":
        return unattributed_reason(facts, int(rows[np.argmax(facts.size[rows])]))
    freed = facts.died[rows] < NEVER
    early = facts.before_trace[rows]
    there = ["there before the first recorded event"] * bool(early.any())
    there += ["made without a stack before the first pass"] * bool((~early).any())
    kept = ["never freed"] * bool((~freed).any())
    kept += ["freed only when the work was over"] * bool((freed & facts.persistent[rows]).any())
    kept += ["freed after the passes"] * bool((freed & ~facts.persistent[rows]).any())
    ended = ["freed before it ended"] * bool((freed & ~facts.persistent[rows]).any())
    ended += ["given up with it"] * bool((freed & facts.persistent[rows]).any())
    ended += ["still there where the recording ends"] * bool((~freed).any())
    return rule.why.format(there=" or ".join(there), stays=" or ".join(kept), ended=" or ".join(ended))


def unattributed_reason(facts: Facts, row: int) -> str:
    """Why nothing could be said of a row, in one sentence."""
    stackless = facts.kind[row] == Kind.NONE
    if facts.before_trace[row]:
        if not len(facts.phases):
            return "no trace: only the final state was recorded"
        how = "without a stack" if stackless else "made by code that memtrace does not know"
        return f"there before the first recorded event, {how}, and no pass in the recording tells its use"
    if facts.kind[row] == Kind.STRAY:
        return "made without a stack while the program's own code ran: by another thread, or its stack is missing"
    if stackless and facts.blind:
        return "recorded without a stack; lifetimes alone don't tell what it was for"
    if stackless and facts.phase[row] == Phase.BACKWARD:
        return "recorded without a stack, where stacks are missing or threads take turns: by autograd or not"
    if stackless:
        return "recorded without a stack, outside any recognised phase"
    if facts.kind[row] == Kind.FORWARD:
        return "made by the model, where stacks are missing or not recorded: what was to become of it is not known"
    return "its stack is not code that memtrace knows, outside any recognised phase"
