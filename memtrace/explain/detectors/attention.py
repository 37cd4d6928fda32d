"""Attention that makes matrices of tokens by tokens, and key/value caches in training."""

from __future__ import annotations

import numpy as np

from memtrace.attribution.categories import Purpose
from memtrace.attribution.frame_tags import Tag
from memtrace.attribution.phases import Phase
from memtrace.explain.advice import attention_backends, formula, words
from memtrace.explain.answer import Finding
from memtrace.explain.case import Case
from memtrace.units import format_bytes as size


def attention_matrices(case: Case) -> Finding | None:
    """Scores and weights of attention, and gradients as large, are a material part at the event."""
    matrices = case.kind(Purpose.ATTENTION_MATRIX)
    if not matrices.any():
        return None
    gradients = case.kind(Purpose.BACKWARD) & np.isin(case.size, np.unique(case.size[matrices]))
    rows = matrices | gradients
    live = case.live_total(rows)
    asked = case.refusal.asked_bytes if case.refusal is not None else 0
    is_next = bool(asked) and bool(case.event_tags & Tag.ATTENTION) and asked >= int(case.size[matrices].max())
    if not case.is_material(live) and not (is_next and case.is_material(live + asked)):
        return None
    eager = bool((matrices & case.facts.has(Tag.ATTENTION_EAGER)).any())
    count = int((rows & case.live).sum())
    evidence = f"{count} tensors larger than attention's output are live, up to {size(int(case.size[matrices].max()))}"
    if is_next:
        evidence += f"; the refused {size(asked)} is one more"
    if eager:
        evidence += "; the eager implementation made them"
        change = f"from_pretrained(…, {attention_backends(case)})"
        advice = [formula(case, change, rows, attention="sdpa")]
    else:
        evidence += "; the fused implementation fell back to plain matrices"
        bf16 = words(case, "bf16")
        change = f"keep hidden states in 16 bits ({bf16}) and masks causal, so that a fused attention kernel applies"
        advice = [formula(case, change, rows)]
    return Finding(
        "attention_matrices",
        "Attention matrices of tokens × tokens",
        live,
        evidence + ".",
        tuple(advice),
        case.frame_of(matrices & case.live),
    )


def kv_cache_in_training(case: Case) -> Finding | None:
    """Keys and values kept by a cache during a training pass, which has no use for them."""
    cached = case.kind(Purpose.KV_CACHE) & case.live
    total = case.total(cached)
    if case.phase not in (Phase.FORWARD, Phase.BACKWARD) or not case.is_material(total):
        return None
    return Finding(
        "kv_cache_in_training",
        "A key/value cache is filled during training",
        total,
        f"{int(cached.sum())} tensors made by the cache are live in a training pass.",
        (formula(case, "model.config.use_cache = False", cached),),
        case.frame_of(cached),
    )
