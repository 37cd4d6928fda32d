"""The stored model: in 16 or 32 bits where 4 or 16 would do, copied while it is loaded, there twice, or brought to the
GPU again and again."""

from __future__ import annotations

from collections import Counter

import numpy as np

from memtrace.arrays import among, distinct
from memtrace.attribution.categories import Category, Purpose
from memtrace.attribution.frame_tags import Tag
from memtrace.attribution.phases import Phase
from memtrace.attribution.stack_facts import Kind
from memtrace.explain.advice import formula, words
from memtrace.explain.answer import Advice, Basis
from memtrace.explain.case import Case
from memtrace.explain.detectors.detector import Seen, detector, live_ones
from memtrace.explain.dims import layer_count
from memtrace.explain.sizes import published_model
from memtrace.snapshot.model import Bool
from memtrace.snapshot.stacks import Frame
from memtrace.units import MIB
from memtrace.units import format_bytes as size

NF4_BYTES = 0.5 + 1 / 64 + 1 / 4096
"""Bytes an element in NF4 with double quantisation: packed weight, 8-bit scales, scales of the scales."""
_MATRIX_BYTES = 256 << 10
_REPEATS = 6
_EXPERTS = 2
_ROUNDING_BYTES = 4096


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
    return rows & among(case.size, sizes[counts >= least])


@detector("The base model is not quantised", least=0)
def base_not_quantized(case: Case) -> Seen | None:
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
    evidence = f"{part}; {matrices.sum()} matrices of the layers are stored in full."
    title = "The base model is quantised only in part" if quantized else ""
    change = formula("four_bits", matrices, 1 - NF4_BYTES / bits, quant="nf4-dq")
    return Seen(matrices, evidence, (change,), title=title)


@detector("The experts are not quantised", least=0.1)
def experts_not_quantized(case: Case) -> Seen | None:
    """Experts stored as one tensor a layer, which quantisation of linear layers leaves as they are."""
    quantized = case.kind(Purpose.QUANTIZED) & case.live
    if not quantized.any() or not case.attribution.trains_adapters:
        return None
    experts = _layer_matrices(case) & (case.size > _EXPERTS * 4 * int(case.size[quantized].max()))
    evidence = (
        f"{experts.sum()} stored tensors are more than {_EXPERTS} times as large as the largest quantised layer would "
        "be in 16 bits: all experts of a layer in one tensor, which 4-bit linear layers leave out."
    )
    change = "a checkpoint whose experts are quantised, or a loader that splits them into linear layers"
    return Seen(experts, evidence, (formula(change, experts, 1 - NF4_BYTES / 2),))


def _while_loading(case: Case) -> Seen | None:
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
    change = f"{words(case, 'four_bits')}; at most, since embeddings and head stay in 16 bits"
    advice = (Advice(change, round(total * (1 - stays)), Basis.FORMULA, terms),)
    frame = case.attribution.sites.label(int(case.timeline.trace.stack[case.at.event]))
    title = "The base model is loaded without quantisation"
    return Seen(None, evidence + ".", advice, size_bytes=total, title=title, frame=frame)


@detector("Copies that exist only while the model is loaded", least=0.05)
def load_time_copies(case: Case) -> Seen | None:
    """Copies that exist only while the model is loaded or converted, alive at an event of the load."""
    if case.phase not in (Phase.LOAD, Phase.UNKNOWN):
        return None
    copies = case.kind(Purpose.LOADING)
    if case.is_oom:  # what the load would have freed is not known after a refusal: 16-bit sources of quantised weights
        copies = copies | _sources(case)
    here = copies & case.live
    change = (
        "load straight to the device in the final form: device_map={'': 0}, dtype=torch.bfloat16, quantization_config "
        "at from_pretrained rather than converting afterwards"
    )
    evidence = f"{live_ones(here, 'that loading makes and frees')} at this event."
    return Seen(here, evidence, (formula(change, copies),))


