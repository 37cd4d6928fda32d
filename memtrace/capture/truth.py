"""Truth labels of a recording: by identity, and by the operators of an instrumented repetition of the same run.

Input are two runs of one deterministic program. The *clean* run is recorded as a user would record it; the addresses of
parameters, constants, gradients and optimizer states were noted while it ran. The *stamped* run
(:mod:`memtrace.capture.stamps`) knows for each allocation the operator, and what autograd saved. Both are aligned phase by
phase by their allocation sequences. None of memtrace's own attribution rules is used.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Marks = Sequence[tuple[int, str]]
Trace = Sequence[dict[str, Any]]

WEIGHT, CONSTANT, BUFFER = "base_weights/weight", "base_weights/quant_const", "base_weights/buffer"
DEQUANT, LOAD_TEMP = "base_weights/dequant", "base_weights/load_temp"
FROM_IDENTITY = {
    ("base_weights", "quantized"): WEIGHT,
    ("base_weights", "unquantized"): WEIGHT,
    ("base_weights", "quant_state"): CONSTANT,
    ("base_weights", "buffer"): BUFFER,
    ("lora", "params"): "lora/param",
    ("lora", "grads"): "lora/grad",
    ("lora", "optimizer_state"): "lora/optstate",
}

_DEQUANT_OPS = ("dequantize_4bit", "dequantize_blockwise", "gemm_4bit", "gemv_4bit", "int8_mm_dequant")
_MATMULS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten._scaled_mm.", "aten.linear.", "aten._addmm_")
_LOSSES = ("aten._log_softmax.", "aten.nll_loss_forward.", "aten.nll_loss2d_forward.")
_LOSS_GRADS = ("aten._log_softmax_backward_data.", "aten.nll_loss_backward.", "aten.nll_loss2d_backward.")
_SOFTMAXES = ("aten._softmax.", "aten._safe_softmax.")


@dataclass(frozen=True, slots=True)
class Allocation:
    """One allocation of a trace; ``free`` is its ``free_completed`` event or -1."""

    event: int
    free: int
    address: int
    size: int
    time_us: int


@dataclass(frozen=True, slots=True)
class Run:
    """One recorded run. ``identity`` holds (time µs, [(address, truth label)]) in order of time."""

    trace: Trace
    marks: Marks
    identity: Sequence[tuple[int, Sequence[tuple[int, str]]]]


def allocations(trace: Trace) -> list[Allocation]:
    """Every allocation of one device's trace, in order."""
    open_at: dict[int, int] = {}
    rows: list[list[int]] = []
    for event, entry in enumerate(trace):
        action = entry["action"]
        if action == "alloc":
            open_at[entry["addr"]] = len(rows)
            rows.append([event, -1, entry["addr"], entry["size"], entry.get("time_us", 0)])
        elif action == "free_completed":
            row = open_at.pop(entry["addr"], None)
            if row is not None:
                rows[row][1] = event
    return [Allocation(*row) for row in rows]


class _Phases:
    """Phase of a time; ``index`` counts the marks, -1 before the first."""

    def __init__(self, marks: Marks) -> None:
        self.times = [time_us for time_us, _ in marks]
        self.names = [name for _, name in marks]

    def index(self, time_us: int) -> int:
        return bisect.bisect_right(self.times, time_us) - 1

    def name(self, index: int) -> str:
        return self.names[index] if index >= 0 else "load"


def identity_labels(run: Run, rows: Sequence[Allocation]) -> tuple[dict[int, str], dict[int, str]]:
    """(label by alloc event, label by address of memory older than the trace)."""
    by_address: dict[int, list[Allocation]] = defaultdict(list)
    for row in rows:
        by_address[row.address].append(row)
    labels: dict[int, str] = {}
    before: dict[int, str] = {}
    for time_us, named in run.identity:
        for address, label in named:
            at = [r for r in by_address.get(address, ()) if r.time_us <= time_us]
            if not at:
                if address not in by_address or not run.trace or time_us <= run.trace[0].get("time_us", 0):
                    before.setdefault(address, label)
                continue
            row = at[-1]
            if row.free < 0 or run.trace[row.free].get("time_us", 0) >= time_us:
                labels.setdefault(row.event, label)
    return labels, before


