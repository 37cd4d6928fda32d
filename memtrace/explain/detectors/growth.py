"""Memory that every step leaves behind."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memtrace.attribution.categories import Category, Purpose
from memtrace.attribution.sites import frame_label
from memtrace.explain.advice import formula
from memtrace.explain.answer import Advice, Finding
from memtrace.explain.case import Case
from memtrace.units import MIB
from memtrace.units import format_bytes as size

Bool = NDArray[np.bool_]
I8 = NDArray[np.int64]
_LEAST_ROUNDS = 3
_CONSISTENT_SHARE = 0.8
_SMALLEST_STEP_BYTES = MIB // 4
_LIBRARY = ("site-packages/", "dist-packages/", "/torch/", "lib/python", "<frozen", "<string>")


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
    is_state = case.kind(Category.LORA) | case.kind(Category.BASE_WEIGHTS) | case.kind(Category.RUNTIME)
    rows = (round_of >= 1) & (round_of < len(starts) - 1) & (died >= kept_until) & ~is_state & case.live
    per_round = np.zeros(len(starts), dtype=np.int64)
    np.add.at(per_round, round_of[rows], case.table.block_bytes[rows])
    return Leftovers(rows, per_round[1:-1], by_step)


def growth_across_steps(case: Case) -> Finding | None:
    """Most steps leave about the same amount behind, none of it weights, gradients or optimizer states."""
    found = leftovers(case)
    if found is None:
        return None
    grew = found.per_round[found.per_round >= _SMALLEST_STEP_BYTES]
    if len(grew) < max(_LEAST_ROUNDS, _CONSISTENT_SHARE * len(found.per_round)):
        return None
    per_step = int(np.median(grew))
    total = int(found.per_round.sum())
    if not case.is_material(total, 0.01):
        return None
    rows, unit = found.rows, "step" if found.is_step else "pass"
    makers = _makers(case, rows)
    holder = _own_line(case, rows)
    keeps_graph = bool((rows & (case.kind(Category.ACTIVATIONS) | case.kind(Purpose.LOSS))).any())
    evidence = (
        f"{len(grew)} of {len(found.per_round)} {unit}s left about {size(per_step)} behind ({size(total)} so far)"
    )
    evidence += f": {makers}"
    if holder:
        evidence += f"; all under {holder}"
    if keeps_graph:
        evidence += ". Tensors of the loss and saved activations are among it: a loss is kept with its graph"
    advice: list[Advice] = []
    change = "detach and move to the CPU what is collected each step, or delete it"
    if keeps_graph:
        change = "keep numbers, not tensors: losses.append(loss.item()), total += loss.detach()"
    advice.append(formula(case, change, rows))
    return Finding(
        "growth_across_steps",
        f"Every {unit} leaves {size(per_step)} behind",
        per_step,
        evidence + ".",
        tuple(advice),
        case.frame_of(rows),
        per_step=True,
    )  # fmt: skip


def _makers(case: Case, rows: Bool) -> str:
    """The two largest call sites of the rows with their bytes."""
    index = np.flatnonzero(rows)
    sums: dict[str, int] = {}
    for row in index.tolist():
        label = case.attribution.sites.label(int(case.table.stack[row])) or "no stack recorded"
        sums[label] = sums.get(label, 0) + int(case.size[row])
    ranked = sorted(sums.items(), key=lambda item: -item[1])[:2]
    return ", ".join(f"{size(total)} made at {label}" for label, total in ranked)


def _own_line(case: Case, rows: Bool) -> str:
    """The innermost line of the user's own code that all (nearly all) of the rows were made under; "" if none."""
    table = case.timeline.snapshot.stacks
    sums: dict[str, int] = {}
    order: dict[str, int] = {}
    for stack, total in _by_stack(case, rows).items():
        frames = [f for f in table.stack(stack) if not any(part in f.filename.replace("\\", "/") for part in _LIBRARY)]
        for depth, frame in enumerate(frames):
            label = frame_label(frame)
            sums[label] = sums.get(label, 0) + total
            order[label] = max(order.get(label, 0), depth)
    whole = sum(_by_stack(case, rows).values())
    common = [label for label, total in sums.items() if total >= 0.95 * whole]
    return min(common, key=lambda label: order[label]) if common else ""


def _by_stack(case: Case, rows: Bool) -> dict[int, int]:
    result: dict[int, int] = {}
    for row in np.flatnonzero(rows).tolist():
        stack = int(case.table.stack[row])
        if stack >= 0:
            result[stack] = result.get(stack, 0) + int(case.size[row])
    return result
