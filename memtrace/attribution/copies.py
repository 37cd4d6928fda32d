"""Second sets of the weights that are trained, there before the recording: slow weights, averages, teachers."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from memtrace.arrays import among, distinct
from memtrace.attribution.facts import Facts
from memtrace.attribution.phases import Phase
from memtrace.attribution.stack_facts import Kind

Bool = NDArray[np.bool_]
_MOST = 2  # of the trained bytes, the part a second set has; the rest may be heads that only one of two models has
_AGAIN = 4  # of what passes keep, the part whose call sites also leave nothing, where a model runs without gradients


def second_set(facts: Facts, weights: Bool, rest: Bool) -> Bool:
    """Rows of ``rest`` that are as many of each size as the trained ``weights``, of most of those: of two sizes at
    least, since any weight may have a twin."""
    counts = Counter(facts.size[weights].tolist())
    others = Counter(facts.size[rest & among(facts.size, list(counts))].tolist())
    twins = [size for size, count in counts.items() if others[size] == count]
    covers = sum(size * counts[size] for size in twins) * _MOST >= sum(size * n for size, n in counts.items())
    return rest & among(facts.size, twins if covers and len(twins) > 1 else [])


def runs_without_gradients(facts: Facts) -> bool:
    """Whether call sites inside modules that keep tensors for the backward pass leave none at other times."""
    stack = facts.timeline.allocations.stack
    passes = facts.in_phase(Phase.FORWARD, Phase.EVALUATION)
    rows = np.flatnonzero(facts.is_kind(Kind.FORWARD) & passes & (facts.stacks.depth[stack] > 0))
    site, size, held = facts.stacks.site[stack[rows]], facts.size[rows], facts.held[rows]
    kept_bytes = int(size[held].sum())
    # Only call sites that did both tell: sorting pairs of all rows of millions took longer than all else here.
    keeps, lets_go = (np.bincount(site[which] + 1, minlength=site.max(initial=-1) + 2) > 0 for which in (held, ~held))
    both = (keeps & lets_go)[site + 1]
    site, size, held = site[both], size[both], held[both]
    sizes = distinct(size)
    _, key = np.unique(site * len(sizes) + np.searchsorted(sizes, size), return_inverse=True)
    kept, gone = (np.bincount(key, size * which) for which in (held, ~held))
    return bool(np.minimum(kept, gone).sum() * _AGAIN > kept_bytes)