def _sources(case: Case) -> Bool:
    """Unquantised matrices of four or two times the size of quantised ones made in this load: still to be packed."""
    packed = distinct(case.size[case.kind(Purpose.QUANTIZED) & (case.facts.born >= 0)])
    weights = case.kind(Purpose.UNQUANTIZED) & (case.facts.born >= 0)
    return weights & among(case.size, np.concatenate([packed * 4, packed * 2])) & (case.size >= _MATRIX_BYTES)


@detector("Weights are brought from the CPU or disk again in every pass", is_context=True)
def offload_reloads(case: Case) -> Seen | None:
    """Weights that accelerate's hooks bring to the GPU again in each pass, for a model that is kept elsewhere."""
    brought = case.made_in("accelerate/", "set_module_tensor_to_device")
    brought &= case.made_in("accelerate/hooks.py", "pre_forward")
    if not brought.any():
        return None
    sizes, counts = np.unique(case.size[brought], return_counts=True)
    here = case.live_total(brought)
    evidence = (
        f"{brought.sum()} tensors, {size(case.total(brought))} in all, were copied to the GPU by accelerate's "
        f"hooks ({int(counts.max())} times the same size of {size(int(sizes[counts.argmax()]))}); "
        f"{size(here)} of them are live."
    )
    return Seen(brought, evidence, size_bytes=here)


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
def fp32_upcast_head(case: Case) -> Seen | None:
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
    matrices, largest = int((upcast & (case.size >= MIB)).sum()), size(int(case.size[upcast].max(initial=0)))
    change = (
        "leave out prepare_model_for_kbit_training: model.gradient_checkpointing_enable("
        "gradient_checkpointing_kwargs={'use_reentrant': False}); model.enable_input_require_grads(); "
        "get_peft_model freezes the base by itself. Or cast back after it: "
        "model.get_input_embeddings().to(torch.bfloat16), the same for get_output_embeddings()"
    )
    evidence = (
        f"{upcast.sum()} stored tensors ({matrices} of them matrices, the largest {largest}): {why}. Hidden states and "
        "logits follow in 32 bits unless autocast is on."
    )
    return Seen(upcast, evidence, (formula(change, upcast, 0.5, prepare_kbit=False),))


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
def fp32_lora_branch(case: Case) -> Seen | None:
    """The adapters' own copies of their inputs, kept in 32 bits for the backward pass."""
    inside = case.facts.has(Tag.LORA) & (case.facts.born >= 0)
    forward = inside & case.kind(Category.ACTIVATIONS, Purpose.FORWARD)
    masks, wide = (rows & forward for rows in _dropout_masks(case, inside & case.facts.has(Tag.DROPOUT)))
    wider = wide | (forward & case.has_function(_CASTS_INPUT))
    copies = wider & case.live
    dropped = bool((wide & copies).any())
    why = "dropout's copy has four bytes for each byte of its mask" if dropped else "the branch casts its input"
    evidence = f"{int(copies.sum())} copies of adapter inputs are live: {why}"
    if masked := case.live_total(masks):
        evidence += f" (the masks are {size(masked)} more)"
    change = "" if case.timeline.snapshot.uses_autocast else f"{words(case, 'bf16')} and "
    change += (
        "cast the adapters to 16 bits: for p in model.parameters(): if p.requires_grad: p.data = p.data.to("
        "torch.bfloat16) (SFTTrainer does it for 4-bit models)"
    )
    changes = [formula(change, wider, 0.5, adapter_dtype="bf16", autocast=True)]
    if dropped:
        plain = "lora_dropout=0 in LoraConfig: without dropout the adapters need no copies of their own"
        changes.append(formula(plain, wide | masks, dropout=0.0))
    beside = f"{size(masked)} masks" if masked and dropped else ""
    return Seen(copies, evidence + ".", tuple(changes), beside=beside)


_LOADERS = frozenset({"from_pretrained", "from_config", "load_checkpoint_and_dispatch", "deepcopy", "load_state_dict"})
_COPIERS = frozenset({"deepcopy", "create_reference_model"})
_COPIED_BYTES = 64 << 10
_ALIKE_SHARE = 0.9

Root = tuple[Frame, ...]


