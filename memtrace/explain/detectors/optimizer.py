"""What training keeps beside its parameters: optimizer states, and second copies of gradients and parameters."""

from __future__ import annotations

from memtrace.attribution.categories import Purpose
from memtrace.attribution.frame_tags import Tag
from memtrace.attribution.phases import Phase
from memtrace.explain.advice import formula
from memtrace.explain.case import Case
from memtrace.explain.detectors.detector import Seen, detector, live_ones
from memtrace.units import format_bytes as size

_FULL_SHARE = 0.9  # of the parameters: states in 8 bits are half as large or less


@detector("Optimizer states in full precision")
def optimizer_full_precision(case: Case) -> Seen | None:
    """States as large as two (or one) full copies of what is trained."""
    rows = case.kind(Purpose.OPTIMIZER_STATE)
    states, params = case.live_total(rows), case.live_total(case.kind(Purpose.PARAMS))
    if not params or states < _FULL_SHARE * params:
        return None
    # 8-bit AdamW keeps two bytes an element and two fp32 scales for each 256; parameters have four bytes an element
    # (or two, where nothing shows four: then the saving is half as sure, and the smaller one is said).
    element = 4 if case.dims is not None and case.dims.element_bytes == 4 else 2
    small = round(params / element * (2 + 8 / 256))
    evidence = f"states are {states / params:.1f} times as large as the {size(params)} of trained parameters."
    changes = [formula("optim_8bit", rows, 1 - small / states, optimizer="adamw_8bit")]
    if not case.setting.has_dtensors:
        changes.append(formula("optim_paged", rows, optimizer="paged_adamw_8bit"))
    return Seen(rows & case.live, evidence, tuple(changes))


@detector("Optimizer states appear with the first step", least=0.01)
def optimizer_on_first_step(case: Case) -> Seen | None:
    """Memory ran out because states were being made, or had been made since the same point of the first pass."""
    if not case.is_oom:
        return None
    states = case.kind(Purpose.OPTIMIZER_STATE) & case.live
    if case.phase is Phase.OPTIMIZER and case.moment.step == 0:
        made, what = case.total(states), "of states had been made when the first optimizer step ran out of memory."
    elif case.moment.step == 1 and case.points:
        made = case.grown_since(case.points[-1]).get(Purpose.OPTIMIZER_STATE, 0)
        what = "of states appeared with the first optimizer step, after the first pass had fitted."
    else:
        return None
    change = formula("optim_paged", states, optimizer="paged_adamw_8bit")
    return Seen(states, f"{size(made)} {what}", (change,), size_bytes=made)


@detector("Gradients are kept twice: in buckets for communication, and by themselves")
def gradient_buckets(case: Case) -> Seen | None:
    """Buckets of DistributedDataParallel beside the gradients themselves."""
    buckets = case.made_in("torch/nn/parallel/distributed.py", "_ddp_init_helper", "_pre_forward") & case.live
    grads = case.kind(Purpose.GRADS) & case.live & ~buckets
    if not grads.any():
        return None
    beside = size(case.total(grads))
    evidence = f"{buckets.sum()} buckets of DistributedDataParallel stand beside {beside} of gradients."
    return Seen(buckets, evidence, (formula("DistributedDataParallel(…, gradient_as_bucket_view=True)", grads),))


@detector("DeepSpeed's ZeRO shares nothing on one GPU, and keeps flat copies")
def zero_on_one_gpu(case: Case) -> Seen | None:
    """Flat buffers of DeepSpeed's ZeRO in a run of one GPU, where there is nothing to share."""
    stacks = case.attribution.facts.stacks
    if case.timeline.snapshot.memtrace.get("world_size", 1) != 1 or stacks.has(Tag.COMM | Tag.GATHER).any():
        return None
    largest_state, largest_flat = (
        int(case.attribution.facts.size[case.kind(purpose) & case.live].max(initial=0))
        for purpose in (Purpose.OPTIMIZER_STATE, Purpose.PARAMS)
    )
    if 0 < largest_state <= largest_flat:  # in 32 bits the whole would be twice the 16-bit weights: these are shards
        return None
    flat = case.made_in("packages/deepspeed/runtime/zero/") & ~case.made_in("torch/optim/") & case.live
    evidence = f"{live_ones(flat, 'made by deepspeed/runtime/zero')}; one process, no communication."
    change = '"zero_optimization": {"stage": 0} in the DeepSpeed config, or no DeepSpeed'
    return Seen(flat, evidence, (formula(change, flat),))