def operator_labels(run: Run, rows: Sequence[Allocation], log: dict[str, Any], vocab: int) -> dict[int, str | None]:
    """Label of each alloc event of the stamped run by its operator, and by what autograd saved.

    ``None`` marks sums of gradients by the autograd engine: they happen in place when nothing is instrumented.
    """
    phases = _Phases(run.marks)
    operators = log["operators"]
    numbers = [_number(run.trace[row.event]) for row in rows]
    saved = _saved_events(rows, numbers, log["saved"])
    ends = _recompute_ends(run.trace, log["recomputes"])
    phase_end = _phase_ends(run.trace, phases, len(run.marks))
    labels: dict[int, str | None] = {}
    for row, (number, inside) in zip(rows, numbers, strict=True):
        phase_index = phases.index(row.time_us)
        phase = phases.name(phase_index)
        operator = operators[number] if 0 <= number < len(operators) and inside else None
        if operator is not None and operator[0].startswith("aten.add.Tensor") and operator[3] and operator[5]:
            labels[row.event] = None
            continue
        label = _purpose(row, operator, phase, vocab)
        recomputing = operator is not None and operator[4]
        if label is None and row.event in saved and saved[row.event] == recomputing:
            label = "activations/recompute" if recomputing else "activations/saved"
        if label is None and recomputing:
            end = ends.get(_region(log["recomputes"], number), -1)
            held = end >= 0 and (row.free < 0 or row.free >= end)
            label = "activations/recompute" if held else "temporary/forward"
        if label is None and phase in ("forward", "eval"):
            end = phase_end[phase_index]
            complete = phase_index + 1 < len(run.marks)
            held = complete and (row.free < 0 or row.free >= end) and phase == "forward"
            label = "activations/held" if held else "temporary/forward"
        if label is None:
            known = {"backward": "temporary/backward", "optimizer": "temporary/optimizer"}
            label = LOAD_TEMP if phase in ("load", "adapters") else known.get(phase, "temporary/other")
        labels[row.event] = label
    return labels


def _number(entry: dict[str, Any]) -> tuple[int, bool]:
    text = entry.get("user_metadata") or "-1+"
    return int(text.rstrip("+")), not text.endswith("+")


def _purpose(row: Allocation, operator: Any, phase: str, vocab: int) -> str | None:
    """What the operator alone decides."""
    if operator is None or phase in ("load", "adapters"):
        return None
    name, outputs, _module, in_backward, _recompute, _engine, casts_packed = operator
    output = next((o for o in outputs if o[0] == row.address), None)
    if casts_packed and name.startswith("aten._to_copy"):
        return DEQUANT
    if any(part in name for part in _DEQUANT_OPS) and (output is None or "dequantize" in name):
        return DEQUANT
    if output is None and name.startswith(_MATMULS) and row.free < 0 and row.size >= 1 << 20:
        return "runtime/cublas"
    if name.startswith(_LOSSES):
        return "temporary/loss" if row.size > 512 else None
    if name.startswith(_LOSS_GRADS):
        return "temporary/loss_grad"
    if output is not None and output[2] and len(output[1]) >= 2 and output[1][-1] == vocab:
        return "temporary/loss_grad" if in_backward else "temporary/logits"
    if name.startswith(_SOFTMAXES) and output is not None and len(output[1]) == 4:
        return "temporary/attention_matrix"
    return None


def _saved_events(rows: Sequence[Allocation], numbers: Sequence[tuple[int, bool]], saved: Any) -> dict[int, bool]:
    """alloc event -> whether it was saved while recomputing, for every storage that autograd saved."""
    by_address: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    highest = -1
    for row, (number, _inside) in zip(rows, numbers, strict=True):
        highest = max(highest, number)  # allocations between operators carry an older or no number
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


def _region(recomputes: Sequence[Sequence[int]], number: int) -> int:
    """Innermost recomputation that holds an operator number, or -1."""
    best = -1
    for index in range(len(recomputes)):
        first, end = recomputes[index]
        if first <= number < end and (best < 0 or first >= recomputes[best][0]):
            best = index
    return best


def _recompute_ends(trace: Trace, recomputes: Sequence[Sequence[int]]) -> dict[int, int]:
    """First event that belongs to an operator after the recomputation, for each recomputation."""
    order = sorted(range(len(recomputes)), key=lambda index: recomputes[index][1])
    ends: dict[int, int] = {}
    position = 0
    for event, entry in enumerate(trace):
        number, _ = _number(entry)
        while position < len(order) and number >= recomputes[order[position]][1]:
            ends[order[position]] = event
            position += 1
    return ends


def _phase_ends(trace: Trace, phases: _Phases, count: int) -> list[int]:
    """First event after each phase."""
    times = [entry.get("time_us", 0) for entry in trace]
    return [
        bisect.bisect_left(times, phases.times[index + 1]) if index + 1 < count else len(trace) for index in range(count)
    ]


