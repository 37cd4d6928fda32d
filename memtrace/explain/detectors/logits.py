"""Logits over the whole vocabulary: the loss computed in one piece, and logits that outlive it."""

from __future__ import annotations

import numpy as np

from memtrace.attribution.categories import Purpose
from memtrace.attribution.phases import Phase
from memtrace.explain.advice import formula
from memtrace.explain.answer import Finding
from memtrace.explain.case import Case
from memtrace.explain.detectors.detector import detector, finding
from memtrace.snapshot.model import Bool
from memtrace.units import MIB
from memtrace.units import format_bytes as size

_SMALLEST_LOGITS_BYTES = MIB
_TILE_BYTES = 4096 * 32768 * 2  # logits of one tile in a loss that works on tiles of at most 4,096 tokens


def _logits_rows(case: Case) -> Bool:
    """Logits, the tensors of the loss that are as large, and gradients of exactly those sizes."""
    logits = case.kind(Purpose.LOGITS) & (case.size >= _SMALLEST_LOGITS_BYTES)
    if not logits.any():
        return logits
    loss = case.kind(Purpose.LOSS) & (case.size >= int(case.size[logits].max()) // 8)
    # A gradient of a logits-sized tensor is made while tensors of that pass' loss are alive, not anywhere in backward.
    near = np.zeros(len(case.size), dtype=np.bool_)
    born, died = case.facts.born, case.facts.died
    for one in case.passes:
        first, stop = np.searchsorted(born, [one.start, one.end]).tolist()
        mine = np.flatnonzero(loss[first:stop]) + first
        if len(mine):
            near[mine[0] : min(stop, int(np.searchsorted(born, died[mine].max(), side="right")))] = True
    gradients = case.kind(Purpose.BACKWARD) & np.isin(case.size, np.unique(case.size[logits | loss]))
    return logits | loss | (gradients & near)


@detector("Logits and loss over the whole vocabulary at once")
def logits_unchunked(case: Case) -> Finding | None:
    """Live logits, loss and their gradients at the event are a material part, or the refused request is one of them."""
    if case.in_evaluation:  # what piles up there is outputs, see eval_peak
        return None
    rows = _logits_rows(case)
    here = rows & case.live
    live = case.total(here)
    asked = case.refusal.asked_bytes if case.refusal is not None else 0
    is_next = bool(asked) and bool((-(-case.size[here] // 512) * 512 == asked).any())
    if not live or not (case.is_material(live) or (is_next and case.is_material(live + asked))):
        return None
    largest = int(case.size[here].max())
    evidence = f"{int(here.sum())} tensors of logits, loss and their gradients are live, the largest {size(largest)}"
    evidence += f"; the refused {size(asked)} is one more of that size." if is_next else "."
    advice = formula(case, "loss_in_tiles", rows, less_bytes=min(_TILE_BYTES, largest), loss="fused")
    return finding(case, here & (case.table.stack >= 0), evidence, advice, size_bytes=live)


@detector("Logits kept through the backward pass")
def kept_logits(case: Case) -> Finding | None:
    """Outputs of the head from the forward pass that are still alive in the backward pass: a caller holds them."""
    if case.phase is not Phase.BACKWARD:
        return None
    facts = case.facts
    made = case.kind(Purpose.LOGITS) & (case.size >= _SMALLEST_LOGITS_BYTES) & ~facts.is_loss  # whose copies it needs
    kept = made & case.live & facts.in_phase(Phase.FORWARD, Phase.EVALUATION)
    kept &= facts.born < int(facts.phases.start[case.span])
    if not case.is_material(case.total(kept), 0.01):
        return None
    count = int(kept.sum())
    return finding(
        case, kept,
        f"{count} {'outputs of the head are' if count > 1 else 'output of the head is'} still alive at event "
        f"{case.at.event}, in the backward pass, which does not need logits: the caller holds them.",
        formula(case, "del outputs (or keep outputs.loss only) before loss.backward(); reduce logits to "
                "log-probabilities as soon as they are made", kept, keep_logits=False),
    )  # fmt: skip
