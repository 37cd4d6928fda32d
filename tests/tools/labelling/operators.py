"""What the allocations of a stamped run are, from the operators that asked for them and from what autograd saved."""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tools.labelling.rows import Allocation, Phases, Run, Stamp, Trace, stamp

DEQUANT, LOAD_TEMP = "base_weights/dequant", "base_weights/load_temp"
SAVED, HELD, RECOMPUTE = "activations/saved", "activations/held", "activations/recompute"
MATRIX = "temporary/attention_matrix"

_DEQUANT_OPS = ("dequantize_4bit", "dequantize_blockwise", "gemm_4bit", "gemv_4bit", "int8_mm_dequant")
_MATMULS = (
    *("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten._scaled_mm.", "aten.linear.", "aten._addmm_"),
    *("aten._grouped_mm.", "aten.mv.", "aten.addmv.", "aten.dot."),
)
WORKSPACE_BYTES = 32 << 20  # cuBLAS's on Hopper: a thread makes one and keeps it
_LOSSES = ("aten._log_softmax.", "aten.nll_loss_forward.", "aten.nll_loss2d_forward.")
_LOSS_GRADS = ("aten._log_softmax_backward_data.", "aten.nll_loss_backward.", "aten.nll_loss2d_backward.")
_SAFE_SOFTMAX = "aten._safe_softmax."
_SOFTMAXES = ("aten._softmax.", _SAFE_SOFTMAX)


@dataclass(frozen=True, slots=True)
class Operator:
    """A row of the stamps' log. ``call`` numbers the innermost module's call that ran it."""

    name: str
    outputs: Sequence[tuple[int, tuple[int, ...], bool]]
    module: str
    in_backward: bool
    in_recompute: bool
    from_engine: bool
    casts_packed: bool
    call: int

    def output_at(self, address: int) -> tuple[int, tuple[int, ...], bool] | None:
        """The result that lies at an address: (address, shape, dtype is floating)."""
        return next((output for output in self.outputs if output[0] == address), None)


@dataclass(frozen=True, slots=True)
class Purpose:
    """A label; ``optional`` where the allocation may exist only because the run is instrumented."""

    label: str
    optional: bool


def operator_labels(run: Run, rows: Sequence[Allocation], log: dict[str, Any], vocab: int) -> dict[int, Purpose]:
    """Purpose of each alloc event of the stamped run.

    Optional are sums of gradients by the autograd engine, and the mask's addition to attention scores: both happen in
    place unless a dispatch mode is active.
    """
    phases = Phases(run.marks)
    operators = [Operator(*row) if row else None for row in log["operators"]]
    scores = _scores(operators)
    stamps = [stamp(run.trace[row.event]) for row in rows]
    saved = _saved_events(rows, stamps, log["saved"])
    recomputes = Recomputes(run.trace, log["recomputes"])
    phase_end = phases.ends(run.trace)
    purposes: dict[int, Purpose] = {}
    for row, mark in zip(rows, stamps, strict=True):
        phase_index = phases.index(row.time_us)
        phase = phases.name(phase_index)
        operator = operators[mark.number] if 0 <= mark.number < len(operators) and mark.inside else None
        recomputing = operator is not None and operator.in_recompute
        label = _by_operator(row, operator, phase, vocab)
        if not operators and row.free < 0 and row.size == WORKSPACE_BYTES:  # compiled: nothing else is known of it
            label = "runtime/cublas"
        if label is None and recomputing:
            held = recomputes.holds(row, mark.number, saved.get(row.event, False))
            label = RECOMPUTE if held else "temporary/forward"
        if label is None and saved.get(row.event) is False and phase not in ("load", "adapters"):
            label = SAVED
        if label is None and phase in ("forward", "eval"):
            held = phases.is_complete_forward(phase_index) and (row.free < 0 or row.free >= phase_end[phase_index])
            label = HELD if held else "temporary/forward"
        if label is None:
            known = {"backward": "temporary/backward", "optimizer": "temporary/optimizer"}
            label = LOAD_TEMP if phase in ("load", "adapters") else known.get(phase, "temporary/other")
        optional = False
        if operator is not None:
            is_score = _is_score(row, operator, scores)
            if is_score and (label.startswith("activations/") or operator.name.startswith(_SOFTMAXES)):
                label = MATRIX
            summed = operator.in_backward and operator.from_engine
            masked = is_score and scores[operator.call].safe
            optional = operator.name.startswith("aten.add.Tensor") and (summed or masked)
        purposes[row.event] = Purpose(label, optional)
    return purposes