def _calls(case: Case, rows: Bool) -> dict[Root, list[int]]:
    """Rows grouped by the call that loaded them: the frames from the program's root down to the loading function."""
    groups: dict[Root, list[int]] = {}
    for stack in distinct(case.table.stack[rows]).tolist():
        root = case.timeline.snapshot.stacks.stack(stack)[::-1]
        at = next((i for i, frame in enumerate(root) if frame.name in _LOADERS), None)
        if at is not None:
            groups.setdefault(root[: at + 1], []).extend(np.flatnonzero(rows & (case.table.stack == stack)).tolist())
    return groups


def _alike(case: Case, one: list[int], other: list[int]) -> bool:
    """Whether two loads made (nearly) the same multiset of sizes."""
    first, second = Counter(case.size[one].tolist()), Counter(case.size[other].tolist())
    common = sum(count * bytes_ for bytes_, count in (first & second).items())
    larger = max(int(case.size[one].sum()), int(case.size[other].sum()))
    return common >= _ALIKE_SHARE * larger


def _second_call(case: Case, weights: Bool) -> Bool | None:
    """Rows that belong to the later of two calls that loaded the same weights, whatever else that call did."""
    groups = sorted(_calls(case, weights).items(), key=lambda item: (int(case.facts.born[item[1]].min()), min(item[1])))
    for i, (early, rows) in enumerate(groups):
        for late, others in groups[i + 1 :]:
            depth = next((d for d, (a, b) in enumerate(zip(early, late, strict=False)) if a != b), None)
            if depth is not None and _alike(case, rows, others):
                return _under(case, late[: depth + 1])
    return None


def _under(case: Case, root: Root) -> Bool:
    """Rows whose stack begins, from the program's root, with these frames."""
    stacks = case.timeline.snapshot.stacks
    return case.with_stack(lambda stack: stacks.stack(stack)[::-1][: len(root)] == root)


def _second_half(case: Case, weights: Bool) -> Bool | None:
    """Rows of the second half, where the whole sequence of sizes is some sequence twice over (loads from one line).

    The sequence must contain tensors that occur once in each half (embeddings, final norm): layers alone repeat anyway.
    """
    rows = np.flatnonzero(weights)
    half = len(rows) // 2
    if len(rows) < 8 or len(rows) % 2 or not np.array_equal(case.size[rows[:half]], case.size[rows[half:]]):
        return None
    counts = np.unique(case.size[rows[:half]], return_counts=True)[1]
    if int(counts.min()) > 2 or int(counts.max()) < 4:
        return None
    result = np.zeros(len(weights), dtype=np.bool_)
    result[rows[half:]] = True
    return result


@detector("A second copy of the base model", least=0.05)
def reference_model_copy(case: Case) -> Seen | None:
    """Two loads, or a load and a deep copy, that stored the same weights, both alive at the event."""
    base = case.kind(Purpose.QUANTIZED, Purpose.UNQUANTIZED, Purpose.QUANT_STATE, Purpose.BUFFER) & case.live
    matrices = base & (case.size >= _COPIED_BYTES)
    copied, how = base & case.has_function(_COPIERS), "a deep copy of the model made them"
    if not case.is_material(case.total(copied), 0.05):
        later, how = _second_call(case, matrices), "a second call loaded weights of the same sizes"
        if later is None:
            later = _second_half(case, matrices & (case.facts.born >= 0))
            how = "the same sequence of weights was loaded twice"
        if later is None:
            return None
        copied = base & later
    if not matrices.any():
        return None
    change = (
        "DPOTrainer(model, ref_model=None, peft_config=…): the reference is the base model with adapters "
        "disabled (with model.disable_adapter(): in a loop of your own); or precompute_ref_log_probs=True: the "
        "reference is not needed while training"
    )
    first = base & ~copied
    if not case.attribution.trains_adapters:  # an average or a reference of weights that are trained themselves
        first |= case.kind(Purpose.PARAMS) & case.live
        change = (
            "keep it on the CPU: AveragedModel(model, device='cpu') for an average of the weights; for a reference, "
            "precompute_ref_log_probs=True in DPOConfig: it is not needed while training"
        )
    evidence = f"{how}: {size(case.total(copied))} beside the first copy's {size(case.total(first))}."
    return Seen(copied, evidence, (formula(change, copied),))
