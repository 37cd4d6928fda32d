"""Evaluation and generation: forward passes without a backward pass, whose outputs pile up."""

from __future__ import annotations

import numpy as np

from memtrace.attribution.categories import Category, Purpose
from memtrace.attribution.frame_tags import Tag
from memtrace.attribution.phases import Phase
from memtrace.explain.advice import formula
from memtrace.explain.answer import Finding
from memtrace.explain.case import Case
from memtrace.units import format_bytes as size


def eval_peak(case: Case) -> Finding | None:
    """The event lies in an evaluation or generation; its bytes are what was made there and is alive."""
    tags = case.event_tags
    generating = case.phase is Phase.GENERATION or bool(tags & Tag.GENERATE)
    if not case.in_evaluation:
        return None
    facts = case.facts
    began = _began(case)
    made = case.live & (facts.born >= began)
    made &= ~case.kind(Category.LORA) & ~case.kind(Purpose.QUANTIZED, Purpose.UNQUANTIZED, Purpose.QUANT_STATE)
    total = case.total(made)
    if not case.is_material(total):
        return None
    logits = made & case.kind(Purpose.LOGITS)
    count = int(logits.sum())
    what = "generation" if generating else "evaluation"
    evidence = f"the event lies in {what}; {size(total)} made since it began are alive"
    advice = []
    if count > 1:
        evidence += f", {size(case.total(logits))} of it in {count} tensors of logits"
        advice.append(formula(case, "eval_outputs", logits))
    if generating:
        advice.append(formula(case, "half the sequences at once: the key/value cache grows with them", made, 0.5))
    else:
        advice.append(formula(case, "eval_batch", made & ~logits if advice else made, 0.5))
    return Finding(
        "eval_peak",
        f"The {'generation' if generating else 'evaluation'} needs more than training",
        total,
        evidence + ".",
        tuple(advice),
        case.frame_of(made),
    )


def _began(case: Case) -> int:
    """First event of the evaluation that the event lies in: after the last backward pass or optimizer step."""
    phases = case.facts.phases
    span = int(phases.span_of(np.array([case.at.event]))[0])
    while span > 0 and phases.phase[span - 1] not in (Phase.BACKWARD, Phase.OPTIMIZER, Phase.LOAD):
        span -= 1
    return int(phases.start[max(span, 0)])
