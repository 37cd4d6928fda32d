"""Second sets of the weights that are trained, there before the recording: slow weights, averages, teachers."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from memtrace.arrays import among
from memtrace.attribution.facts import Facts
from memtrace.attribution.phases import Phase
from memtrace.attribution.stack_facts import Kind

Bool = NDArray[np.bool_]
_MOST = 2  # of the trained bytes, the part a second set has; the rest may be heads that only one of two models has
_AGAIN = 4  # of what passes keep, the part whose call sites also leave nothing, where a model runs without gradients


def second_set(facts: Facts, weights: Bool, rest: Bool) -> Bool:
    """Rows of ``rest`` that are as many of each size as the trained ``weights``, of most of those."""
    counts = Counter(facts.size[weights].tolist())
    others = Counter(facts.size[rest & among(facts.size, list(counts))].tolist())
    twins = [size for size, count in counts.items() if others[size] == count]
    covers = sum(size * counts[size] for size in twins) * _MOST >= sum(size * n for size, n in counts.items())
    return rest & among(facts.size, twins if covers else [])


def follows_weights(facts: Facts, copies: Bool) -> bool:
    """Whether the program, at one line and behind an optimizer step, makes and gives up something of each copy's size,
    while no second model runs: it compares weights with copies of its own (Lookahead)."""
    wanted = Counter(facts.size[copies].tolist())
    made = facts.is_kind(Kind.OTHER) & facts.in_phase(Phase.OPTIMIZER, Phase.BETWEEN) & ~facts.persistent
    made &= among(facts.size, list(wanted))
    found: dict[tuple[int, int], Counter[int]] = {}
    columns = facts.timeline.allocations.stack[made], facts.span[made], facts.size[made]
    for stack, span, size in zip(*(column.tolist() for column in columns), strict=True):
        found.setdefault((stack, span), Counter())[size] += 1
    return any(sizes == wanted for sizes in found.values()) and not _runs_without_gradients(facts)


def _runs_without_gradients(facts: Facts) -> bool:
    """Whether call sites inside modules that keep tensors for the backward pass leave none at other times."""
    stack = facts.timeline.allocations.stack
    passes = facts.in_phase(Phase.FORWARD, Phase.EVALUATION, Phase.GENERATION)
    rows = np.flatnonzero(facts.is_kind(Kind.FORWARD) & passes & (facts.stacks.depth[stack] > 0))
    _, key = np.unique(np.stack([facts.stacks.site[stack[rows]], facts.size[rows]]), axis=1, return_inverse=True)
    kept, gone = (np.bincount(key.ravel(), facts.size[rows] * held) for held in (facts.held[rows], ~facts.held[rows]))
    return bool(np.minimum(kept, gone).sum() * _AGAIN > kept.sum())
