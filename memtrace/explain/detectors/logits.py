"""Logits over the whole vocabulary: the loss computed in one piece, and logits that outlive it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memtrace.attribution.categories import Purpose
from memtrace.attribution.phases import Phase
from memtrace.explain.advice import formula
from memtrace.explain.answer import Finding
from memtrace.explain.case import Case
from memtrace.units import MIB
from memtrace.units import format_bytes as size

Bool = NDArray[np.bool_]
_SMALLEST_LOGITS_BYTES = MIB
_TILE_BYTES = 4096 * 32768 * 2  # logits of one tile in a loss that works on tiles of at most 4,096 tokens


def logits_rows(case: Case) -> Bool:
    """Logits, the tensors of the loss that are as large, and gradients of exactly those sizes."""
    logits = case.kind(Purpose.LOGITS) & (case.size >= _SMALLEST_LOGITS_BYTES)
    if not logits.any():
        return logits
    least = int(case.size[logits].max()) // 8
    loss = case.kind(Purpose.LOSS) & (case.size >= least)
    gradients = case.kind(Purpose.BACKWARD) & np.isin(case.size, np.unique(case.size[logits | loss]))
    # A gradient of a logits-sized tensor is made while tensors of that pass' loss are alive, not anywhere in backward.
    return logits | loss | (gradients & _near_loss(case, loss))


def _near_loss(case: Case, loss: Bool) -> Bool:
    """Rows born after the loss of their pass and before its tensors were gone."""
    near = np.zeros(len(case.size), dtype=np.bool_)
    born, died = case.facts.born, case.facts.died
    for one in case.passes:
        mine = loss & (born >= one.start) & (born < one.end)
        if mine.any():
            near |= (born >= born[mine].min()) & (born <= died[mine].max()) & (born < one.end)
    return near


def logits_unchunked(case: Case) -> Finding | None:
    """Live logits, loss and their gradients at the event are a material part, or the refused request is one of them."""
    if case.in_evaluation:  # what piles up there is outputs, see eval_peak
        return None
    rows = logits_rows(case)
    live = case.live_total(rows)
    asked = case.refusal.asked_bytes if case.refusal is not None else 0
    is_next = bool(asked) and bool((-(-case.size[rows & case.live] // 512) * 512 == asked).any())
    if not live or not (case.is_material(live) or (is_next and case.is_material(live + asked))):
        return None
    count = int((rows & case.live).sum())
    largest = int(case.size[rows & case.live].max())
    evidence = f"{count} tensors of logits, loss and their gradients are live, the largest {size(largest)}"
    if is_next:
        evidence += f"; the refused {size(asked)} is one more of that size"
    tile = min(_TILE_BYTES, largest)
    advice = [formula(case, "loss_in_tiles", rows, less_bytes=tile, loss="fused")]
    return Finding(
        "logits_unchunked",
        "Logits and loss over the whole vocabulary at once",
        live,
        evidence + ".",
        tuple(advice),
        case.frame_of(rows & case.live & (case.table.stack >= 0)),
    )


def kept_logits(case: Case) -> Finding | None:
    """Outputs of the head from the forward pass that are still alive in the backward pass: a caller holds them."""
    if case.phase is not Phase.BACKWARD:
        return None
    facts = case.facts
    made = case.kind(Purpose.LOGITS) & (case.size >= _SMALLEST_LOGITS_BYTES) & ~facts.is_loss  # whose copies it needs
    begin = int(facts.phases.start[int(facts.phases.span_of(np.array([case.at.event]))[0])])
    kept = made & case.live & facts.in_phase(Phase.FORWARD, Phase.EVALUATION) & (facts.born < begin)
    total = case.total(kept)
    if not case.is_material(total, 0.01):
        return None
    count = int(kept.sum())
    held = "is" if count == 1 else "are"
    return Finding(
        "kept_logits",
        "Logits kept through the backward pass",
        total,
        f"{count} output{'s' if count > 1 else ''} of the head {held} still alive at event {case.at.event}, in the "
        "backward pass, which does not need logits: the caller holds them.",
        (
            formula(case, "del outputs (or keep outputs.loss only) before loss.backward(); reduce logits to "
                    "log-probabilities as soon as they are made", kept, keep_logits=False),
        ),
        case.frame_of(kept),
    )  # fmt: skip
