"""32-bit copies where 16 bits would do: embeddings and head, and the adapters' branch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memtrace.attribution.categories import Category, Purpose
from memtrace.attribution.frame_tags import Tag
from memtrace.explain.advice import formula, uses_autocast, words
from memtrace.explain.answer import Finding
from memtrace.explain.case import Case
from memtrace.units import MIB
from memtrace.units import format_bytes as size

Bool = NDArray[np.bool_]
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
        gone = order[low:high]
        result[row] = bool((sizes[gone] * 2 == sizes[row]).any())
    return result


def fp32_upcast_head(case: Case) -> Finding | None:
    """Embeddings and head stored in 32 bits by ``prepare_model_for_kbit_training``, or by any cast in place."""
    if not case.attribution.trains_adapters:
        return None
    weights = case.kind(Purpose.UNQUANTIZED) & case.live
    by_frame = weights & case.has_function(_UPCAST)
    upcast = by_frame if by_frame.any() else weights & _doubled(case)
    why = "their stack is prepare_model_for_kbit_training, which casts them"
    if not by_frame.any():
        why = "each replaced a tensor of half its size"
    dims = case.dims
    if not upcast.any() and dims is not None and dims.element_bytes == 4 and dims.head_bytes is not None:
        upcast = weights & (case.size == dims.head_bytes)
        why = "logits, head and hidden states have sizes that fit 4 bytes an element only"
    total = case.total(upcast)
    if not case.is_material(total):
        return None
    large = upcast & (case.size >= MIB)
    biggest = size(int(case.size[upcast].max()))
    return Finding(
        "fp32_upcast_head",
        "Embeddings and head in 32 bits",
        total,
        f"{int(upcast.sum())} stored tensors ({int(large.sum())} of them matrices, the largest {biggest}): {why}. "
        "Hidden states and logits follow in 32 bits unless autocast is on.",
        (
            formula(
                case,
                "leave out prepare_model_for_kbit_training: model.gradient_checkpointing_enable("
                "gradient_checkpointing_kwargs={'use_reentrant': False}); model.enable_input_require_grads(); "
                "get_peft_model freezes the base by itself. Or cast back after it: "
                "model.get_input_embeddings().to(torch.bfloat16), the same for get_output_embeddings()",
                upcast,
                0.5,
                prepare_kbit=False,
            ),
        ),
        case.frame_of(upcast),
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
        if sizes[small] * 4 == sizes[large]:
            masks[small], wide[large] = True, True
        elif sizes[small] * 2 == sizes[large]:
            masks[small] = True
    return masks, wide


def fp32_lora_branch(case: Case) -> Finding | None:
    """The adapters' own copies of their inputs, kept in 32 bits for the backward pass."""
    facts = case.facts
    inside = facts.has(Tag.LORA) & (facts.born >= 0)
    forward = inside & (case.kind(Category.ACTIVATIONS) | case.kind(Purpose.FORWARD))
    dropout = inside & facts.has(Tag.DROPOUT)
    masks, wide = _dropout_masks(case, dropout)
    cast = forward & case.has_function(_CASTS_INPUT)
    copies = (wide | cast) & forward & case.live
    total = case.total(copies)
    if not case.is_material(total):
        return None
    masked = case.total(masks & forward & case.live)
    dropped = bool((wide & copies).any())
    why = "dropout's copy has four bytes for each byte of its mask" if dropped else "the branch casts its input"
    evidence = f"{int(copies.sum())} copies of adapter inputs are live: {why}"
    if masked:
        evidence += f" (the masks are {size(masked)} more)"
    change = "" if uses_autocast(case) else f"{words(case, 'bf16')} and "
    change += (
        "cast the adapters to 16 bits: for p in model.parameters(): if p.requires_grad: p.data = p.data.to("
        "torch.bfloat16) (SFTTrainer does it for 4-bit models)"
    )
    advice = [formula(case, change, (wide | cast) & forward, 0.5, adapter_dtype="bf16", autocast=True)]
    if dropped:
        gone = (wide | masks) & forward
        plain = "lora_dropout=0 in LoraConfig: without dropout the adapters need no copies of their own"
        advice.append(formula(case, plain, gone, dropout=0.0))
    return Finding(
        "fp32_lora_branch",
        "Adapters work in 32 bits and keep 32-bit inputs",
        total,
        evidence + ".",
        tuple(advice),
        case.frame_of(copies),
    )
