"""Passes the recording stops in: what a living allocation would have become, learnt from the layer before.

When an error ends a forward pass (or a recomputation), nothing shows which tensors would have been
kept for the backward pass. But layers repeat: the same call sites allocated in the same order one layer earlier, and
what is left of that layer is what gets kept.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memtrace.attribution.facts import Facts
from memtrace.attribution.frame_tags import Tag
from memtrace.attribution.phases import Phase
from memtrace.attribution.repeats import period
from memtrace.attribution.stack_facts import Kind
from memtrace.history.timeline import NEVER

I8 = NDArray[np.int64]
Bool = NDArray[np.bool_]


def would_be_held(facts: Facts) -> Bool:
    """Rows alive at the end of a pass that was cut short, and which would have been kept for the backward pass."""
    rows = (facts.pass_end == NEVER) & (facts.born >= 0) & ~facts.has(Tag.GENERATE)  # which saves nothing
    held = rows & facts.persistent
    stack = facts.timeline.allocations.stack
    share, seen = _kept_before(facts)
    for span in np.unique(facts.span[rows & ~facts.interrupted]).tolist():
        inside = rows & (facts.span == span)
        # A pass may follow others that kept nothing (generation, a reference model): only its last call is unfinished.
        index = np.flatnonzero(inside & (facts.call_end == facts.call_end[inside].max()))
        distance = period(stack[index].astype(np.int64))
        if distance:
            alive = facts.persistent[index]
            # Two layers back where possible: the layer just before may still be feeding the current one.
            tail = np.arange(len(index) - distance, len(index))
            back = np.where(tail >= 2 * distance, tail - 2 * distance, tail - distance)
            usable = back >= 0
            held[index[tail[usable]]] &= alive[back[usable]]
        else:
            site = facts.stacks.site[stack[index]]
            held[index] &= ~seen[site] | (share[site] >= 0.5)
    return held


def _kept_before(facts: Facts) -> tuple[NDArray[np.float64], Bool]:
    """Per call site: the share of its tensors that finished calls of the model kept, and whether any finished. Calls
    that kept nothing trained nothing."""
    done = facts.in_phase(Phase.FORWARD) & facts.is_kind(Kind.FORWARD) & (facts.pass_end < NEVER)
    done &= np.isin(facts.call_end, np.unique(facts.call_end[done & facts.held & facts.is_kind(Kind.FORWARD)]))
    site = facts.stacks.site[facts.timeline.allocations.stack]
    count = int(facts.stacks.site.max(initial=0)) + 1
    made = np.bincount(site[done], minlength=count)
    kept = np.bincount(site[done & facts.held], minlength=count)
    return kept / np.maximum(made, 1), made > 0
