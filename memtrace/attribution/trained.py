"""What is trained, told by what recurs: every backward pass leaves one gradient for each trained weight, of its size,
and an optimizer keeps one or two states of it. Names are not asked.

Where a size has more weights than gradients, only as many are trained: a reference model, or the frozen original of a
trained copy, has none.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrace.arrays import among, distinct
from memtrace.attribution.facts import Facts
from memtrace.attribution.frame_tags import Tag
from memtrace.attribution.phases import Phase
from memtrace.attribution.stack_facts import Kind
from memtrace.history.timeline import NEVER

I8 = NDArray[np.int64]
Bool = NDArray[np.bool_]
_SMALLEST_PARAMETER_BYTES = 64  # scalars that outlive a backward pass are losses and norms
_MOST_OF_A_SIZE = 4  # a weight, two states and a frozen copy: beyond that, gradients of that size are another thing's


@dataclass(frozen=True, slots=True)
class Trained:
    """Rows of ``Timeline.allocations``: weights that get gradients, the gradients, and states made before any step."""

    weights: Bool
    gradients: Bool
    states: Bool


def find_trained(facts: Facts, by_autograd: Bool, step_leaves: Bool, others: Bool) -> Trained:
    """``by_autograd``: made in a backward pass; ``step_leaves``: made in an optimizer step and kept; ``others``: rows
    known to be something else (workspaces, quantised weights)."""
    none = np.zeros(len(facts.size), dtype=np.bool_)
    kept = _kept_gradients(facts, by_autograd & ~others)
    adapters = facts.has(Tag.ADAPTER_INIT) & facts.stays & facts.is_kind(Kind.LOAD)
    if adapters.any():
        sizes = distinct(facts.size[adapters])
        sizes = distinct(np.concatenate([sizes, sizes * 2, sizes // 2]))
        return Trained(none, _survivors(facts, by_autograd & ~others) & among(facts.size, sizes), none)
    gradients = _most_in_one_pass(facts, kept)
    weights = _made_before_training(facts) & ~others & ~facts.has(Tag.QUANTIZE)
    if facts.stacks.has(Tag.REDUCE).any():  # gradients of shards are reduced many at once: here, states tell
        for size, states in zip(*np.unique(facts.size[step_leaves], return_counts=True), strict=True):
            count = int((weights & (facts.size == size)).sum())
            if size >= _SMALLEST_PARAMETER_BYTES and 0 < count <= states:
                gradients[int(size)] = count
    found: dict[int, I8] = {}
    for size, count in gradients.items():
        rows = np.flatnonzero(weights & (facts.size == size))
        # Of a size, what modules or loading code made are weights rather than states, and what stays.
        rows = rows[np.lexsort((~facts.persistent[rows], facts.kind[rows] != Kind.LOAD))]
        if 0.8 * count <= len(rows) <= _MOST_OF_A_SIZE * count or (not weights.any() and count > 1):
            found[size] = rows
    trained, states = none.copy(), none.copy()
    steps = facts.phases.start[:-1][facts.phases.phase == Phase.OPTIMIZER]
    enough = sum(gradients[size] for size in found) / 2
    no_states_made = len(steps) > 0 and np.bincount(facts.span[step_leaves] + 1).max(initial=0) < enough
    # Of two steps, one gives up what the other left: states that steps replace, or something they forget to free.
    none_lasts = len(steps) > 1 and (step_leaves & facts.persistent & (facts.born < steps[-1])).sum() < enough
    for size, rows in found.items():
        count = gradients[size]
        trained[rows[:count]] = True
        rest = rows[count:]
        by_program = rest[(facts.kind[rest] == Kind.OTHER) & ~facts.before_trace[rest]]
        states[by_program] = none_lasts and len(by_program) in (count, 2 * count)
        if no_states_made:
            rest = rest[np.argsort(facts.kind[rest] == Kind.LOAD, kind="stable")]
            states[rest[: min(len(rows) // count - 1, 2) * count]] = True
    trained |= _replacements(facts, trained, step_leaves)
    return Trained(trained, kept & among(facts.size, list(found)), states)


def _replacements(facts: Facts, weights: Bool, made: Bool) -> Bool:
    """Weights that an optimizer step puts in the place of others: the last of their size made before those end."""
    result = np.zeros(len(weights), dtype=np.bool_)
    by_size: dict[int, I8] = {}
    given_up = (facts.death_phase == Phase.OPTIMIZER) | (facts.freed_by_program & (facts.death_phase == Phase.BACKWARD))
    for row in np.flatnonzero(weights & given_up).tolist():
        size = int(facts.size[row])
        rows = by_size.setdefault(size, np.flatnonzero(made & (facts.size == size)))
        while facts.ended[row] < NEVER:
            before = int(np.searchsorted(facts.born[rows], facts.ended[row])) - 1
            if before < 0 or int(rows[before]) <= row or result[rows[before]]:
                break
            row = int(rows[before])
            result[row] = True
    return result


def _survivors(facts: Facts, by_autograd: Bool) -> Bool:
    """Made in a backward pass, and alive when it ended or given up by the program itself inside it."""
    return by_autograd & (facts.outlives_span | facts.persistent | facts.freed_by_program)


def _kept_gradients(facts: Facts, by_autograd: Bool) -> Bool:
    """What a backward pass left as gradients are left: until an optimizer step begins, or until the program frees it.

    Gradients of leaf tensors that are not weights (an embedding's output, say) go with those tensors, not where the
    others are freed.
    """
    steps = facts.phases.start[:-1][facts.phases.phase == Phase.OPTIMIZER]
    following = np.append(steps, NEVER)[np.searchsorted(steps, facts.born)]
    until_step = (facts.ended > following) | (facts.persistent & (following == NEVER))
    if not len(steps):
        until_step = facts.outlives_span
    kept = _survivors(facts, by_autograd) & (until_step | facts.freed_by_program | facts.persistent)
    kept &= facts.size >= _SMALLEST_PARAMETER_BYTES
    freed = kept & (facts.free_stack >= 0) & ~facts.persistent
    as_gradient = freed & (
        ((facts.stacks.tags[facts.free_stack] & int(Tag.ZERO_GRAD)) != 0)
        | (facts.stacks.kind[facts.free_stack] == Kind.OPTIMIZER)
    )
    if as_gradient.sum() * 2 > freed.sum():
        kept &= as_gradient | (~freed & among(facts.size, facts.size[as_gradient]))
    return kept


def _most_in_one_pass(facts: Facts, rows: Bool) -> dict[int, int]:
    """How many of each size the pass with most of them has."""
    forward = facts.phases.start[:-1][facts.phases.phase == Phase.FORWARD]
    index = np.flatnonzero(rows)
    pairs = Counter(zip(np.searchsorted(forward, facts.born[index]).tolist(), facts.size[index].tolist(), strict=True))
    most: dict[int, int] = {}
    for (_, size), count in pairs.items():
        most[size] = max(most.get(size, 0), count)
    return most


def _made_before_training(facts: Facts) -> Bool:
    """There before the trace, or made by loading, by the program or by code that left no stack, before any pass, and
    alive through one."""
    ready = facts.is_kind(Kind.OTHER, Kind.NONE) & facts.in_phase(Phase.LOAD, Phase.UNKNOWN) & ~facts.before_trace
    return ((facts.before_trace | ready) & facts.lives_on) | (facts.is_kind(Kind.LOAD) & facts.stays)