def align(left: Sequence[int], right: Sequence[int], window: int = 6, reach: int = 400) -> list[tuple[int, int]]:
    """Pairs of positions of two nearly equal sequences: the nearest shift after which ``window`` items agree wins."""
    pairs: list[tuple[int, int]] = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] == right[j]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
            continue
        shift = _shift(left, right, i, j, window, reach)
        if shift is None:
            i, j = i + 1, j + 1
        else:
            i, j = i + shift[0], j + shift[1]
    return pairs


def _shift(
    left: Sequence[int], right: Sequence[int], i: int, j: int, window: int, reach: int
) -> tuple[int, int] | None:
    for total in range(1, reach):
        for di in range(min(total, len(left) - i) + 1):
            dj = total - di
            if j + dj > len(right):
                continue
            a, b = left[i + di : i + di + window], right[j + dj : j + dj + window]
            short = min(len(a), len(b))
            if short and list(a[:short]) == list(b[:short]):
                return di, dj
    return None


def truth(clean: Run, stamped: Run, log: dict[str, Any], vocab: int, before_bytes: dict[int, int]) -> dict[str, Any]:
    """The labels file. ``before_bytes`` are requested bytes by address of what was live before the clean trace began."""
    rows, other = allocations(clean.trace), allocations(stamped.trace)
    labels, older = identity_labels(clean, rows)
    by_identity, _ = identity_labels(stamped, other)
    by_operator = operator_labels(stamped, other, log, vocab)
    for event, label in by_identity.items():
        by_operator[event] = label
    ours, theirs = _Phases(clean.marks), _Phases(stamped.marks)
    left: dict[int, list[Allocation]] = defaultdict(list)
    right: dict[int, list[Allocation]] = defaultdict(list)
    for row in rows:
        left[ours.index(row.time_us)].append(row)
    for row in other:
        if by_operator[row.event] is not None:
            right[theirs.index(row.time_us)].append(row)
    transferred: dict[int, str | None] = {}
    for phase in left:
        if ours.name(phase) in ("load", "adapters"):
            transferred.update({row.event: LOAD_TEMP for row in left[phase]})
            continue
        pairs = align([row.size for row in left[phase]], [row.size for row in right[phase]])
        for i, j in pairs:
            transferred[left[phase][i].event] = by_operator[right[phase][j].event]
    label_of: dict[int, str | None] = {}
    for row in rows:
        label = labels.get(row.event)
        if label is None:
            label = transferred.get(row.event)
            if label in FROM_IDENTITY.values() and label not in (DEQUANT,):
                label = None  # identity in the repetition without identity here: a shifted pair
        label_of[row.event] = label
    return _summary(clean.trace, rows, label_of, older, before_bytes)


def _summary(
    trace: Trace,
    rows: Sequence[Allocation],
    label_of: dict[int, str | None],
    older: dict[int, str],
    before_bytes: dict[int, int],
) -> dict[str, Any]:
    before: Counter[str] = Counter()
    for address, size in before_bytes.items():
        before[older.get(address, "unlabelled")] += size
    size_at = {row.event: row.size for row in rows}
    size_at.update({row.free: -row.size for row in rows if row.free >= 0})
    live = peak = peak_event = 0
    gone: Counter[str] = Counter()
    starts = {row.event for row in rows}
    for event, entry in enumerate(trace):
        if entry["action"] == "free_completed" and event not in size_at:
            live -= entry["size"]
        elif event in size_at:
            live += size_at[event]
        if event in starts and live > peak:
            peak, peak_event = live, event
    for event, entry in enumerate(trace[: peak_event + 1]):
        if entry["action"] == "free_completed" and event not in size_at:
            gone[older.get(entry["addr"], "unlabelled")] += entry["size"]
    breakdown: Counter[str] = Counter(before)
    breakdown.subtract(gone)
    for row in rows:
        if row.event <= peak_event and (row.free < 0 or row.free > peak_event):
            breakdown[label_of[row.event] or "unlabelled"] += row.size
    known = sum(row.size for row in rows if label_of[row.event] is not None)
    return {
        "event_index": [row.event for row in rows],
        "label": [label_of[row.event] for row in rows],
        "peak_event": peak_event,
        "peak_bytes": peak,
        "before_recording": dict(before),
        "peak_breakdown": {label: size for label, size in breakdown.items() if size},
        "labelled_share_of_bytes": known / max(1, sum(row.size for row in rows)),
    }
