"""Passes the recording stops in: what a living allocation would have become, learnt from the layer before.

When a run dies in the middle of a forward pass (or of a recomputation), nothing shows which tensors would have been
kept for the backward pass. But layers repeat: the same call sites allocated in the same order one layer earlier, and
what is left of that layer is what gets kept.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memtrace.attribution.facts import Facts
from memtrace.attribution.repeats import period
from memtrace.history.timeline import NEVER

I8 = NDArray[np.int64]
Bool = NDArray[np.bool_]


def would_be_held(facts: Facts) -> tuple[Bool, Bool]:
    """(rows, verdict): rows alive at the end in a pass that never ended, and which of them would have been kept."""
    rows = (facts.pass_end == NEVER) & (facts.born >= 0)
    held = rows & facts.persistent
    index = np.flatnonzero(rows)
    if not len(index):
        return rows, held
    distance = period(facts.timeline.allocations.stack[index].astype(np.int64))
    if distance:
        alive = facts.persistent[index]
        # Two layers back where possible: the layer just before may still be feeding the current one.
        tail = np.arange(len(index) - distance, len(index))
        back = np.where(tail >= 2 * distance, tail - 2 * distance, tail - distance)
        usable = back >= 0
        held[index[tail[usable]]] &= alive[back[usable]]
    return rows & facts.persistent, held
