"""Optimizer states: their precision, and that they appear only with the first step."""

from __future__ import annotations

from memtrace.attribution.categories import Purpose
from memtrace.attribution.phases import Phase
from memtrace.explain.advice import formula
from memtrace.explain.answer import Finding
from memtrace.explain.case import Case
from memtrace.units import format_bytes as size

_STATES = Purpose.OPTIMIZER_STATE


def optimizer_full_precision(case: Case) -> Finding | None:
    """States as large as two (or one) full copies of what is trained."""
    states = case.live_total(case.kind(Purpose.OPTIMIZER_STATE))
    params = case.live_total(case.kind(Purpose.PARAMS))
    if not params or states < 0.9 * params or not case.is_material(states):
        return None
    copies = states / params
    # 8-bit AdamW keeps two bytes an element and two fp32 scales for each 256; parameters have four bytes an element
    # (or two, where nothing shows four: then the saving is half as sure, and the smaller one is said).
    element = 4 if case.dims is not None and case.dims.element_bytes == 4 else 2
    small = round(params / element * (2 + 8 / 256))
    rows = case.kind(Purpose.OPTIMIZER_STATE)
    return Finding(
        "optimizer_full_precision",
        "Optimizer states in full precision",
        states,
        f"states are {copies:.1f} times as large as the {size(params)} of trained parameters.",
        (
            formula(case, "optim_8bit", rows, 1 - small / states, optimizer="adamw_8bit"),
            formula(case, "optim_paged", rows, optimizer="paged_adamw_8bit"),
        ),
        case.frame_of(case.kind(Purpose.OPTIMIZER_STATE) & case.live),
    )


def optimizer_on_first_step(case: Case) -> Finding | None:
    """Memory ran out because states were being made, or had been made since the same point of the first pass."""
    if not case.is_oom:
        return None
    states = case.kind(Purpose.OPTIMIZER_STATE) & case.live
    total = case.total(states)
    first = case.moment.step == 0
    if case.phase is Phase.OPTIMIZER and first and case.is_material(total, 0.01):
        what = f"{size(total)} of states had been made when the first optimizer step ran out of memory"
    elif case.moment.step == 1 and case.points:
        grown = case.grown_since(case.points[-1]).get(_STATES, 0)
        if not case.is_material(grown, 0.01):
            return None
        total = grown
        what = f"{size(grown)} of states appeared with the first optimizer step, after the first pass had fitted"
    else:
        return None
    return Finding(
        "optimizer_on_first_step",
        "Optimizer states appear with the first step",
        total,
        what + ".",
        (formula(case, "optim_paged", states, optimizer="paged_adamw_8bit"),),
        case.frame_of(states),
    )
