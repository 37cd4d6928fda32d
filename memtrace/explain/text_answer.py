"""A verdict from the text of a log alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memtrace.explain.facts import OomFacts
from memtrace.explain.text_facts import facts_of_text
from memtrace.explain.text_sentences import worth_saying
from memtrace.explain.verdict import judge
from memtrace.oomlog import Kind, MemorySummary, OomMessage


@dataclass(frozen=True, slots=True)
class TextAnswer:
    """``verdict`` and ``confidence`` are words of the JSON contract; the sentences carry the numbers."""

    verdict: str
    confidence: str
    because: tuple[str, ...]
    worth_saying: tuple[str, ...] = ()
    oom: OomMessage | None = None
    """The message the verdict is about: the first GPU message that is more than a warning, else the first."""
    facts: OomFacts | None = None


def verdict_from_log(messages: Sequence[OomMessage], summaries: Sequence[MemorySummary] = ()) -> TextAnswer:
    """Judge the messages of one log (as ``parse_log`` returns them)."""
    if not messages:
        return TextAnswer("no_oom", "derived", ("The log holds no out-of-memory message.",))
    message = principal(messages)
    facts = facts_of_text(message)
    found = judge(facts)
    more = worth_saying(message, facts, found.verdict, messages, summaries)
    return TextAnswer(found.verdict, found.confidence, found.because, tuple(more), message, facts)


def principal(messages: Sequence[OomMessage]) -> OomMessage:
    """The message to judge: GPU memory before look-alikes, errors before warnings, then the first."""
    return min(messages, key=lambda m: (not m.is_gpu_oom, m.kind is Kind.WARNING))
