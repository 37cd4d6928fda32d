"""The frozen model: stored in 16 or 32 bits, copied while it is loaded, brought to the GPU again and again."""

from __future__ import annotations

import numpy as np

from memtrace.attribution.categories import Category, Purpose
from memtrace.attribution.frame_tags import Tag
from memtrace.attribution.phases import Phase
from memtrace.attribution.stack_facts import Kind
from memtrace.explain.advice import formula
from memtrace.explain.answer import Advice, Basis, Finding
from memtrace.explain.case import Case
from memtrace.explain.detectors.detector import detector, finding
from memtrace.explain.dims import layer_count
from memtrace.explain.sizes import published_model
from memtrace.snapshot.model import Bool
from memtrace.units import format_bytes as size

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


def _layer_matrices(case: Case) -> Bool:
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


@detector("The base model is not quantised")
def base_not_quantized(case: Case) -> Finding | None:
    """Base weights in 16 or 32 bits: all of them, or part of the layers' matrices."""
    if case.is_oom and case.phase in (Phase.LOAD, Phase.UNKNOWN) and case.event_tags & Tag.LOAD:
        return _while_loading(case)
    matrices = _layer_matrices(case)
    quantized = case.live_total(case.kind(Purpose.QUANTIZED))
    if not case.is_material(case.total(matrices), 0.1) or not case.attribution.trains_adapters:
        return None  # what is trained in full can't be quantised
    if not quantized and (case.facts.stacks.tags & int(Tag.QUANT_MODULE | Tag.DEQUANT)).any():
        return None  # quantised modules run, so the weights are quantised and only can't be told apart here
    if quantized and experts_not_quantized(case) is not None:
        return None
    part = "No weight is quantised" if not quantized else f"Only {size(quantized)} of the weights are quantised"
    bits = 4 if case.dims is not None and case.dims.element_bytes == 4 else 2
    return finding(
        case, matrices, f"{part}; {int(matrices.sum())} matrices of the layers are stored in full.",
        formula(case, _SETTING, matrices, 1 - NF4_BYTES / bits, quant="nf4-dq"),
        title="The base model is quantised only in part" if quantized else "",
    )  # fmt: skip


@detector("The experts are not quantised")
def experts_not_quantized(case: Case) -> Finding | None:
    """Experts stored as one tensor a layer, which quantisation of linear layers leaves as they are."""
    quantized = case.kind(Purpose.QUANTIZED) & case.live
    if not quantized.any() or not case.attribution.trains_adapters:
        return None
    experts = _layer_matrices(case) & (case.size > _EXPERTS * 4 * int(case.size[quantized].max()))
    if not case.is_material(case.total(experts), 0.1):
        return None
    return finding(
        case, experts,
        f"{int(experts.sum())} stored tensors are more than {_EXPERTS} times as large as the largest quantised layer "
        "would be in 16 bits: all experts of a layer in one tensor, which 4-bit linear layers leave out.",
        formula(case, "a checkpoint whose experts are quantised, or a loader that splits them into linear layers",
                experts, 1 - NF4_BYTES / 2),
    )  # fmt: skip


def _while_loading(case: Case) -> Finding | None:
    refusal = case.refusal
    assert refusal is not None
    if case.facts.has(Tag.QUANTIZE).any() or case.event_tags & Tag.QUANTIZE:
        return None
    stored = case.live_total(case.kind(Category.BASE_WEIGHTS))
    asked = min(refusal.asked_bytes, int(case.timeline.trace.size[case.at.event]))
    name, bits = published_model(asked - _ROUNDING_BYTES, asked + _ROUNDING_BYTES) or ("", 16)
    if bits == 4:
        return None
    evidence = (
        f"the load failed at {size(asked)} with {size(stored)} of weights stored, and nothing was quantised before"
    )
    if name:
        evidence += f"; {asked:,} bytes are the weights of {name} in {bits} bits (a possibility)"
    elif not stored:
        evidence += (
            "; whether this request already counts on 4 bits is not recorded: if load_in_4bit is set, the model itself "
            "is too large"
        )
    total, stays = stored + asked, NF4_BYTES / (bits // 8)
    terms = f"{size(total)} of weights × (1 - {NF4_BYTES:.3f} / {bits // 8} bytes)"
    change = f"{_SETTING}; at most, since embeddings and head stay in 16 bits"
    advice = (Advice(change, round(total * (1 - stays)), Basis.FORMULA, terms),)
    frame = case.attribution.sites.label(int(case.timeline.trace.stack[case.at.event]))
    return Finding("", "The base model is loaded without quantisation", total, evidence + ".", advice, frame)


@detector("Copies that exist only while the model is loaded")
def load_time_copies(case: Case) -> Finding | None:
    """Copies that exist only while the model is loaded or converted, alive at an event of the load."""
    if case.phase not in (Phase.LOAD, Phase.UNKNOWN):
        return None
    copies = case.kind(Purpose.LOADING)
    if case.is_oom:  # what the load would have freed is not known after a refusal: 16-bit sources of quantised weights
        copies = copies | _sources(case)
    here = copies & case.live
    if not case.is_material(case.total(here), 0.05):
        return None
    return finding(
        case, here, f"{int(here.sum())} tensors that loading makes and frees are alive at this event.",
        formula(case, "load straight to the device in the final form: device_map={'': 0}, dtype=torch.bfloat16, "
                "quantization_config at from_pretrained rather than converting afterwards", copies),
    )  # fmt: skip


def _sources(case: Case) -> Bool:
    """Unquantised matrices of four or two times the size of quantised ones made in this load: still to be packed."""
    packed = np.unique(case.size[case.kind(Purpose.QUANTIZED) & (case.facts.born >= 0)])
    weights = case.kind(Purpose.UNQUANTIZED) & (case.facts.born >= 0)
    return weights & np.isin(case.size, np.concatenate([packed * 4, packed * 2])) & (case.size >= _MATRIX_BYTES)


@detector("Weights are brought from the CPU or disk again in every pass", is_context=True)
def offload_reloads(case: Case) -> Finding | None:
    """Weights that accelerate's hooks bring to the GPU again in each pass, for a model that is kept elsewhere."""
    brought = case.made_in("accelerate/", "set_module_tensor_to_device")
    brought &= case.made_in("accelerate/hooks.py", "pre_forward")
    if not brought.any():
        return None
    sizes, counts = np.unique(case.size[brought], return_counts=True)
    here = case.live_total(brought)
    evidence = (
        f"{int(brought.sum())} tensors, {size(case.total(brought))} in all, were copied to the GPU by accelerate's "
        f"hooks ({int(counts.max())} times the same size of {size(int(sizes[counts.argmax()]))}); "
        f"{size(here)} of them are live."
    )
    return Finding("", "", here or None, evidence, frame=case.frame_of(brought))
