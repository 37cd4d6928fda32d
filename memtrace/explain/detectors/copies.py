"""Second copies that libraries keep or bring: gradient buckets, ZeRO on a single GPU, weights reloaded from the CPU,
graphs of passes that are over."""

from __future__ import annotations

import numpy as np

from memtrace.attribution.categories import Purpose
from memtrace.explain.advice import formula
from memtrace.explain.answer import Finding
from memtrace.explain.case import Case
from memtrace.explain.detectors.growth import growth_across_steps
from memtrace.units import format_bytes as size

_WHOLE_SHARE = 0.5  # of what a pass saved: a graph is kept whole, a module's state is a small part of it


def gradient_buckets(case: Case) -> Finding | None:
    """Buckets of DistributedDataParallel beside the gradients themselves."""
    ddp = "torch/nn/parallel/distributed.py"
    buckets = (case.made_in(ddp, "_ddp_init_helper") | case.made_in(ddp, "_pre_forward")) & case.live
    grads = case.kind(Purpose.GRADS) & case.live & ~buckets
    total = case.total(buckets)
    if not case.is_material(total) or not grads.any():
        return None
    return Finding(
        "gradient_buckets",
        "Gradients are kept twice: in buckets for communication, and by themselves",
        total,
        f"{int(buckets.sum())} buckets of DistributedDataParallel stand beside {size(case.total(grads))} of gradients.",
        (formula(case, "DistributedDataParallel(…, gradient_as_bucket_view=True)", grads),),
        case.frame_of(buckets),
    )


def zero_on_one_gpu(case: Case) -> Finding | None:
    """Flat buffers of DeepSpeed's ZeRO in a run of one GPU, where there is nothing to share."""
    if case.timeline.snapshot.memtrace.get("world_size", 1) != 1 or case.kind(Purpose.COMMUNICATION).any():
        return None
    flat = case.made_in("deepspeed/runtime/zero/") & case.live & ~case.kind(Purpose.OPTIMIZER_STATE)
    total = case.total(flat)
    if not case.is_material(total):
        return None
    return Finding(
        "zero_on_one_gpu",
        "DeepSpeed's ZeRO shares nothing on one GPU, and keeps flat copies",
        total,
        f"{int(flat.sum())} tensors made by deepspeed/runtime/zero are live; one process, no communication.",
        (formula(case, '"zero_optimization": {"stage": 0} in the DeepSpeed config, or no DeepSpeed', flat),),
        case.frame_of(flat),
    )


def offload_reloads(case: Case) -> Finding | None:
    """Weights that accelerate's hooks bring to the GPU again in each pass, for a model that is kept elsewhere."""
    brought = case.made_in("accelerate/", "set_module_tensor_to_device") & case.made_in(
        "accelerate/hooks.py", "pre_forward"
    )
    if not brought.any():
        return None
    sizes, counts = np.unique(case.size[brought], return_counts=True)
    total = case.total(brought)
    here = brought & case.live
    return Finding(
        "offload_reloads",
        "Weights are brought from the CPU or disk again in every pass",
        case.total(here) or None,
        f"{int(brought.sum())} tensors, {size(total)} in all, were copied to the GPU by accelerate's hooks "
        f"({int(counts.max())} times the same size of {size(int(sizes[counts.argmax()]))}); "
        f"{size(case.total(here))} of them are live.",
        (),
        case.frame_of(brought),
    )


def retained_graph(case: Case) -> Finding | None:
    """Saved tensors of earlier passes that are alive in this one: a loss or an output still holds their graph."""
    earlier = case.passes[: case.passes.index(case.here)] if case.here is not None else ()
    # What the first pass leaves may be a module's state, and what every pass leaves is growth.
    if case.here is None or len(earlier) < 2 or growth_across_steps(case) is not None:
        return None
    saved = case.kind(Purpose.SAVED, Purpose.CHECKPOINT_INPUT) & (case.facts.born < case.here.start)
    saved &= (case.facts.born >= earlier[-1].start) & (case.table.stack >= 0)
    old = saved & case.live
    total = case.total(old)
    if not case.is_material(total, 0.05) or total < _WHOLE_SHARE * case.total(saved):
        return None
    return Finding(
        "retained_graph",
        "The graph of an earlier pass is still held",
        total,
        f"{int(old.sum())} tensors that earlier forward passes saved for their backward pass are live in this pass.",
        (formula(case, "drop what holds it before the next forward pass: del loss, outputs; loss.item() for logs; no "
                 "backward(retain_graph=True)", old),),
        case.frame_of(old),
    )  # fmt: skip
