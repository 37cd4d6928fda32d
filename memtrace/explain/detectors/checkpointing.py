"""Gradient checkpointing that is not at work: the inside of every layer is kept until the backward pass."""

from __future__ import annotations

import numpy as np

from memtrace.attribution.categories import Purpose
from memtrace.attribution.frame_tags import Tag
from memtrace.attribution.phases import Phase
from memtrace.explain.advice import formula
from memtrace.explain.answer import Finding
from memtrace.explain.case import Case
from memtrace.units import format_bytes as size

_LEAST_LAYERS = 3
_OUTSIDE_LAYERS = ("embedding", "head", "loss")


def checkpointing_inactive(case: Case) -> Finding | None:
    """Activations from inside the layers are alive for several layers at once."""
    facts = case.facts
    here = case.here
    if here is None or case.phase not in (Phase.FORWARD, Phase.BACKWARD) or case.in_evaluation:
        return None
    saved = case.kind(Purpose.SAVED) & case.live & (case.facts.born >= here.start)
    inside = saved & ~np.isin(case.module, _OUTSIDE_LAYERS) & (case.table.stack >= 0)
    index = np.flatnonzero(inside)
    if not len(index):
        return None
    _, inverse, counts = np.unique(case.table.stack[index], return_inverse=True, return_counts=True)
    repeated = counts[inverse] >= _LEAST_LAYERS
    kept = np.zeros(len(inside), dtype=np.bool_)
    kept[index[repeated]] = True
    # One tensor a layer is what checkpointing itself keeps: several different sites must repeat.
    sites = int((counts >= _LEAST_LAYERS).sum())
    total = case.total(kept)
    if sites < _LEAST_LAYERS or not case.is_material(total, 0.05):
        return None
    layers = int(np.median(counts[counts >= _LEAST_LAYERS]))
    enabled = bool((facts.has(Tag.CHECKPOINT) & facts.in_phase(Phase.FORWARD)).any())
    evidence = (
        f"{sites} call sites inside the layers each hold tensors of about {layers} layers "
        f"({size(total // max(layers, 1))} a layer)"
    )
    evidence += (
        "; checkpointing frames are on the stack, yet nothing was dropped"
        if enabled
        else "; no checkpointing frame is on any stack of the forward pass"
    )
    kept_inputs = case.dims.hidden_bytes * layers if case.dims is not None else 0
    # Every pass keeps as much: the peak may move to another one. What checkpointing keeps is left in.
    everywhere = case.kind(Purpose.SAVED) & np.isin(case.table.stack, np.unique(case.table.stack[kept]))
    stays = min(1.0, kept_inputs / total + 1 / max(layers, 1))
    if enabled:
        change = (
            "model.train() and model.enable_input_require_grads() before training: checkpointing is called but "
            "neither drops nor recomputes (evaluation mode, or inputs without gradient)"
        )
    else:
        change = "checkpointing"
    return Finding(
        "checkpointing_inactive",
        "Gradient checkpointing is not at work: all layers are kept",
        total,
        evidence + ".",
        (formula(case, change, everywhere, 1 - stays, checkpointing=True),),
        case.frame_of(kept),
    )
