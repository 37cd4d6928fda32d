"""What steps leave behind: a little of each, or the whole graph of one that is over."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memtrace.attribution.categories import Category, Purpose
from memtrace.attribution.origin import is_own_code
from memtrace.attribution.sites import frame_label
from memtrace.explain.advice import formula
from memtrace.explain.case import Case
from memtrace.explain.detectors.detector import Seen, detector, live_ones
from memtrace.snapshot.model import I8, Bool
from memtrace.units import MIB
from memtrace.units import format_bytes as size

_LEAST_ROUNDS = 3
_CONSISTENT_SHARE = 0.8
_SMALLEST_STEP_BYTES = MIB // 4
_UNDER_SHARE = 0.95  # of the bytes, made under one line: it is named
_WHOLE_SHARE = 0.5  # of what a pass saved: a graph is kept whole, a module's state is a small part of it
_METRICS = ("torchmetrics/", "torcheval/", "/metrics/", "/metrics.py", "/metric.py")


class Leftovers(NamedTuple):
    """Rows that outlive their round, and per round (a step, or a pass where steps can't be told) their bytes."""

    rows: Bool
    per_round: I8
    is_step: bool


def leftovers(case: Case) -> Leftovers | None:
    """What each finished round made and was still alive when a whole further round had ended (or at the event)."""
    passes = [p for p in case.passes if p.start <= case.at.event]
    steps = sorted({p.step for p in passes if p.step >= 0})
    by_step = len(steps) > _LEAST_ROUNDS
    # A round begins with each pass or, where steps are known, with the first pass of each step.
    begins = [p.start for i, p in enumerate(passes) if not by_step or i == 0 or p.step != passes[i - 1].step]
    # The last round is not finished, and the first ones make what stays by design (optimizer states, workspaces).
    if len(begins) < _LEAST_ROUNDS + 2:
        return None
    born, died = case.facts.born, case.facts.died
    starts = np.array(begins, dtype=np.int64)
    round_of = np.searchsorted(starts, born, side="right") - 1
    kept_until = np.append(starts, [case.at.event + 1] * 2)[np.minimum(round_of + 2, len(starts))]
    is_state = case.kind(Category.LORA, Category.BASE_WEIGHTS, Category.RUNTIME)
    rows = (round_of >= 1) & (round_of < len(starts) - 1) & (died >= kept_until) & ~is_state & case.live
    per_round = np.zeros(len(starts), dtype=np.int64)
    np.add.at(per_round, round_of[rows], case.table.block_bytes[rows])
    return Leftovers(rows, per_round[1:-1], by_step)


@detector("Every step leaves memory behind", least=0)
def growth_across_steps(case: Case) -> Seen | None:
    """Most steps leave about the same amount behind, none of it weights, gradients or optimizer states."""
    found = leftovers(case)
    if found is None:
        return None
    rows, unit = found.rows, "step" if found.is_step else "pass"
    grew = found.per_round[found.per_round >= _SMALLEST_STEP_BYTES]
    if len(grew) < max(_LEAST_ROUNDS, _CONSISTENT_SHARE * len(found.per_round)):
        return None
    per_step, total = int(np.median(grew)), int(found.per_round.sum())
    if not case.is_material(total, 0.01):
        return None
    makers, holder = _makers(case, rows)
    evidence = (
        f"{len(grew)} of {len(found.per_round)} {unit}s left about {size(per_step)} behind ({size(total)} so far): "
        f"{makers}"
    )
    if holder:
        evidence += f"; all under {holder}"
    change = "detach and move to the CPU what is collected each step, or delete it"
    if (rows & (case.kind(Category.ACTIVATIONS) | case.kind(Purpose.LOSS))).any():
        evidence += ". Tensors of the loss and saved activations are among it: a loss is kept with its graph"
        change = "keep numbers, not tensors: losses.append(loss.item()), total += loss.detach()"
    title = f"Every {unit} leaves {size(per_step)} behind"
    return Seen(rows, evidence + ".", (formula(change, rows),), size_bytes=per_step, title=title, per_step=True)


def _makers(case: Case, rows: Bool) -> tuple[str, str]:
    """(the two largest call sites of the rows with their bytes, the innermost line of the user's own code that nearly
    all of them were made under; "" if none)."""
    sites: dict[str, int] = {}
    lines: dict[str, int] = {}
    depth: dict[str, int] = {}
    whole = 0
    python = case.attribution.facts.stacks.python
    for stack, total in case.by_stack(rows).items():
        label = case.attribution.sites.label(stack) or "no stack recorded"
        sites[label] = sites.get(label, 0) + total
        if stack < 0:
            continue
        whole += total
        frames = case.timeline.snapshot.stacks.frames
        own = [frames[i] for i in python.frame_ids(stack).tolist() if is_own_code(python.frames[i].filename)]
        for place, frame in enumerate(own):
            label = frame_label(frame)
            lines[label] = lines.get(label, 0) + total
            depth[label] = max(depth.get(label, 0), place)
    largest = sorted(sites.items(), key=lambda item: -item[1])[:2]
    common = [label for label, total in lines.items() if total >= _UNDER_SHARE * whole]
    told = ", ".join(f"{size(total)} made at {label}" for label, total in largest)
    return told, min(common, key=lambda label: depth[label], default="")


@detector("The graph of an earlier pass is still held", least=0.05)
def retained_graph(case: Case) -> Seen | None:
    """Saved tensors of earlier passes that are alive in this one: a loss or an output still holds their graph."""
    earlier = case.passes[: case.passes.index(case.here)] if case.here is not None else ()
    # What the first pass leaves may be a module's state, and what every pass leaves is growth.
    if case.here is None or len(earlier) < 2 or growth_across_steps(case) is not None:
        return None
    saved = case.kind(Purpose.SAVED, Purpose.CHECKPOINT_INPUT) & (case.facts.born < case.here.start)
    saved &= (case.facts.born >= earlier[-1].start) & (case.table.stack >= 0)
    old = saved & case.live
    if case.total(old) < _WHOLE_SHARE * case.total(saved):
        return None
    evidence = f"{live_ones(old, 'that earlier forward passes saved for their backward pass')} in this pass."
    change = (
        "drop what holds it before the next forward pass: del loss, outputs; loss.item() for logs; no "
        "backward(retain_graph=True)"
    )
    return Seen(old, evidence, (formula(change, old),))


@detector("Metrics keep tensors of earlier passes on the GPU")
def metrics_on_gpu(case: Case) -> Seen | None:
    """What the code of metrics made and keeps from one pass to the next: predictions, targets, lists of states."""
    since = case.here.start if case.here is not None else int(case.facts.phases.start[max(case.span, 0)])
    made = np.logical_or.reduce([case.made_in(part) for part in _METRICS])
    kept = made & case.live & (case.facts.born >= 0) & (case.facts.born < since)
    change = (
        "keep metrics off the GPU: compute_on_cpu=True (torchmetrics), or update them with preds.detach().cpu(); "
        "reset() after each epoch"
    )
    return Seen(kept, f"{live_ones(kept, 'that metrics made in earlier passes')}.", (formula(change, kept),))