@dataclass(frozen=True, slots=True)
class _Scores:
    """Attention scores of one module call: query length, key length, elements of the whole matrix; by which softmax."""

    lengths: tuple[int, int]
    elements: int
    safe: bool


def _scores(operators: Sequence[Operator | None]) -> dict[int, _Scores]:
    """Shape of the attention scores by module call: the four-dimensional softmax that it ran."""
    found: dict[int, _Scores] = {}
    for operator in operators:
        if operator is not None and operator.call and operator.name.startswith(_SOFTMAXES):
            for _address, shape, floating in operator.outputs:
                if floating and len(shape) == 4:
                    lengths = (shape[-2], shape[-1])
                    found[operator.call] = _Scores(lengths, math.prod(shape), operator.name.startswith(_SAFE_SOFTMAX))
    return found


def _is_score(row: Allocation, operator: Operator, scores: dict[int, _Scores]) -> bool:
    """Whether a forward allocation is the attention scores at any stage, from product to dropout."""
    if operator.call not in scores or (operator.in_backward and not operator.in_recompute):
        return False
    known, output = scores[operator.call], operator.output_at(row.address)
    if output is None or not output[2]:
        return False
    return tuple(output[1][-2:]) == known.lengths and math.prod(output[1]) == known.elements


def _by_operator(row: Allocation, operator: Operator | None, phase: str, vocab: int) -> str | None:
    """What the operator alone decides."""
    if operator is None:
        return None
    name, output = operator.name, operator.output_at(row.address)
    is_kept = (row.free < 0 and row.size >= 1 << 20) or row.size == WORKSPACE_BYTES
    if output is None and name.startswith(_MATMULS) and is_kept:
        return "runtime/cublas"
    if phase in ("load", "adapters"):
        return None
    if operator.casts_packed and name.startswith("aten._to_copy"):
        return DEQUANT
    if any(part in name for part in _DEQUANT_OPS) and (output is None or "dequantize" in name):
        return DEQUANT
    if name.startswith(_LOSSES):
        return "temporary/loss" if row.size > 512 else None
    if name.startswith(_LOSS_GRADS):
        return "temporary/loss_grad"
    if output is not None and output[2] and len(output[1]) >= 2 and output[1][-1] == vocab:
        return "temporary/loss_grad" if operator.in_backward else "temporary/logits"
    return None


def _saved_events(rows: Sequence[Allocation], stamps: Sequence[Stamp], saved: Any) -> dict[int, bool]:
    """alloc event -> whether it was saved while recomputing, for every storage that autograd saved."""
    by_address: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    highest = -1
    for row, mark in zip(rows, stamps, strict=True):
        highest = max(highest, mark.number)  # allocations between operators carry an older or no number
        known = by_address[row.address]
        known[0].append(highest)
        known[1].append(row.event)
    found: dict[int, bool] = {}
    for address, before, recomputing in saved:
        if address in by_address:
            at, events = by_address[address]
            position = bisect.bisect_left(at, before) - 1
            if position >= 0:
                found.setdefault(events[position], bool(recomputing))
    return found


class Recomputes:
    """Where the recomputations of checkpoints stop: before the stopping exception unwinds the recomputed function."""

    def __init__(self, trace: Trace, regions: Sequence[Sequence[int]]) -> None:
        """``regions`` are (first, one past the last) operator number, in the order in which they ended."""
        self.order = sorted(range(len(regions)), key=lambda index: regions[index][0])
        self.regions = regions
        self.firsts = [regions[index][0] for index in self.order]
        self.ends = [-1] * len(regions)  # first event after the region
        for event, entry in enumerate(trace):
            mark = stamp(entry)
            for index in self._holding(mark.number):
                if mark.ended <= index:
                    self.ends[index] = event + 1

    def _holding(self, number: int) -> list[int]:
        """Regions that hold an operator number, innermost first."""
        found = []
        position = bisect.bisect_right(self.firsts, number) - 1
        for step in range(position, max(-1, position - 4), -1):  # checkpoints nest, if at all, a few levels deep
            index = self.order[step]
            if number < self.regions[index][1]:
                found.append(index)
        return found

    def holds(self, row: Allocation, number: int, saved: bool) -> bool:
        """Whether an allocation of a recomputation is still alive when it stops.

        One that was cut short by an out-of-memory error never stops: of it, ``saved`` decides.
        """
        regions = self._holding(number)
        if not regions:
            return saved
        return row.free < 0 or row.free >= self.ends[regions[0]]
