"""Truth labels of a recording: by identity, and by the operators of an instrumented repetition of the same run.

Input are two runs of one deterministic program. The *clean* run is recorded as a user would record it; the addresses of
parameters, constants, gradients and optimizer states were noted while it ran. The *stamped* run
(:mod:`tools.labelling.stamps`) knows for each allocation the operator, and what autograd saved. Both are aligned phase
by phase by their allocation sequences. None of memtrace's own attribution rules is used.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tools.labelling.alignment import Feature, align
from tools.labelling.operators import HELD, LOAD_TEMP, SAVED, WORKSPACE_BYTES, operator_labels
from tools.labelling.rows import Allocation, Phases, Run, Trace, allocations, site

WEIGHT, CONSTANT, BUFFER = "base_weights/weight", "base_weights/quant_const", "base_weights/buffer"
FROM_IDENTITY = {
    ("base_weights", "quantized"): WEIGHT,
    ("base_weights", "unquantized"): WEIGHT,
    ("base_weights", "quant_state"): CONSTANT,
    ("base_weights", "buffer"): BUFFER,
    ("lora", "params"): "lora/param",
    ("lora", "grads"): "lora/grad",
    ("lora", "optimizer_state"): "lora/optstate",
}


_EXTRA = 8  # allocations of a first pass that later ones don't repeat: a workspace, tables
_TURNS = 4  # models that take turns

# What the rules call the recorder's phases.
_PHASES = {"between": "zero_grad", "evaluation": "eval"}


def run_of(snapshot: dict[str, Any]) -> Run:
    """What the truth needs of a snapshot that memtrace itself recorded."""
    extra = snapshot["memtrace"]
    trace = snapshot["device_traces"][extra["device"]]
    last_us = trace[-1].get("time_us", 0) if trace else 0
    seen: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for row in extra["labels"]:
        if not row.get("outside"):
            at = last_us if row["until_time_us"] is None else row["until_time_us"]
            seen[at].append((row["address"], FROM_IDENTITY[row["category"], row["subcategory"]]))
    marks = [(row["time_us"], _PHASES.get(row["name"], row["name"])) for row in extra["phases"]]
    return Run(trace, marks, sorted(seen.items()))


def identity_labels(run: Run, rows: Sequence[Allocation]) -> tuple[dict[int, str], dict[int, str]]:
    """(label by alloc event, label by address of memory older than the trace).

    What was a parameter when it was noted stays one, even if a trainer replaces it later.
    """
    by_address: dict[int, list[Allocation]] = defaultdict(list)
    for row in rows:
        by_address[row.address].append(row)
    labels: dict[int, str] = {}
    before: dict[int, str] = {}
    begun_us = run.trace[0].get("time_us", 0) if run.trace else 0
    for time_us, named in run.identity:
        for address, label in named:
            at = [r for r in by_address.get(address, ()) if r.time_us <= time_us]
            if not at:
                if time_us < begun_us:  # an optimizer may have put others there since
                    before[address] = label
                before.setdefault(address, label)
                continue
            row = at[-1]
            if row.free < 0 or run.trace[row.free].get("time_us", 0) >= time_us:
                labels.setdefault(row.event, label)
    return labels, before


def truth(clean: Run, stamped: Run, log: dict[str, Any], vocab: int, before_bytes: dict[int, int]) -> dict[str, Any]:
    """The labels file. ``before_bytes``: requested bytes by address of what was live before the clean trace began."""
    rows, other = allocations(clean.trace), allocations(stamped.trace)
    labels, older = identity_labels(clean, rows)
    by_identity, _ = identity_labels(stamped, other)
    purposes = operator_labels(stamped, other, log, vocab)
    optional = {event for event, purpose in purposes.items() if purpose.optional}
    ours, theirs = Phases(clean.marks), Phases(stamped.marks)
    left, right = _by_phase(rows, ours), _by_phase(other, theirs)
    label_of: dict[int, str | None] = {row.event: labels.get(row.event) for row in rows}
    for phase, members in left.items():
        if ours.name(phase) == "load":
            label_of.update({row.event: label_of[row.event] or LOAD_TEMP for row in members})
            continue
        twins = right.get(phase, [])
        pairs = align(
            _features(clean.trace, members, labels, ()), _features(stamped.trace, twins, by_identity, optional)
        )
        for i, j in pairs:
            row, twin = members[i], twins[j]
            # What is known by identity there must be known by it here too: else the pair is shifted.
            if label_of[row.event] is None and twin.event not in by_identity:
                label_of[row.event] = purposes[twin.event].label
        if ours.name(phase) == "adapters":  # what is not known by identity was made on the way to what is
            label_of.update({row.event: label_of[row.event] or LOAD_TEMP for row in members})
    _settle_held(clean, rows, label_of)
    _settle_interrupted(clean, left, label_of)
    return _summary(clean.trace, rows, label_of, older, before_bytes)


def _by_phase(rows: Sequence[Allocation], phases: Phases) -> dict[int, list[Allocation]]:
    found: dict[int, list[Allocation]] = defaultdict(list)
    for row in rows:
        found[phases.index(row.time_us)].append(row)
    return found


def _features(
    trace: Trace, rows: Sequence[Allocation], identity: Mapping[int, str], optional: Container[int]
) -> list[Feature]:
    """What the alignment sees of one phase's allocations."""
    starts = [row.event for row in rows]
    last = starts[-1] if starts else -1
    found = []
    for position, row in enumerate(rows):
        lifetime = -1 if row.free < 0 or row.free > last else _before(starts, row.free, position) - position
        name = identity.get(row.event, "")
        found.append(Feature(row.size, site(trace[row.event]), lifetime, name, row.event in optional))
    return found


