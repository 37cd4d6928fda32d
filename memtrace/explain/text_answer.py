"""A verdict from the text of a log alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memtrace.explain.facts import OomFacts
from memtrace.explain.setting import RunSetting
from memtrace.explain.text_facts import facts_of_text
from memtrace.explain.text_sentences import worth_saying
from memtrace.explain.traceback_causes import TracebackCause, cause_in
from memtrace.explain.verdict import judge
from memtrace.oomlog import MemorySummary, MessageKind, OomMessage
from memtrace.snapshot.stacks import Frame


@dataclass(frozen=True, slots=True)
class TextAnswer:
    """``verdict`` and ``confidence`` are words of the JSON contract; the sentences carry the numbers."""

    verdict: str
    confidence: str
    because: tuple[str, ...]
    worth_saying: tuple[str, ...] = ()
    oom: OomMessage | None = None
    """The message the verdict is about: the first GPU message that ended the run, else the first."""
    facts: OomFacts | None = None
    setting: RunSetting = field(default_factory=RunSetting)
    cause: TracebackCause | None = None
    """What the traceback names."""


def verdict_from_log(
    messages: Sequence[OomMessage],
    summaries: Sequence[MemorySummary] = (),
    setting: RunSetting | None = None,
    frames: Sequence[Frame] = (),
) -> TextAnswer:
    """Judge the messages of one log (as ``parse_log`` returns them). ``frames``: of the traceback that ends in the
    principal message, the outermost first."""
    if not messages:
        return TextAnswer("unknown", "guess", ("Nothing in the log says that memory ran out.",))
    message = principal(messages)
    setting = setting or RunSetting(backend=message.backend or "cuda")
    facts = facts_of_text(message)
    found = judge(facts)
    cause = cause_in(frames) if message.is_gpu_oom else None
    because = list(found.because)
    if cause is not None:
        because.insert(0, f"By the traceback the request is {cause.what}.")
    if message.is_caught:
        because.append(
            "It stands inside a warning: the program caught it and went on, so it is not what ended the run."
        )
    more = [*setting.already(), *worth_saying(message, facts, found.verdict, messages, summaries)]
    return TextAnswer(
        found.verdict, found.confidence, tuple(because), tuple(more), message, facts, setting, cause
    )  # fmt: skip


def principal(messages: Sequence[OomMessage]) -> OomMessage:
    """The message to judge: one that was not caught, GPU memory before look-alikes, errors before warnings, then the
    first."""
    return min(messages, key=lambda m: (m.is_caught, not m.is_gpu_oom, m.kind is MessageKind.WARNING))
