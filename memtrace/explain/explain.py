"""``explain``: from a snapshot, a log, or both to one :class:`Explanation`.

With both, the snapshot decides (it is measured) and the log supplies what a snapshot lacks: limit, card, processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from memtrace.analysis import Analysis, is_truncated
from memtrace.answers.pins import pins
from memtrace.attribution.categories import Category, Purpose, category_words
from memtrace.attribution.frame_tags import Tag
from memtrace.attribution.phases import Phase
from memtrace.explain.answer import Explanation, Together, When
from memtrace.explain.case import Case
from memtrace.explain.detectors import detect, ranked
from memtrace.explain.proof import share_by_growth
from memtrace.explain.setting import setting_of_log
from memtrace.explain.sizes import asked_at, possibilities, possible_models
from memtrace.explain.snapshot_facts import verdict_at
from memtrace.history.layout import layout_at
from memtrace.history.refusals import Refusal, refusals
from memtrace.history.timeline import At, choose_event
from memtrace.units import counted, format_delta
from memtrace.units import format_bytes as size

if TYPE_CHECKING:  # here and below: what reads logs is not needed for a snapshot alone
    from memtrace.explain.log_answer import TextAnswer
    from memtrace.oomlog import LogReading, OomMessage

_GREW_SHARE = 0.01
_RECORD_IT = "A text does not say what held the memory; memtrace run SCRIPT records it, and explain reads that too."
_IN_GENERAL = "What helps most runs, not proven for this one: fewer tokens a batch, checkpointing, a base in 4 bits."
_LOADING = (
    "What helps while loading, not proven for this one: weights in 4 or 8 bits, or part of them on another device."
)
_DRAWING = (
    "What helps, not proven here: a smaller image or batch, weights in fewer bits, idle parts offloaded to the CPU."
)


def explain_log(
    reading: LogReading, files: Sequence[str] = (), before: Sequence[str] = (), after: Sequence[str] = ()
) -> Explanation:
    """The answer from a log alone. ``before``, ``after``: lines up to the message that :func:`principal` picks, that
    one included, and behind it, if at hand."""
    from memtrace.explain.log_answer import findings_of_log
    from memtrace.explain.traceback import moment_in_log

    log = _judged(reading, reading.messages, before, after)
    more, findings = log.worth_saying, findings_of_log(log)
    when = moment_in_log(before, after) if log.oom is not None else None
    if log.oom is not None and log.oom.is_gpu_oom and log.verdict in ("budget", "fragmentation", "unknown"):
        loads = when is not None and when.phase == Phase.LOAD.label
        helps = _DRAWING if log.setting.draws else _LOADING if loads else _IN_GENERAL
        is_bare = log.verdict == "budget" and not findings and (loads or log.setting.draws or not log.setting.serves)
        general = (helps,) if is_bare else ()
        more = (*more, *general, _RECORD_IT)
    return Explanation(
        oom=log.oom.contract() if log.oom is not None else None,
        verdict=log.verdict,
        confidence=log.confidence,
        when=when,
        because=log.because,
        findings=findings,
        ooms=tuple(message.contract() for message in reading.messages),
        sizes=possible_models(log.oom),
        worth_saying=more,
        files=tuple(files),
        warnings=_log_warnings(reading),
    )


def _judged(
    reading: LogReading, messages: Sequence[OomMessage], before: Sequence[str] = (), after: Sequence[str] = ()
) -> TextAnswer:
    """The verdict on a log's messages, with what the lines around the principal one and its settings say."""
    from memtrace.explain.log_answer import principal, verdict_from_log
    from memtrace.explain.traceback import frames_in_log

    message = principal(messages) if messages else None
    frames = frames_in_log(before, after) if message is not None else ()
    setting = setting_of_log(reading, message, before, [frame.filename for frame in frames])
    return verdict_from_log(messages, setting, frames)


