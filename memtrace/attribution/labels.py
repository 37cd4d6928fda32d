"""Labels that memtrace's own recorder stored by identity (this parameter, that gradient): they win over every rule.

A label names memory by address and holds from ``from_time_us`` to ``until_time_us`` (null: open), since addresses are
reused. It fits the allocation that held the address then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memtrace.attribution.categories import Evidence, Purpose
from memtrace.attribution.rules import Rule
from memtrace.history.timeline import NEVER, Timeline

Bool = NDArray[np.bool_]
I8 = NDArray[np.int64]


def label_rules(timeline: Timeline, trains: bool) -> list[tuple[Rule, Bool]]:
    """One rule and its rows for each purpose among the recorded labels; [] in other files.

    What requires a gradient and never gets one is not trained: without training, parameters are plain weights.
    """
    found: dict[Purpose, Bool] = {}
    for _, purpose, rows in labelled_rows(timeline):
        if purpose is Purpose.PARAMS and not trains:
            purpose = Purpose.UNQUANTIZED
        found.setdefault(purpose, np.zeros(len(timeline.allocations), dtype=np.bool_))[rows] = True
    return [(label_rule(purpose), mask) for purpose, mask in found.items()]


def labelled_rows(timeline: Timeline) -> Iterator[tuple[Mapping[str, Any], Purpose, I8]]:
    """Each recorded label that fits, with its purpose and the allocations it fits."""
    table, labels = timeline.allocations, timeline.snapshot.labels
    if not (labels and len(table)):  # sorting takes long
        return
    order = np.argsort(table.address, kind="stable")
    address = table.address[order]
    for label in labels:
        parsed = _parse(label)
        if parsed is None:
            continue
        purpose, wanted, first_us, last_us = parsed
        low, high = np.searchsorted(address, [wanted, wanted + 1]).tolist()
        rows = order[low:high]
        if not len(rows):  # a view into an allocation: take the one that starts last before it
            rows = _holders(timeline, order, address, wanted)
        rows = rows[_overlaps(timeline, rows, first_us, last_us)]
        if len(rows):
            yield label, purpose, rows


def label_rule(purpose: Purpose) -> Rule:
    """The rule that stands for a label."""
    return Rule(f"label-{purpose.subcategory}", purpose, Evidence.LABEL, lambda s: s.persistent, _WHY)


_WHY = "the recorder found this tensor among the model's parameters, gradients or optimizer states"


def _parse(label: Mapping[str, Any]) -> tuple[Purpose, int, int | None, int | None] | None:
    address, name = label.get("address"), f"{label.get('category')}/{label.get('subcategory')}"
    if not isinstance(address, int) or not 0 <= address < 1 << 62 or name not in list(Purpose):
        return None
    first, last = label.get("from_time_us"), label.get("until_time_us")
    return (
        Purpose(name),
        address,
        first if isinstance(first, int) else None,
        last if isinstance(last, int) else None,
    )


def _holders(timeline: Timeline, order: I8, address: I8, wanted: int) -> I8:
    """Rows whose block contains the address, among those that start nearest below it."""
    at = int(np.searchsorted(address, wanted)) - 1
    if at < 0:
        return order[:0]
    low = int(np.searchsorted(address, address[at]))
    rows = order[low : at + 1]
    table = timeline.allocations
    return rows[table.address[rows] + table.block_bytes[rows] > wanted]


def _overlaps(timeline: Timeline, rows: I8, first_us: int | None, last_us: int | None) -> Bool:
    """Whether each row was alive at some time in [first, last]; without times, at the end of the recording."""
    table, times = timeline.allocations, timeline.trace.time_us
    died = np.where(table.free_requested_event[rows] >= 0, table.free_requested_event[rows], NEVER)
    if times is None or not len(times) or (first_us is None and last_us is None):
        return died == NEVER
    first = -1 if first_us is None else int(np.searchsorted(times, first_us)) - 1
    last = NEVER if last_us is None else int(np.searchsorted(times, last_us, side="right")) - 1
    return (table.alloc_event[rows] <= last) & (died > first)
