"""Passes the recording stops in: what a living allocation would have become, learnt from the layer before.

When an error ends a forward pass (or a recomputation), nothing shows which tensors would have been
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


def would_be_held(facts: Facts) -> Bool:
    """Rows alive at the end of a pass that was cut short, and which would have been kept for the backward pass."""
    rows = (facts.pass_end == NEVER) & (facts.born >= 0)
    held = rows & facts.persistent
    for span in np.unique(facts.span[rows & ~facts.interrupted]).tolist():
        index = np.flatnonzero(rows & (facts.span == span))
        distance = period(facts.timeline.allocations.stack[index].astype(np.int64))
        if distance:
            alive = facts.persistent[index]
            # Two layers back where possible: the layer just before may still be feeding the current one.
            tail = np.arange(len(index) - distance, len(index))
            back = np.where(tail >= 2 * distance, tail - 2 * distance, tail - distance)
            usable = back >= 0
            held[index[tail[usable]]] &= alive[back[usable]]
    return held
