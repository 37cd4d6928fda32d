"""32-bit copies where 16 bits would do: embeddings and head, and the adapters' branch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from memtrace.attribution.categories import Category, Purpose
from memtrace.attribution.frame_tags import Tag
from memtrace.explain.advice import formula, words
from memtrace.explain.answer import Finding
from memtrace.explain.case import Case
from memtrace.explain.detectors.detector import detector, finding
from memtrace.snapshot.model import Bool
from memtrace.units import MIB
from memtrace.units import format_bytes as size

_UPCAST = frozenset({"prepare_model_for_kbit_training", "prepare_model_for_int8_training"})
_CASTS_INPUT = frozenset({"_cast_input_dtype"})
_REPLACED_WITHIN = 8  # events between a 32-bit copy's birth and the death of what it replaces


def _doubled(case: Case) -> Bool:
    """Stored weights that took the place of one of half their size: made, and the other one freed right after."""
    weights = case.kind(Purpose.UNQUANTIZED) & case.facts.stays & (case.size >= MIB)
    result = np.zeros(len(weights), dtype=np.bool_)
    born, died, sizes = case.facts.born, case.facts.died, case.size
    order = np.argsort(died, kind="stable")
    ends = died[order]
    for row in np.flatnonzero(weights & (born >= 0)).tolist():
        low, high = np.searchsorted(ends, [born[row], born[row] + _REPLACED_WITHIN + 1])
        result[row] = bool((sizes[order[low:high]] * 2 == sizes[row]).any())
    return result


@detector("Embeddings and head in 32 bits")
def fp32_upcast_head(case: Case) -> Finding | None:
    """Embeddings and head stored in 32 bits by ``prepare_model_for_kbit_training``, or by any cast in place."""
    if not case.attribution.trains_adapters:
        return None
    weights = case.kind(Purpose.UNQUANTIZED) & case.live
    upcast = weights & case.has_function(_UPCAST)
    why = "their stack is prepare_model_for_kbit_training, which casts them"
    if not upcast.any():
        upcast, why = weights & _doubled(case), "each replaced a tensor of half its size"
    dims = case.dims
    if not upcast.any() and dims is not None and dims.element_bytes == 4 and dims.head_bytes is not None:
        upcast = weights & (case.size == dims.head_bytes)
        why = "logits, head and hidden states have sizes that fit 4 bytes an element only"
    if not case.is_material(case.total(upcast)):
        return None
    matrices, largest = int((upcast & (case.size >= MIB)).sum()), size(int(case.size[upcast].max()))
    change = (
        "leave out prepare_model_for_kbit_training: model.gradient_checkpointing_enable("
        "gradient_checkpointing_kwargs={'use_reentrant': False}); model.enable_input_require_grads(); "
        "get_peft_model freezes the base by itself. Or cast back after it: "
        "model.get_input_embeddings().to(torch.bfloat16), the same for get_output_embeddings()"
    )
    return finding(
        case, upcast,
        f"{int(upcast.sum())} stored tensors ({matrices} of them matrices, the largest {largest}): {why}. "
        "Hidden states and logits follow in 32 bits unless autocast is on.",
        formula(case, change, upcast, 0.5, prepare_kbit=False),
    )  # fmt: skip


def _dropout_masks(case: Case, rows: Bool) -> tuple[Bool, Bool]:
    """(masks, copies in 32 bits) among dropout's outputs: a call makes both, and the mask has one byte an element."""
    index = np.flatnonzero(rows)
    masks, wide = np.zeros(len(rows), np.bool_), np.zeros(len(rows), np.bool_)
    stack, sizes = case.table.stack, case.size
    for first, second in zip(index[:-1].tolist(), index[1:].tolist(), strict=True):
        if second - first > 1 or stack[first] != stack[second]:
            continue
        small, large = (first, second) if sizes[first] < sizes[second] else (second, first)
        if sizes[large] in (sizes[small] * 2, sizes[small] * 4):
            masks[small] = True
            wide[large] |= sizes[large] == sizes[small] * 4
    return masks, wide


@detector("Adapters work in 32 bits and keep 32-bit inputs")
def fp32_lora_branch(case: Case) -> Finding | None:
    """The adapters' own copies of their inputs, kept in 32 bits for the backward pass."""
    inside = case.facts.has(Tag.LORA) & (case.facts.born >= 0)
    forward = inside & case.kind(Category.ACTIVATIONS, Purpose.FORWARD)
    masks, wide = (rows & forward for rows in _dropout_masks(case, inside & case.facts.has(Tag.DROPOUT)))
    wider = wide | (forward & case.has_function(_CASTS_INPUT))
    copies = wider & case.live
    if not case.is_material(case.total(copies)):
        return None
    dropped = bool((wide & copies).any())
    why = "dropout's copy has four bytes for each byte of its mask" if dropped else "the branch casts its input"
    evidence = f"{int(copies.sum())} copies of adapter inputs are live: {why}"
    if masked := case.live_total(masks):
        evidence += f" (the masks are {size(masked)} more)"
    change = "" if _uses_autocast(case) else f"{words(case, 'bf16')} and "
    change += (
        "cast the adapters to 16 bits: for p in model.parameters(): if p.requires_grad: p.data = p.data.to("
        "torch.bfloat16) (SFTTrainer does it for 4-bit models)"
    )
    advice = [formula(case, change, wider, 0.5, adapter_dtype="bf16", autocast=True)]
    if dropped:
        plain = "lora_dropout=0 in LoraConfig: without dropout the adapters need no copies of their own"
        advice.append(formula(case, plain, wide | masks, dropout=0.0))
    found = finding(case, copies, evidence + ".", *advice)
    return replace(found, beside=f"{size(masked)} masks") if masked and dropped else found


def _uses_autocast(case: Case) -> bool:
    """Whether the forward pass ran under autocast: as the recorder saw it, or by the decorator that trainers use."""
    config = case.timeline.snapshot.memtrace.get("config")
    seen = isinstance(config, Mapping) and bool(config.get("autocast"))
    return seen or case.timeline.snapshot.stacks.called("amp/autocast_mode.py", "decorate_autocast")
