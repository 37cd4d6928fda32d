"""Findings from a log's figures alone: what is outside the allocator, in pieces, or refused by a limit."""

from __future__ import annotations

from memtrace.explain.advice import against_pieces, rule
from memtrace.explain.answer import Advice, Basis, Finding
from memtrace.explain.detectors import ranked
from memtrace.explain.facts import at_least
from memtrace.explain.text_answer import TextAnswer
from memtrace.explain.text_sentences import OUTSIDE_SHARE
from memtrace.explain.traceback_causes import finding_of
from memtrace.units import GIB

_OWN_OUTSIDE_BYTES = 2 * GIB
_OTHERS_BYTES = GIB // 4


def findings_of_log(log: TextAnswer) -> tuple[Finding, ...]:
    """What the figures of the principal message show; empty without figures."""
    f, message = log.facts, log.oom
    if f is None or message is None or not message.is_gpu_oom:
        return ()
    found: list[Finding] = []
    tool = log.setting.card_tool
    if log.cause is not None:
        found.append(finding_of(log.cause, f.asked))
    if log.verdict == "fragmentation" and f.slack is not None:
        asked = round(f.asked.middle) if f.asked is not None else None
        terms = f"{f.slack} in pieces and {f.room or 0} to be had, against {f.asked}"
        advice = [Advice(change, asked, Basis.FORMULA, terms) for change, _ in against_pieces(log.setting)]
        advice.append(rule("record a snapshot to see what the pieces lie between: memtrace run"))
        found.append(
            Finding("reserved_in_pieces", "Reserved memory that is free in pieces", round(f.slack.middle),
                    f"by the text {f.slack} was reserved but unallocated.", tuple(advice))
        )  # fmt: skip
    if f.limit is not None and f.total is not None and f.limit.high < f.total.low and log.verdict != "limit":
        within = f.free is None or f.asked is None or at_least(f.free, f.asked) is not False
        if within:
            found.append(
                Finding("process_limit", "The limit of this process ran out, not the card", round(f.limit.middle),
                        f"by the text {f.limit} of {f.total} is allowed.",
                        (rule("raise or drop torch.cuda.set_per_process_memory_fraction if it is not meant"),))
            )  # fmt: skip
    if f.others is not None and f.others.low > _OTHERS_BYTES:
        found.append(
            Finding("other_processes", "Other processes use the card", round(f.others.middle),
                    f"by the text {f.others} is in use by other processes.",
                    (rule(f"{tool} names them; end what is left over from an earlier run, or use another card"),))
        )  # fmt: skip
    outside = f.own_outside if f.own_outside is not None and f.own_outside.low > _OWN_OUTSIDE_BYTES else None
    if outside is None and f.others is None and f.outside is not None and f.total is not None:
        outside = f.outside if f.outside.low > OUTSIDE_SHARE * f.total.high else None
    if outside is not None:
        found.append(
            Finding("outside_allocator", "Memory in use outside PyTorch's allocator", round(outside.middle),
                    f"by the text {outside} is neither free nor PyTorch's.",
                    (rule(f"{tool} shows whose it is: another process, or another library in this one"),))
        )  # fmt: skip
    return ranked(found, log.verdict)
