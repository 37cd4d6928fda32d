"""Evaluation and generation: forward passes without a backward pass, whose outputs pile up."""

from __future__ import annotations

import numpy as np

from memtrace.attribution.categories import Category, Purpose
from memtrace.attribution.frame_tags import Tag
from memtrace.attribution.phases import Phase
from memtrace.explain.advice import formula
from memtrace.explain.case import Case
from memtrace.explain.detectors.detector import Seen, detector, live_ones
from memtrace.explain.dims import layer_count
from memtrace.units import format_bytes as size

_LARGER = 1.5
_LEAST_LAYERS = 6  # of a small model, as many may be alive anyway
_MANY_LAYERS = 7


@detector("The evaluation needs more than training")
def eval_peak(case: Case) -> Seen | None:
    """The event lies in an evaluation or generation; its bytes are what was made there and is alive."""
    if not case.in_evaluation:
        return None
    made = case.live & (case.facts.born >= _began(case))
    made &= ~case.kind(Category.LORA) & ~case.kind(Purpose.QUANTIZED, Purpose.UNQUANTIZED, Purpose.QUANT_STATE)
    generating = case.phase is Phase.GENERATION or bool(case.event_tags & Tag.GENERATE)
    what = "generation" if generating else "evaluation"
    evidence = f"the event lies in {what}; {size(case.total(made))} made since it began are alive"
    changes = []
    rest, logits = made, made & case.kind(Purpose.LOGITS)
    if (count := int(logits.sum())) > 1:
        evidence += f", {size(case.total(logits))} of it in {count} tensors of logits"
        changes.append(formula("eval_outputs", logits))
        rest = made & ~logits
    if generating:
        changes.append(formula("half the sequences at once: the key/value cache grows with them", made, 0.5))
    else:
        changes.append(formula("eval_batch", rest, 0.5))
    return Seen(made, evidence + ".", tuple(changes), title=f"The {what} needs more than training")


@detector("The evaluation's batch is larger than training's")
def eval_batch_larger(case: Case) -> Seen | None:
    """The evaluation's batches have clearly more tokens than training's."""
    if not case.in_evaluation or (case.here is None and not case.passes):
        return None
    embedded = case.size * case.attribution.serving("embedding")
    born, began = case.facts.born, _began(case)
    trained = [
        int(embedded[(born >= p.start) & (born < min(p.trained_until, began))].max(initial=0)) for p in case.passes
    ]
    usual = max(trained, default=0)
    now = int(embedded[(born >= began) & (born <= case.at.event)].max(initial=0))
    if not usual or now < _LARGER * usual:
        return None
    made = case.live & (born >= began) & ~case.kind(Category.LORA)
    extra = round(case.total(made) * (1 - usual / now))
    evidence = f"{now / usual:.1f} times the tokens of the largest training batch go through the model at once."
    return Seen(made, evidence, (formula("eval_batch_as_training", made, 1 - usual / now),), size_bytes=extra)


@detector("The hidden states of all layers are kept")
def output_hidden_states(case: Case) -> Seen | None:
    """The hidden states of every layer are kept in a pass without gradients, which frees them else."""
    if not case.in_evaluation or case.phase is Phase.GENERATION:
        return None
    layers = min(layer_count(case.analysis) or _MANY_LAYERS, _MANY_LAYERS)
    born, began = case.facts.born, _began(case)
    stream = int(case.size[(born >= began) & case.attribution.serving("embedding")].max(initial=0))
    states = case.live & (born >= began) & (case.size == stream)
    # One call site, the end of a layer, made them all.
    stacks, counts = np.unique(case.table.stack[states], return_counts=True)
    if not len(counts) or int(counts.max()) < max(layers - 1, _LEAST_LAYERS):
        return None
    states &= case.table.stack == stacks[counts.argmax()]
    evidence = live_ones(states, "of the size of the embedding's output") + ", in a pass without gradients."
    change = "output_hidden_states=False in the call and in the model's config"
    return Seen(states, evidence, (formula(change, states, 1 - 1 / layers),))


def _began(case: Case) -> int:
    """First event of the evaluation that the event lies in: after the last backward pass or optimizer step."""
    phases, span = case.facts.phases, case.span
    while span > 0 and phases.phase[span - 1] not in (Phase.BACKWARD, Phase.OPTIMIZER, Phase.LOAD):
        span -= 1
    return int(phases.start[max(span, 0)])
