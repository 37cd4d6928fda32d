"""What a pass makes and keeps: everything inside the layers where checkpointing is not at work, attention's matrices,
key/value caches, and logits over the whole vocabulary."""

from __future__ import annotations

import numpy as np

from memtrace.arrays import among, place_of
from memtrace.attribution.categories import Purpose
from memtrace.attribution.frame_tags import Tag
from memtrace.attribution.phases import Phase
from memtrace.explain.advice import formula, words
from memtrace.explain.case import Case
from memtrace.explain.detectors.detector import Seen, detector, live_ones
from memtrace.snapshot.model import Bool
from memtrace.units import MIB
from memtrace.units import format_bytes as size

_LEAST_LAYERS = 3
_OUTSIDE_LAYERS = ("embedding", "head", "loss")
_SMALLEST_LOGITS_BYTES = MIB
_TILE_BYTES = 4096 * 32768 * 2  # logits of one tile in a loss that works on tiles of at most 4,096 tokens


@detector("Gradient checkpointing is not at work: all layers are kept", least=0.05)
def checkpointing_inactive(case: Case) -> Seen | None:
    """Activations from inside the layers are alive for several layers at once."""
    facts, here = case.facts, case.here
    if here is None or case.phase not in (Phase.FORWARD, Phase.BACKWARD) or case.in_evaluation:
        return None
    saved = case.kind(Purpose.SAVED) & case.live & (facts.born >= here.start)
    inside = saved & ~case.attribution.serving(*_OUTSIDE_LAYERS) & (case.table.stack >= 0)
    stacks, counts = np.unique(case.table.stack[inside], return_counts=True)
    sites = stacks[counts >= _LEAST_LAYERS]
    # One tensor a layer is what checkpointing itself keeps: several different sites must repeat.
    if len(sites) < _LEAST_LAYERS:
        return None
    kept = inside & among(case.table.stack, sites)
    total, layers = case.total(kept), int(np.median(counts[counts >= _LEAST_LAYERS]))
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
    everywhere = case.kind(Purpose.SAVED) & among(case.table.stack, sites)
    kept_inputs = case.dims.hidden_bytes * layers if case.dims is not None else 0
    stays = min(1.0, kept_inputs / max(total, 1) + 1 / layers)
    return Seen(kept, evidence, (formula(change, everywhere, 1 - stays, checkpointing=True),))


@detector("Attention matrices of tokens × tokens", least=0)
def attention_matrices(case: Case) -> Seen | None:
    """Scores and weights of attention, and gradients as large, are a material part at the event."""
    matrices = case.kind(Purpose.ATTENTION_MATRIX)
    if not matrices.any():
        return None
    rows = matrices | (case.kind(Purpose.BACKWARD) & among(case.size, case.size[matrices]))
    live, largest = case.live_total(rows), int(case.size[matrices].max())
    asked = case.refusal.asked_bytes if case.refusal is not None else 0
    is_next = bool(asked) and bool(case.event_tags & Tag.ATTENTION) and asked >= largest
    if not case.is_material(live) and not (is_next and case.is_material(live + asked)):
        return None
    evidence = live_ones(rows & case.live, "larger than attention's output") + f", up to {size(largest)}"
    if is_next:
        evidence += f"; the refused {size(asked)} is one more"
    if (matrices & case.facts.has(Tag.ATTENTION_EAGER)).any():
        evidence += "; the eager implementation made them."
        change = f"from_pretrained(…, {_attention_backends(case)})"
        advice = formula(change, rows, with_asked=is_next, attention="sdpa")
    else:
        evidence += "; the fused implementation fell back to plain matrices."
        change = (
            f"keep hidden states in 16 bits ({words(case, 'bf16')}) and masks causal, so that a fused attention kernel "
            "applies"
        )
        advice = formula(change, rows, with_asked=is_next)
    return Seen(matrices & case.live, evidence, (advice,), size_bytes=live)


def _attention_backends(case: Case) -> str:
    """The attention implementation to ask for on this GPU."""
    capability = case.timeline.snapshot.memtrace.get("capability")
    if isinstance(capability, (list, tuple)) and [*capability][:1] < [8]:
        return 'attn_implementation="sdpa" (FlashAttention needs an Ampere GPU or later)'
    return 'attn_implementation="sdpa", or "flash_attention_2" on Ampere or later with 16-bit tensors'


@detector("A key/value cache is filled during training")
def kv_cache_in_training(case: Case) -> Seen | None:
    """Keys and values kept by a cache during a training pass, which has no use for them."""
    trains = Phase.BACKWARD in case.facts.phases.phase or case.kind(Purpose.PARAMS).any()
    if not trains or case.in_evaluation or case.phase not in (Phase.FORWARD, Phase.BACKWARD):
        return None
    cached = case.kind(Purpose.KV_CACHE) & case.live
    evidence = f"{live_ones(cached, 'made by the cache')} in a training pass."
    return Seen(cached, evidence, (formula("model.config.use_cache = False", cached),))


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
        first, stop = place_of(born, one.start), place_of(born, one.end)
        mine = np.flatnonzero(loss[first:stop]) + first
        if len(mine):
            near[mine[0] : min(stop, place_of(born, died[mine].max(), side="right"))] = True
    gradients = case.kind(Purpose.BACKWARD) & among(case.size, case.size[logits | loss])
    return logits | loss | (gradients & near)


@detector("Logits and loss over the whole vocabulary at once", least=0)
def logits_unchunked(case: Case) -> Seen | None:
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
    evidence = f"{live_ones(here, 'of logits, loss or their gradients')}, the largest {size(largest)}"
    evidence += f"; the refused {size(asked)} is one more of that size." if is_next else "."
    tile = min(_TILE_BYTES, largest)
    change = formula("loss_in_tiles", rows, less_bytes=tile, with_asked=is_next, loss="fused")
    return Seen(here & (case.table.stack >= 0), evidence, (change,), size_bytes=live)


@detector("Logits kept through the backward pass", least=0.01)
def kept_logits(case: Case) -> Seen | None:
    """Outputs of the head from the forward pass that are still alive in the backward pass: a caller holds them."""
    if case.phase is not Phase.BACKWARD:
        return None
    facts = case.facts
    made = case.kind(Purpose.LOGITS) & (case.size >= _SMALLEST_LOGITS_BYTES) & ~facts.is_loss  # whose copies it needs
    kept = made & case.live & facts.in_phase(Phase.FORWARD, Phase.EVALUATION)
    kept &= facts.born < int(facts.phases.start[case.span])
    count = int(kept.sum())
    evidence = (
        f"{count} {'outputs of the head are' if count > 1 else 'output of the head is'} still alive at event "
        f"{case.at.event}, in the backward pass, which does not need logits: the caller holds them."
    )
    change = (
        "del outputs (or keep outputs.loss only) before loss.backward(); reduce logits to log-probabilities as soon as "
        "they are made"
    )
    return Seen(kept, evidence, (formula(change, kept, keep_logits=False),))
