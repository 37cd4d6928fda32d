"""Passes the recording stops in: what a living allocation would have become, learnt from calls that came to their end.

When an error ends a forward pass (or a recomputation), nothing shows which tensors would have been kept for the
backward pass. But programs repeat themselves: a call before, or the recomputation of another block, allocated at the
same call sites in the same order, and what it kept is what this one would have kept. In a first pass it is the layers
that repeat: what is left of a layer before is what gets kept.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memtrace.arrays import among
from memtrace.attribution.facts import Facts
from memtrace.attribution.frame_tags import Tag
from memtrace.attribution.repeats import period
from memtrace.attribution.stack_facts import Kind
from memtrace.history.timeline import NEVER

I8 = NDArray[np.int64]
Bool = NDArray[np.bool_]
_ALIKE = 0.5  # share of a call's rows that another call must have, with the same fate so far


def would_be_held(facts: Facts) -> Bool:
    """Rows alive at the end of a pass that was cut short, and which would have been kept for the backward pass."""
    rows = (facts.pass_end == NEVER) & (facts.born >= 0) & ~facts.has(Tag.GENERATE)  # which saves nothing
    held = rows & facts.persistent
    if not rows.any():
        return held
    site = facts.stacks.site[facts.timeline.allocations.stack]
    recomputed = facts.is_kind(Kind.RECOMPUTE)
    told_apart = ~recomputed & ~facts.is_kind(Kind.NONE)
    for kind, ends in ((told_apart, facts.call_end), (recomputed, facts.pass_end)):
        # What stays of a whole pass is a workspace, say: later ones don't make it again.
        index = np.flatnonzero(kind & (facts.pass_end >= 0) & ((facts.pass_end == NEVER) | ~facts.persistent))
        # Where the program calls module after module itself, a pass is one call, if there is another one.
        loose = index[facts.is_kind(Kind.OTHER)[index]]
        by_pass = among(facts.span[index], facts.span[loose]) & (facts.pass_end[loose] < NEVER).any()
        key = np.stack([facts.span[index], np.where(by_pass, 0, ends[index])])
        calls = np.split(index, np.flatnonzero((np.diff(key) != 0).any(axis=0)) + 1) if len(index) else []
        last = {int(facts.span[call[0]]): call for call in calls if facts.pass_end[call[0]] == NEVER}
        # What a call kept: known at the end of its pass; in a pass without one, when the pass's last call began.
        kept = facts.held.copy()
        for span, call in last.items():
            inside = index[facts.span[index] == span]
            kept[inside] = facts.ended[inside] > facts.born[call[0]]
        cut = {id(call) for call in last.values()}
        whole = {(site[c].tobytes(), kept[c].tobytes()): c for c in calls if id(c) not in cut}  # the latest of equals
        for call in last.values():
            if rows[call].any():
                held[call] &= _as_others(facts, site, call, list(whole.values()), kept)
    return held


def _as_others(facts: Facts, site: I8, call: I8, others: list[I8], kept: Bool) -> Bool:
    """Which rows of an unfinished call would be kept, by the call that is most like it; else by the layer before."""
    keys, alive = _keys(site[call]), facts.persistent[call]
    stack, best, twins, found = facts.timeline.allocations.stack, (0, 0), np.full(len(call), -1), False
    for other in others:
        theirs = _keys(site[other])
        order = np.argsort(theirs)
        at = order[np.minimum(np.searchsorted(theirs, keys, sorter=order), len(other) - 1)]
        paired = theirs[at] == keys
        reached = int(at[paired].max(initial=0))
        # Ours was cut short where that one had come so far, or, behind its last allocation, later.
        states = [facts.ended[other] > facts.born[other[reached]], kept[other]][: 1 + (reached == len(other) - 1)]
        alike = max(int((paired & (state[at] == alive)).sum()) for state in states)
        score = alike, int((stack[other[at]] == stack[call])[paired].sum())  # called from the same place
        if score >= best and alike >= _ALIKE * len(call):
            best, twins, found = score, np.where(paired, other[at], -1), True
    if found:
        return (twins < 0) | kept[twins]
    result = np.ones(len(call), dtype=np.bool_)
    distance = period(site[call])
    if distance:
        # Two layers back where there are as many: the layer just before may still be feeding the current one.
        tail, ours = np.arange(len(call) - distance, len(call)), site[call]
        twice = (tail >= 2 * distance) & (ours[np.maximum(tail - 2 * distance, 0)] == ours[tail])
        back = tail - np.where(twice, 2, 1) * distance
        result[tail[back >= 0]] = alive[back[back >= 0]]
    return result


def _keys(sites: I8) -> I8:
    """A number for each entry of a sequence of call sites: which site, and the how many-th time it is."""
    order = np.argsort(sites, kind="stable")
    begins = np.append(True, np.diff(sites[order]) != 0)
    place = np.arange(len(sites))
    times = np.empty(len(sites), dtype=np.int64)
    times[order] = place - np.maximum.accumulate(np.where(begins, place, 0))
    return (sites << 24) + times
