"""Attention matrices, tokens by tokens, found by what they are rather than by who makes them.

Whatever an attention module makes of queries, keys and values is as wide as its projections, but the matrices grow with
the number of tokens. So a tensor that a module makes itself, far larger than anything the modules inside it make, is
one; nothing else in a model outgrows its own projections.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memtrace.arrays import among
from memtrace.attribution.facts import Facts
from memtrace.attribution.frame_tags import Tag, frame_tags
from memtrace.attribution.stack_facts import Kind, StackFacts

I8 = NDArray[np.int64]
Bool = NDArray[np.bool_]
_LARGER = 2  # as a 32-bit copy of a 16-bit projection is not
_FEWEST_PIECES = 8
_OF_LARGEST = 4  # a module with projections this much smaller than the largest ones (a router) is no attention


def outgrown(facts: Facts, others: Bool) -> Bool:
    """Rows larger than what the modules inside the module that made them make, in the same pass.

    ``others``: rows that no module makes for itself: copies of weights, workspaces, the head's outputs.
    """
    made = facts.is_kind(Kind.FORWARD, Kind.RECOMPUTE) & ~facts.before_trace & ~others
    # An adapter's layer makes whole weights beside its thin projections.
    others = others | facts.has(Tag.LORA)
    levels, own = _scopes(facts.stacks)
    stack, spans = facts.timeline.allocations.stack, len(facts.phases) + 1
    scopes = int(own.max(initial=-1)) + 2
    rows = np.flatnonzero(made)
    linear = rows[facts.has(Tag.LINEAR | Tag.QUANT_MODULE)[rows]]

    def largest_of(rows: I8, levels: list[I8]) -> I8:
        """By scope (the last: none) and span; one number for both is quicker than a pair."""
        made, found = np.zeros((2, scopes * spans), dtype=np.int64)
        np.maximum.at(made, (own % scopes * spans)[stack[rows]] + facts.span[rows] % spans, facts.size[rows])
        there = np.flatnonzero(made)  # pairs of scope and span, far fewer than rows
        for level in levels:
            outer = np.full(scopes, scopes - 1)
            outer[own % scopes] = level % scopes
            np.maximum.at(found, outer[there // spans] * spans + there % spans, made[there])
        found[-spans:] = 0
        return found

    # A projection's module calls it, or the adapter around it.
    inside, projected = largest_of(rows, levels), largest_of(linear, levels[:2])
    largest = projected.reshape(-1, spans).max(axis=0, initial=0)
    candidates = rows[~others[rows]]
    at = (own % scopes * spans)[stack[candidates]] + facts.span[candidates] % spans
    found = (projected[at] > 0) & (projected[at] * _OF_LARGEST >= largest[facts.span[candidates]])
    found &= facts.size[candidates] > _LARGER * inside[at]
    found &= ~among(own[stack[candidates]], _stepped_through(facts, own, candidates, found))
    result = np.zeros(len(made), dtype=np.bool_)
    result[candidates[found]] = True
    return result


def _stepped_through(facts: Facts, own: I8, rows: I8, found: Bool) -> I8:
    """Scopes that go through what was found in them token by token, by pieces as large as its rows: a recurrence."""
    stack, size = facts.timeline.allocations.stack[rows], facts.size[rows]
    inside = np.flatnonzero(among(own[stack], own[stack[found]]))
    made = np.stack([own[stack[inside]], facts.span[rows[inside]], stack[inside], size[inside], found[inside]])
    groups: dict[tuple[int, int], list[tuple[int, int, bool]]] = {}
    for (scope, span, _, piece, is_whole), count in zip(*_counted(made), strict=True):
        groups.setdefault((scope, span), []).append((piece, count, bool(is_whole)))
    result = set()
    for (scope, _), each in groups.items():
        wholes = {(whole, count) for whole, count, is_whole in each if is_whole}
        for piece, count, is_whole in each:
            for whole, times in wholes if not is_whole and count >= _FEWEST_PIECES else ():
                if whole % piece == 0 and count >= max(whole // piece, _FEWEST_PIECES) * times:
                    result.add(scope)
    return np.array(sorted(result), dtype=np.int64)


def _counted(columns: I8) -> tuple[list[list[int]], list[int]]:
    found, counts = np.unique(columns, axis=1, return_counts=True)
    return found.T.tolist(), counts.tolist()


def _scopes(facts: StackFacts) -> tuple[list[NDArray[np.int64]], I8]:
    """Per stack (and "none"): the module calls around the one it allocates in, nearest first, and that one; -1: none.

    Calls of modules at one place of the program are one scope: the layers of a model, say.
    """
    table = facts.python
    is_call = [bool(frame_tags(f.filename, f.name) & Tag.CALL) for f in table.frames]
    ids: dict[tuple[int, int], int] = {}
    chains: list[list[int]] = []
    for stack in range(len(table)):
        outer, last = -1, False
        chain: list[int] = []
        for frame in reversed(table.frame_ids(stack).tolist()):
            outer = ids.setdefault((outer, frame), len(ids))
            if is_call[frame]:
                if last:
                    chain.pop()
                chain.append(outer)
            last = is_call[frame]
        chains.append(chain)
    numbers: dict[int, int] = {}
    named = [[numbers.setdefault(scope, len(numbers)) for scope in chain] for chain in chains]
    depth = max((len(chain) for chain in named), default=0)
    levels = np.full((max(depth - 1, 0), len(table) + 1), -1, dtype=np.int64)
    own = np.full(len(table) + 1, -1, dtype=np.int64)
    for stack, chain in enumerate(named):
        if chain:
            own[stack] = chain[-1]
            levels[: len(chain) - 1, stack] = chain[-2::-1]
    return list(levels), own
