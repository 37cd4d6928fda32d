"""No sentence that was not checked: what the reason for an allocation says of its life is what the recording shows."""

from __future__ import annotations

import numpy as np
import pytest
from support import TRUTH, timeline

from memtrace.attribution.classify import attribute
from memtrace.attribution.reasons import reason
from memtrace.attribution.stack_facts import Kind
from memtrace.history.timeline import NEVER, Timeline, build
from memtrace.snapshot.load import load

NAMES = [
    "llama_oom-caught-and-retried",
    "llama2-7b_recorded-after-load",
    "llama_generate_own-recorder",
    "tinyllama_trl",
]
OTHERS = ["own-optimizer_step", "own-optimizer_first-step", "llama_model-freed-before-dump", "retry_dump-at-end"]


def _made(name: str) -> Timeline:
    if name in NAMES:
        return timeline(name)
    snapshot = load(TRUTH / "unlabelled" / f"{name}.pickle.xz")
    return build(snapshot, snapshot.devices[0])


@pytest.mark.parametrize("name", NAMES + OTHERS)
def test_sentences_say_what_happened(name: str) -> None:
    attribution = attribute(_made(name))
    facts = attribution.facts
    for number, rule in enumerate(attribution.rules):
        rows = np.flatnonzero(attribution.rule == number)
        for part in (rows, rows[:1], rows[-1:]):
            if not len(part):
                continue
            text = reason(facts, rule, part)
            freed = facts.died[part] < NEVER
            assert "{" not in text
            if "never freed" in text or "still there" in text:
                assert not freed.all(), (rule.id, text)
            if "freed before it ended" in text or "given up" in text or "freed only" in text or "freed after" in text:
                assert freed.any(), (rule.id, text)
            if "before the first recorded event" in text:
                assert facts.before_trace[part].any(), (rule.id, text)
            if "without a stack" in text:
                assert (facts.kind[part] == Kind.NONE).any(), (rule.id, text)