def explain_snapshot(
    analysis: Analysis,
    at: At | None = None,
    *,
    capacity_bytes: int | None = None,
    reading: LogReading | None = None,
    files: Sequence[str] = (),
) -> Explanation:
    """The answer from a snapshot, and a log where there is one.

    ``at`` defaults to the last OOM, else the peak. ``capacity_bytes`` is what the process may reserve at most.
    Raises nothing of its own: what can't be told is None, "unknown" or absent.
    """
    timeline = analysis.timeline
    at = at or choose_event(timeline, None)
    refusal = next((r for r in refusals(timeline) if r.event == at.event), None)
    warnings = list(analysis.caveats)
    message = printed = None
    if reading is not None:
        from memtrace.explain.log_answer import facts_of_text

        warnings += _log_warnings(reading)
        message = _matching(reading.messages, refusal, timeline.curve_at(at.event)[1])
        if message is None and refusal is not None and any(m.is_gpu_oom for m in reading.messages):
            warnings.append("no message of the log has this refusal's figures: its limit and card are not used")
        printed = facts_of_text(message) if message is not None else None
    verdict, refused = verdict_at(analysis, at.event, capacity_bytes, printed)
    case = Case(analysis, at, verdict, refused)
    findings, all_changes = detect(case)
    explanation = Explanation(
        oom=_oom(case, refusal, message),
        verdict=verdict.verdict,
        confidence=verdict.confidence,
        when=_when(case),
        because=(*verdict.because[:1], *asked_at(case), *verdict.because[1:], *_about(case, all_changes)),
        findings=findings,
        together=all_changes,
        ooms=tuple(message.contract() for message in reading.messages) if reading is not None else (),
        capacity=case.capacity,
        pieces=refused.pieces if refused is not None else None,
        needed_bytes=refused.facts.still_needed_bytes if refused is not None else None,
        sizes=possibilities(case),
        files=tuple(files) or (timeline.snapshot.source,),
        warnings=tuple(dict.fromkeys(warnings)),
    )
    return explanation if reading is None else _with_log(explanation, reading, message, refusal)


def _with_log(
    explanation: Explanation, reading: LogReading, message: OomMessage | None, refusal: Refusal | None
) -> Explanation:
    """Add what the log knows; where the snapshot saw no refusal, the log's verdict stands."""
    from memtrace.explain.log_answer import findings_of_log

    judged = reading.messages if message is None else (message,)
    log = _judged(reading, judged)
    if refusal is None and log.oom is not None:
        explanation = replace(
            explanation,
            oom=log.oom.contract(),
            verdict=log.verdict,
            confidence=log.confidence,
            because=(*log.because, "The snapshot holds no refusal; its findings are about its own peak."),
        )
    if message is None and refusal is not None:
        return explanation
    known = {finding.id for finding in explanation.findings}
    more = [finding for finding in findings_of_log(log) if finding.id not in known | {"reserved_in_pieces"}]
    findings = ranked([*explanation.findings, *more], explanation.verdict)
    return replace(explanation, findings=findings, worth_saying=log.worth_saying)


def _log_warnings(reading: LogReading) -> tuple[str, ...]:
    return ("the log holds more messages than are kept; the first ones are shown",) if reading.stopped_early else ()


def _matching(messages: Sequence[OomMessage], refusal: Refusal | None, allocated: int) -> OomMessage | None:
    """The message of the log that describes this refusal: every figure it prints agrees."""
    if refusal is None:
        return None
    for message in messages:
        if not message.is_gpu_oom or message.tried_bytes is None:
            continue
        expected = {
            "tried_bytes": refusal.need_bytes,
            "allocated_bytes": allocated,
            "reserved_bytes": refusal.reserved_bytes,
            "reserved_unallocated_bytes": refusal.reserved_bytes - allocated,
        }
        spans = {name: message.interval(name) for name in expected}
        if all(span is None or span[0] <= expected[name] <= span[1] for name, span in spans.items()):
            return message
    return None


def _oom(case: Case, refusal: Refusal | None, message: OomMessage | None) -> Mapping[str, object] | None:
    """The contract's ``oom`` object: measured figures, with the log's for what a snapshot does not hold."""
    if refusal is None:
        return None
    text = message.contract() if message is not None else {}
    capacity = case.capacity
    limit = capacity.low_bytes if capacity is not None and capacity.kind == "limit" and capacity.is_exact else None
    return {
        "is_gpu_oom": True,
        "backend": text.get("backend") or case.setting.backend,
        "device": case.timeline.device.device,
        "tried_bytes": refusal.need_bytes,
        "total_bytes": case.timeline.snapshot.noted_bytes("device_total_bytes") or text.get("total_bytes"),
        "free_bytes": refusal.device_free_bytes if refusal.device_free_bytes is not None else text.get("free_bytes"),
        "allocated_bytes": case.allocated_bytes,
        "reserved_bytes": case.reserved_bytes,
        "reserved_unallocated_bytes": case.reserved_bytes - case.allocated_bytes,
        "limit_bytes": limit if limit is not None else text.get("limit_bytes"),
        "process_bytes": text.get("process_bytes"),
        "component": text.get("component"),
        "asked_bytes": refusal.asked_bytes,
    }


