"""A second copy of the base weights: a reference model loaded beside the one that is trained."""

from __future__ import annotations

from collections import Counter

import numpy as np

from memtrace.attribution.categories import Purpose
from memtrace.explain.advice import formula
from memtrace.explain.answer import Finding
from memtrace.explain.case import Case
from memtrace.explain.detectors.detector import detector, finding
from memtrace.snapshot.model import Bool
from memtrace.snapshot.stacks import Frame
from memtrace.units import format_bytes as size

_LOADERS = frozenset({"from_pretrained", "from_config", "load_checkpoint_and_dispatch", "deepcopy", "load_state_dict"})
_COPIERS = frozenset({"deepcopy", "create_reference_model"})
_MATRIX_BYTES = 64 << 10
_ALIKE_SHARE = 0.9

Root = tuple[Frame, ...]


def _calls(case: Case, rows: Bool) -> dict[Root, list[int]]:
    """Rows grouped by the call that loaded them: the frames from the program's root down to the loading function."""
    groups: dict[Root, list[int]] = {}
    for stack in np.unique(case.table.stack[rows]).tolist():
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


@detector("A second copy of the base model")
def reference_model_copy(case: Case) -> Finding | None:
    """Two loads, or a load and a deep copy, that stored the same weights, both alive at the event."""
    base = case.kind(Purpose.QUANTIZED, Purpose.UNQUANTIZED, Purpose.QUANT_STATE, Purpose.BUFFER) & case.live
    matrices = base & (case.size >= _MATRIX_BYTES)
    copied, how = base & case.has_function(_COPIERS), "a deep copy of the model made them"
    if not case.is_material(case.total(copied), 0.05):
        later, how = _second_call(case, matrices), "a second call loaded weights of the same sizes"
        if later is None:
            later = _second_half(case, matrices & (case.facts.born >= 0))
            how = "the same sequence of weights was loaded twice"
        if later is None:
            return None
        copied = base & later
    total = case.total(copied)
    if not matrices.any() or not case.is_material(total, 0.05):
        return None
    change = (
        "DPOTrainer(model, ref_model=None, peft_config=…): the reference is the base model with adapters "
        "disabled (with model.disable_adapter(): in a loop of your own); or precompute_ref_log_probs=True: the "
        "reference is not needed while training"
    )
    evidence = f"{how}: {size(total)} beside the first copy's {size(case.total(base & ~copied))}."
    return finding(case, copied, evidence, formula(case, change, copied))
