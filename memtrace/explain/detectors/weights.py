"""The frozen model: stored in 16 or 32 bits, and copies that exist only while it is loaded."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memtrace.attribution.categories import Category, Purpose
from memtrace.attribution.frame_tags import Tag
from memtrace.attribution.phases import Phase
from memtrace.attribution.stack_facts import Kind
from memtrace.explain.advice import formula
from memtrace.explain.answer import Advice, Basis, Finding
from memtrace.explain.case import Case
from memtrace.explain.layers import layer_count
from memtrace.explain.published import published_model
from memtrace.units import format_bytes as size

Bool = NDArray[np.bool_]
NF4_BYTES = 0.5 + 1 / 64 + 1 / 4096
"""Bytes an element in NF4 with double quantisation: packed weight, 8-bit scales, scales of the scales."""
_MATRIX_BYTES = 256 << 10
_REPEATS = 6
_EXPERTS = 2
_ROUNDING_BYTES = 4096
_SETTING = (
    "from_pretrained(…, quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', "
    "bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16))"
)


def layer_matrices(case: Case) -> Bool:
    """Live unquantised matrices that occur in every layer: a size that repeats."""
    rows = case.kind(Purpose.UNQUANTIZED) & case.live & (case.size >= _MATRIX_BYTES)
    # Without a stack from loading, a block from before the trace may be anything, unless it outlived a backward pass.
    unseen = ~case.facts.is_kind(Kind.LOAD)
    if Phase.BACKWARD in case.facts.phases.phase[:-1]:
        unseen &= ~case.facts.is_kind(Kind.NONE)
    rows &= ~unseen
    sizes, counts = np.unique(case.size[rows], return_counts=True)
    layers = layer_count(case.analysis)
    least = _REPEATS if layers is None else max(_REPEATS, layers // 2)  # two models have four embeddings
    return rows & np.isin(case.size, sizes[counts >= least])


def base_not_quantized(case: Case) -> Finding | None:
    """Base weights in 16 or 32 bits: all of them, or part of the layers' matrices."""
    if case.is_oom and case.phase in (Phase.LOAD, Phase.UNKNOWN) and case.event_tags & Tag.LOAD:
        return _while_loading(case)
    matrices = layer_matrices(case)
    total = case.total(matrices)
    quantized = case.live_total(case.kind(Purpose.QUANTIZED))
    if not case.is_material(total, 0.1) or not case.attribution.trains_adapters:
        return None  # what is trained in full can't be quantised
    if not quantized and (case.facts.stacks.tags & int(Tag.QUANT_MODULE | Tag.DEQUANT)).any():
        return None  # quantised modules run, so the weights are quantised and only can't be told apart here
    if quantized and experts_not_quantized(case) is not None:
        return None
    part = "No weight is quantised" if not quantized else f"Only {size(quantized)} of the weights are quantised"
    bits = 4 if case.dims is not None and case.dims.element_bytes == 4 else 2
    return Finding(
        "base_not_quantized",
        "The base model is not quantised" if not quantized else "The base model is quantised only in part",
        total,
        f"{part}; {int(matrices.sum())} matrices of the layers are stored in full.",
        (formula(case, _SETTING, matrices, 1 - NF4_BYTES / bits, quant="nf4-dq"),),
        case.frame_of(matrices),
    )


def experts_not_quantized(case: Case) -> Finding | None:
    """Experts stored as one tensor a layer, which quantisation of linear layers leaves as they are."""
    quantized = case.kind(Purpose.QUANTIZED) & case.live
    if not quantized.any() or not case.attribution.trains_adapters:
        return None
    matrices = layer_matrices(case)
    experts = matrices & (case.size > _EXPERTS * 4 * int(case.size[quantized].max()))
    total = case.total(experts)
    if not case.is_material(total, 0.1):
        return None
    return Finding(
        "experts_not_quantized",
        "The experts are not quantised",
        total,
        f"{int(experts.sum())} stored tensors are more than {_EXPERTS} times as large as the largest quantised layer "
        "would be in 16 bits: all experts of a layer in one tensor, which 4-bit linear layers leave out.",
        (formula(case, "a checkpoint whose experts are quantised, or a loader that splits them into linear layers",
                 experts, 1 - NF4_BYTES / 2),),
        case.frame_of(experts),
    )  # fmt: skip


def _while_loading(case: Case) -> Finding | None:
    made = case.facts.has(Tag.QUANTIZE)
    if made.any() or case.event_tags & Tag.QUANTIZE:
        return None
    refusal = case.refusal
    assert refusal is not None
    stored = case.live_total(case.kind(Category.BASE_WEIGHTS))
    asked = min(refusal.asked_bytes, int(case.timeline.trace.size[case.at.event]))
    known = published_model(asked - _ROUNDING_BYTES, asked + _ROUNDING_BYTES)
    if known is not None and known[1] == 4:
        return None
    total = stored + asked
    evidence = (
        f"the load failed at {size(asked)} with {size(stored)} of weights stored, and nothing was quantised before"
    )
    if known is not None:
        evidence += f"; {asked:,} bytes are the weights of {known[0]} in {known[1]} bits (a possibility)"
    elif not stored:
        evidence += (
            "; whether this request already counts on 4 bits is not recorded: if load_in_4bit is set, the model itself "
            "is too large"
        )
    bits = known[1] // 8 if known is not None else 2
    return Finding(
        "base_not_quantized",
        "The base model is loaded without quantisation",
        total,
        evidence + ".",
        (
            Advice(f"{_SETTING}; at most, since embeddings and head stay in 16 bits",
                   round(total * (1 - NF4_BYTES / bits)), Basis.FORMULA,
                   f"{size(total)} of weights × (1 - {NF4_BYTES:.3f} / {bits} bytes)"),
        ),
        case.attribution.sites.label(int(case.timeline.trace.stack[case.at.event])),
    )  # fmt: skip


def load_time_copies(case: Case) -> Finding | None:
    """Copies that exist only while the model is loaded or converted, alive at an event of the load."""
    if case.phase not in (Phase.LOAD, Phase.UNKNOWN):
        return None
    copies = case.kind(Purpose.LOADING)
    if case.is_oom:  # what the load would have freed is not known after a refusal: 16-bit sources of quantised weights
        copies = copies | _sources(case)
    total = case.live_total(copies)
    if not case.is_material(total, 0.05):
        return None
    return Finding(
        "load_time_copies",
        "Copies that exist only while the model is loaded",
        total,
        f"{int((copies & case.live).sum())} tensors that loading makes and frees are alive at this event.",
        (
            formula(case, "load straight to the device in the final form: device_map={'': 0}, dtype=torch.bfloat16, "
                    "quantization_config at from_pretrained rather than converting afterwards", copies),
        ),
        case.frame_of(copies & case.live),
    )  # fmt: skip


def _sources(case: Case) -> Bool:
    """Unquantised matrices of four or two times the size of quantised ones made in this load: still to be packed."""
    packed = np.unique(case.size[case.kind(Purpose.QUANTIZED) & (case.facts.born >= 0)])
    weights = case.kind(Purpose.UNQUANTIZED) & (case.facts.born >= 0)
    return weights & np.isin(case.size, np.concatenate([packed * 4, packed * 2])) & (case.size >= _MATRIX_BYTES)