def _when(case: Case) -> When | None:
    if case.at.event < 0 and not len(case.timeline):
        return None
    phase = case.moment.phase
    if case.event_tags & Tag.GENERATE:
        phase = Phase.GENERATION.label
    elif case.in_evaluation and case.phase is not Phase.GENERATION:
        phase = Phase.EVALUATION.label
    grew: dict[str, int] = {}
    if case.points:
        change = case.grown_since(case.points[0])
        grew = {key: n for key, n in change.items() if abs(n) >= _GREW_SHARE * max(case.allocated_bytes, 1)}
    lora = {"meaning": case.attribution.lora_meaning}
    return When(phase, case.moment.step, _first_step(case), case.at.event, case.at.kind, grew, lora)


def _tokens_that_fit(case: Case) -> float | None:
    """Share of the batch's tokens for which the pass would have fitted; None where that isn't the question."""
    refused, capacity = case.refused, case.capacity
    needed = refused.facts.still_needed_bytes if refused is not None else None
    if case.verdict.verdict != "budget" or capacity is None or refused is None or needed is None:
        return None
    return share_by_growth(case, (), refused.pieces.allocated_bytes + needed, capacity.low_bytes)


def _first_step(case: Case) -> bool | None:
    """Whether the event lies in the program's first step; None before any step or where the recording began later."""
    step = case.moment.step
    if step is None:
        return None
    if step > 0:
        return False
    truncated = is_truncated(case.timeline)
    if truncated is False:
        return True
    # Optimizer states older than the recording mean earlier steps; workspaces made in a pass that was recorded from
    # its embedding on mean there was none.
    born = case.facts.born
    if (case.kind(Purpose.OPTIMIZER_STATE) & (born < 0)).any():
        return False
    first = case.passes[0] if case.passes else None
    if truncated or first is None:
        return None
    inside = (born >= first.start) & (born < first.end)
    workspace = (case.kind(Purpose.CUBLAS_WORKSPACE) & inside).any()
    return True if workspace and (inside & case.attribution.serving("embedding")).any() else None


def _pinned(case: Case) -> list[str]:
    """Who alone holds most of what is free."""
    held = pins(case.analysis, layout_at(case.timeline, case.at.event)).held_by
    meaning = case.attribution.lora_meaning
    return [
        f"What {first.frame} made ({category_words(f'{first.category}/{first.subcategory}', meaning)}) alone keeps "
        f"{size(first.free_bytes)} of free pieces in {counted(first.segments, 'segment')} from being given back."
        for first in [holder for holder in held if holder.frame is not None][:1]
    ]


def _about(case: Case, changed: Together | None) -> list[str]:
    """Sentences on the moment: the peak where nothing was refused, growth since the pass before, earlier refusals."""
    found = []
    if not case.is_oom:
        what = {"peak": "Use was highest", "reserved-peak": "Reserved memory was highest"}.get(
            case.at.kind, "Looked at"
        )
        where = f"at event {case.at.event:,}" if case.at.event >= 0 else "before the first event"
        if not len(case.timeline):
            what, where = "Live", "in the final state"
        found.append(f"{what} {where}: {size(case.allocated_bytes)} allocated, {size(case.reserved_bytes)} reserved.")
    held = {str(c): case.live_total(case.kind(c)) for c in Category}
    top = sorted(((n, name) for name, n in held.items() if case.is_material(n)), reverse=True)[:3]
    meaning = case.attribution.lora_meaning
    if top:
        whole = "what is allocated" if case.is_oom else "it"  # what was still to come has just been told
        parts = ", ".join(f"{category_words(name, meaning)} {size(n)}" for n, name in top)
        found.append(f"Most of {whole}: {parts}.")
    known = changed.tokens_share if changed is not None else None  # what the rest of the layers needs is not all
    if (share := _tokens_that_fit(case)) is not None and share <= (known or 1):
        found.append(
            f"At most about {share:.0%} of this batch's tokens would fit as things are: activations and logits grow "
            "with them."
        )
    if case.verdict.verdict == "fragmentation":
        found += _pinned(case)
    if case.is_oom and len(case.timeline.oom_events) > 1:
        found.append(f"{len(case.timeline.oom_events)} requests were refused in this recording; this is the last.")
    if case.points and case.is_oom:
        change = case.grown_since(case.points[0])
        total = sum(change.values())
        if abs(total) >= _GREW_SHARE * max(case.allocated_bytes, 1) and change:
            key, most = next(iter(change.items()))
            step = case.points[0].earlier.step
            found.append(
                f"Since the same point of the pass before (step {step}): {format_delta(total)}, most of it "
                f"{category_words(key, meaning)} ({format_delta(most)})."
            )
    return found
