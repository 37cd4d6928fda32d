"""What layers keep between forward and backward pass: everything, where checkpointing is not at work, and attention's
matrices of tokens by tokens."""

from __future__ import annotations

import numpy as np

from memtrace.attribution.categories import Purpose
from memtrace.attribution.frame_tags import Tag
from memtrace.attribution.phases import Phase
from memtrace.explain.advice import formula, words
from memtrace.explain.answer import Finding
from memtrace.explain.case import Case
from memtrace.explain.detectors.detector import detector, finding
from memtrace.units import format_bytes as size

_LEAST_LAYERS = 3
_OUTSIDE_LAYERS = ("embedding", "head", "loss")


@detector("Gradient checkpointing is not at work: all layers are kept")
def checkpointing_inactive(case: Case) -> Finding | None:
    """Activations from inside the layers are alive for several layers at once."""
    facts, here = case.facts, case.here
    if here is None or case.phase not in (Phase.FORWARD, Phase.BACKWARD) or case.in_evaluation:
        return None
    saved = case.kind(Purpose.SAVED) & case.live & (facts.born >= here.start)
    inside = saved & ~np.isin(case.module, _OUTSIDE_LAYERS) & (case.table.stack >= 0)
    stacks, counts = np.unique(case.table.stack[inside], return_counts=True)
    sites = stacks[counts >= _LEAST_LAYERS]
    kept = inside & np.isin(case.table.stack, sites)
    total = case.total(kept)
    # One tensor a layer is what checkpointing itself keeps: several different sites must repeat.
    if len(sites) < _LEAST_LAYERS or not case.is_material(total, 0.05):
        return None
    layers = int(np.median(counts[counts >= _LEAST_LAYERS]))
    evidence = (
        f"{len(sites)} call sites inside the layers each hold tensors of about {layers} layers "
        f"({size(total // layers)} a layer); "
    )
    if (facts.has(Tag.CHECKPOINT) & facts.in_phase(Phase.FORWARD)).any():
        evidence += "checkpointing frames are on the stack, yet nothing was dropped."
        change = (
            "model.train() and model.enable_input_require_grads() before training: checkpointing is called but "
            "neither drops nor recomputes (evaluation mode, or inputs without gradient)"
        )
    else:
        evidence += "no checkpointing frame is on any stack of the forward pass."
        change = "checkpointing"
    # Every pass keeps as much: the peak may move to another one. What checkpointing keeps is left in.
    everywhere = case.kind(Purpose.SAVED) & np.isin(case.table.stack, sites)
    kept_inputs = case.dims.hidden_bytes * layers if case.dims is not None else 0
    stays = min(1.0, kept_inputs / total + 1 / layers)
    return finding(case, kept, evidence, formula(case, change, everywhere, 1 - stays, checkpointing=True))


@detector("Attention matrices of tokens × tokens")
def attention_matrices(case: Case) -> Finding | None:
    """Scores and weights of attention, and gradients as large, are a material part at the event."""
    matrices = case.kind(Purpose.ATTENTION_MATRIX)
    if not matrices.any():
        return None
    rows = matrices | (case.kind(Purpose.BACKWARD) & np.isin(case.size, np.unique(case.size[matrices])))
    live, largest = case.live_total(rows), int(case.size[matrices].max())
    asked = case.refusal.asked_bytes if case.refusal is not None else 0
    is_next = bool(asked) and bool(case.event_tags & Tag.ATTENTION) and asked >= largest
    if not case.is_material(live) and not (is_next and case.is_material(live + asked)):
        return None
    count = int((rows & case.live).sum())
    evidence = f"{count} tensors larger than attention's output are live, up to {size(largest)}"
    if is_next:
        evidence += f"; the refused {size(asked)} is one more"
    if (matrices & case.facts.has(Tag.ATTENTION_EAGER)).any():
        evidence += "; the eager implementation made them."
        advice = formula(case, f"from_pretrained(…, {_attention_backends(case)})", rows, attention="sdpa")
    else:
        evidence += "; the fused implementation fell back to plain matrices."
        change = (
            f"keep hidden states in 16 bits ({words(case, 'bf16')}) and masks causal, so that a fused attention kernel "
            "applies"
        )
        advice = formula(case, change, rows)
    return finding(case, matrices & case.live, evidence, advice, size_bytes=live)


def _attention_backends(case: Case) -> str:
    """The attention implementation to ask for on this GPU."""
    capability = case.timeline.snapshot.memtrace.get("capability")
    if isinstance(capability, (list, tuple)) and [*capability][:1] < [8]:
        return 'attn_implementation="sdpa" (FlashAttention needs an Ampere GPU or later)'
    return 'attn_implementation="sdpa", or "flash_attention_2" on Ampere or later with 16-bit tensors'


@detector("A key/value cache is filled during training")
def kv_cache_in_training(case: Case) -> Finding | None:
    """Keys and values kept by a cache during a training pass, which has no use for them."""
    cached = case.kind(Purpose.KV_CACHE) & case.live
    trains = Phase.BACKWARD in case.facts.phases.phase or case.kind(Purpose.PARAMS).any()
    if (
        not trains
        or case.in_evaluation
        or case.phase not in (Phase.FORWARD, Phase.BACKWARD)
        or not case.is_material(case.total(cached))
    ):
        return None
    return finding(
        case, cached, f"{int(cached.sum())} tensors made by the cache are live in a training pass.",
        formula(case, "model.config.use_cache = False", cached),
    )  # fmt: skip