def _features_of_order(trace: Trace, rows: Sequence[Allocation]) -> list[Feature]:
    """For two passes of one run: whole stacks tell call sites apart, and sizes nothing, since the batch may differ."""
    found = _features(trace, rows, {}, ())
    stacks = [str(trace[row.event].get("frames")) for row in rows]
    return [replace(feature, size=0, site=stack) for feature, stack in zip(found, stacks, strict=True)]


def _before(starts: Sequence[int], event: int, low: int) -> int:
    """Position of the first start after an event."""
    high = len(starts)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if starts[middle] <= event else (low, middle)
    return low


def _settle_held(clean: Run, rows: Sequence[Allocation], label_of: dict[int, str | None]) -> None:
    """Whether memory outlives the forward pass is read off the clean run: instrumentation can lengthen a life."""
    phases = Phases(clean.marks)
    ends = phases.ends(clean.trace)
    for row in rows:
        index = phases.index(row.time_us)
        if phases.is_complete_forward(index):
            outlives = (row.free if row.free >= 0 else math.inf) >= ends[index]
            if label_of[row.event] in (HELD, "temporary/forward"):
                label_of[row.event] = HELD if outlives else "temporary/forward"
            elif label_of[row.event] == SAVED and not outlives:  # its graph was dropped again (``detach()``)
                label_of[row.event] = "temporary/forward"


def _settle_interrupted(clean: Run, by_phase: Mapping[int, list[Allocation]], label_of: dict[int, str | None]) -> None:
    """What a forward pass would have held had no error ended it is read off a pass that came to its end: of the latest
    few the one that it is most like, since models can take turns."""
    phases = Phases(clean.marks)
    whole: list[int] = []
    for index, name in enumerate(phases.names):
        if phases.is_complete_forward(index):
            whole.append(index)
        elif name == "forward" and whole:
            rows = by_phase.get(index, [])
            pairs: list[tuple[int, int]] = []
            twins: Sequence[Allocation] = []
            most = (0, 0)
            for pass_before in whole[: -_TURNS - 1 : -1]:
                others = by_phase.get(pass_before, [])[: len(rows) + _EXTRA]  # the one is a beginning of the other
                # From behind, so that of equally good partners the first is taken: the rest is yet to come.
                ours, theirs = (_features_of_order(clean.trace, part)[::-1] for part in (rows, others))
                found = align(ours, theirs)
                found = [(len(rows) - 1 - i, len(others) - 1 - j) for i, j in found]
                whole_stacks = sum(ours[~i].site == theirs[~j].site for i, j in found)  # tell models in turn apart
                lines = sum(site(clean.trace[rows[i].event]) == site(clean.trace[others[j].event]) for i, j in found)
                alike = whole_stacks, lines
                if alike > most and 2 * lines >= len(rows):
                    pairs, twins, most = found, others, alike
            last = rows[-1].event if rows else -1
            living = {row.event for row in rows if row.free < 0 or row.free > last}
            if not any(most):  # compiled anew, say: what would have become of it is not known
                label_of.update((event, None) for event in living if label_of[event] == "temporary/forward")
            for i, j in pairs:
                row, twin = rows[i], label_of[twins[j].event] or ""
                is_held = row.event in living and twin.startswith("activations/")
                is_dropped = twin == "temporary/forward" and label_of[row.event] == SAVED
                if (
                    label_of[row.event] is None
                    or is_dropped
                    or (label_of[row.event] == "temporary/forward" and is_held)
                ):
                    label_of[row.event] = twin or None


def _summary(
    trace: Trace,
    rows: Sequence[Allocation],
    label_of: dict[int, str | None],
    older: dict[int, str],
    before_bytes: dict[int, int],
) -> dict[str, Any]:
    for address, size in before_bytes.items():
        if size == WORKSPACE_BYTES:  # every other storage that old is known by identity
            older.setdefault(address, "runtime/cublas")
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
