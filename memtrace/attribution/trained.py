"""What is trained, told by what recurs: every backward pass leaves one gradient for each trained weight, of its size,
and an optimizer keeps one or two states of it. Names are not asked.

Where a size has more weights than gradients, only as many are trained: a reference model, or the frozen original of a
trained copy, has none.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from memtrace.arrays import among, distinct, place_of, places
from memtrace.attribution.facts import Facts
from memtrace.attribution.frame_tags import Tag
from memtrace.attribution.origin import LIBRARIES, package_of
from memtrace.attribution.phases import Phase
from memtrace.attribution.stack_facts import Kind
from memtrace.frozen import dataclass
from memtrace.history.timeline import NEVER

I8 = NDArray[np.int64]
Bool = NDArray[np.bool_]
_SMALLEST_PARAMETER_BYTES = 64  # scalars that outlive a backward pass are losses and norms
_SMALL_SHARE = 64  # sizes below this part of the largest gradient coincide with buffers' too easily
_MOST_OF_A_SIZE = 4  # a weight, two states and a frozen copy: beyond that, gradients of that size are another thing's


@dataclass(frozen=True, slots=True)
class Trained:
    """Rows of ``Timeline.allocations``: weights that get gradients, the gradients, and states made before any step;
    and, of weights and others of their sizes, which might as well be the other (``alike``).

    ``is_sure``: the code that gave gradients up, of whatever size, shows that they are."""

    weights: Bool
    gradients: Bool
    states: Bool
    alike: Bool
    is_sure: bool


def find_trained(facts: Facts, by_autograd: Bool, step_leaves: Bool, others: Bool) -> Trained:
    """``by_autograd``: made in a backward pass; ``step_leaves``: made in an optimizer step and kept; ``others``: rows
    known to be something else (workspaces, quantised weights)."""
    none = np.zeros(len(facts.size), dtype=np.bool_)
    kept, is_sure = _kept_gradients(facts, by_autograd & ~others)
    adapters = facts.has(Tag.ADAPTER_INIT) & facts.stays & facts.is_kind(Kind.LOAD)
    if adapters.any():
        sizes = distinct(facts.size[adapters])
        sizes = distinct(np.concatenate([sizes, sizes * 2, sizes // 2]))
        kept = _survivors(facts, by_autograd & ~others) & among(facts.size, sizes)
        return Trained(none, kept, none, none, is_sure)
    gradients = _most_at_once(facts, kept)
    weights = _made_before_training(facts) & ~others & ~facts.has(Tag.QUANTIZE)
    if facts.stacks.has(Tag.REDUCE).any():  # gradients of shards are reduced many at once: here, states tell
        for size, states in zip(*np.unique(facts.size[step_leaves], return_counts=True), strict=True):
            count = int((weights & (facts.size == size)).sum())
            if size >= _SMALLEST_PARAMETER_BYTES and 0 < count <= states:
                gradients[int(size)] = count
    # Of each weight, a call site of the optimizer made one state: where a ring has lost the gradients of a size, where
    # gradients are sparse, or where steps take turns with two models.
    leaves, unseen = step_leaves & facts.persistent & (facts.size >= _SMALLEST_PARAMETER_BYTES), Counter[int]()
    leaves &= facts.stacks.kind[stack := facts.timeline.allocations.stack] == Kind.OPTIMIZER
    made = Counter(zip(facts.size[leaves].tolist(), stack[leaves].tolist(), facts.span[leaves].tolist(), strict=True))
    replaced = {*facts.size[(weights | step_leaves) & (facts.death_phase == Phase.OPTIMIZER)].tolist()}
    alive: Counter[tuple[int, int]] = Counter()
    for (size, site, span), count in made.items():
        unseen_size = span < 0 or (size not in replaced and size * _SMALL_SHARE >= max(gradients, default=0))
        if unseen_size if size not in gradients else span >= 0 and count <= gradients[size]:
            alive[size, site] += count
    for (size, _), count in alive.items():
        if count <= (weights & (facts.size == size)).sum():
            unseen[size] = max(unseen[size], count)
    gradients = dict(Counter(gradients) | unseen)
    swapped, one_model = _swapped(facts, weights, step_leaves), _one_model(facts, weights, gradients)
    found: dict[int, I8] = {}
    alike = none.copy()
    for size, count in gradients.items():
        rows = np.flatnonzero(weights & (facts.size == size))
        # Of a size, what steps swap, what modules or loading code made, and what stays are weights rather than states.
        as_weights = facts.kind[rows] == Kind.LOAD
        keys = np.stack([~facts.persistent[rows], ~as_weights, ~one_model[rows], ~swapped[rows]])
        order = np.lexsort(keys)
        if len(rows) > count and (keys[:, order[count - 1]] == keys[:, order[count]]).all():
            alike[rows] = (keys == keys[:, order[count], None]).all(axis=0)
        rows = rows[order]
        most = len(rows) if is_sure else _MOST_OF_A_SIZE * count
        if 0.8 * count <= len(rows) <= most or (not weights.any() and count > 1):
            found[size] = rows
    trained, states = none.copy(), none.copy()
    for size, rows in found.items():
        trained[rows[: gradients[size]]] = True
    trained |= _replacements(facts, trained, step_leaves)
    steps = facts.phases.start[:-1][facts.phases.phase == Phase.OPTIMIZER]
    enough = sum(gradients[size] for size in found) / 2
    no_states_made = len(steps) > 0 and _new_states(facts, weights, step_leaves & ~trained, steps) < enough
    # Of two steps, one gives up what the other left: states that steps replace, or something they forget to free.
    none_lasts = len(steps) > 1 and (step_leaves & facts.persistent & (facts.born < steps[-1])).sum() < enough
    total = sum(gradients[size] * size for size in found)
    for size, rows in found.items():
        count = gradients[size]
        rest = rows[count:]
        by_program = rest[(facts.kind[rest] == Kind.OTHER) & ~facts.before_trace[rest]]
        of_modules = (facts.kind[rows[:count]] == Kind.LOAD).all()  # their copies in the program's hands are no model
        states[by_program] = (none_lasts or of_modules) and len(by_program) in (count, 2 * count)
        if no_states_made:
            rest = rest[np.argsort(facts.kind[rest] == Kind.LOAD, kind="stable")]
            states[rest[: min(len(rows) // count - 1, 2) * count]] = True
    if no_states_made and len(found) > 1:  # flat ones
        states |= weights & (np.abs(facts.size - total) * 64 <= total)
    return Trained(trained, kept & among(facts.size, list(found)), states, alike & ~states, is_sure)


def _one_model(facts: Facts, weights: Bool, gradients: dict[int, int]) -> Bool:
    """Weights that one place of the program had made, if there is one with just as many of each size as gradients: a
    student beside its teacher."""
    result = np.zeros(len(weights), dtype=np.bool_)
    large = {size: count for size, count in gradients.items() if size * _SMALL_SHARE >= max(gradients)}
    table, stack = facts.stacks.python, facts.timeline.allocations.stack
    own = [package_of(frame.filename) not in LIBRARIES for frame in table.frames]
    places: dict[tuple[int, ...], list[int]] = {}
    for row in np.flatnonzero(weights & (stack >= 0) & among(facts.size, list(large))).tolist():
        place = tuple(frame for frame in table.frame_ids(int(stack[row])).tolist() if own[frame])
        places.setdefault(place, []).append(row)
    fitting = [rows for rows in places.values() if Counter(facts.size[rows].tolist()) == large]
    if len(fitting) == 1:
        result[fitting[0]] = True
    return result


def _swapped(facts: Facts, weights: Bool, made: Bool) -> Bool:
    """Weights that the program gives up for others, which an optimizer step made before a further pass: SAM, say."""
    result = np.zeros(len(weights), dtype=np.bool_)
    passes = facts.phases.start[:-1][facts.phases.phase == Phase.FORWARD]
    born: dict[int, I8] = {}
    for row in np.flatnonzero(weights & facts.freed_by_program & (facts.ended < NEVER)).tolist():
        size, ended = int(facts.size[row]), int(facts.ended[row])
        if size not in born:
            born[size] = facts.born[made & (facts.size == size)]
        others = born[size]
        last = place_of(others, ended) - 1
        result[row] = last >= 0 and np.searchsorted(passes, others[last]) < np.searchsorted(passes, ended)
    return result


def _new_states(facts: Facts, weights: Bool, leaves: Bool, steps: I8) -> int:
    """The most that a step left, beyond what it, or the program before the next step, gave up of the same sizes."""
    stack = facts.timeline.allocations.stack
    # Of what the last step left the end is not known: if its call sites left something before, that tells.
    known = leaves & ((facts.born < steps[-1]) | ~among(stack, stack[leaves & (facts.born < steps[-1])]))
    older = (weights | leaves) & ((facts.death_phase == Phase.OPTIMIZER) | facts.freed_by_program)
    made, gone = (
        Counter(
            zip(np.searchsorted(steps, events[rows], side="right").tolist(), facts.size[rows].tolist(), strict=True)
        )
        for events, rows in ((facts.born, known), (facts.ended, older))
    )
    most: Counter[int] = Counter()
    for (step, _), count in (made - gone).items():
        most[step] += count
    return max(most.values(), default=0)


def _replacements(facts: Facts, weights: Bool, made: Bool) -> Bool:
    """Weights that an optimizer step puts in the place of others: the last of their size made before those end."""
    result = np.zeros(len(weights), dtype=np.bool_)
    by_size: dict[int, tuple[I8, NDArray[np.int32]]] = {}
    innermost = facts.stacks.ends()[0][facts.timeline.allocations.stack]
    given_up = (facts.death_phase == Phase.OPTIMIZER) | (facts.freed_by_program & (facts.death_phase == Phase.BACKWARD))
    for row in np.flatnonzero(weights & given_up).tolist():
        size, end = int(facts.size[row]), int(facts.ended[row])
        if size not in by_size:
            alike = np.flatnonzero(made & (facts.size == size))
            by_size[size] = alike, facts.born[alike]
        rows, born = by_size[size]
        while end < NEVER:
            before = place_of(born, end) - 1
            while before >= 0 and result[rows[before]]:  # taken by another that was freed with it
                before -= 1
            if before < 0 or int(rows[before]) <= row or (result[row] and innermost[rows[before]] != innermost[row]):
                break
            row = int(rows[before])
            result[row] = True
            end = int(facts.died[row])  # the last ones may be freed when nothing more is asked for
    return result


def _survivors(facts: Facts, by_autograd: Bool) -> Bool:
    """Made in a backward pass, and alive when it ended or given up by the program itself inside it."""
    return by_autograd & (facts.outlives_span | facts.persistent | facts.freed_by_program)


def _kept_gradients(facts: Facts, by_autograd: Bool) -> tuple[Bool, bool]:
    """What a backward pass left as gradients are left: until an optimizer step begins, or until the program frees it;
    and whether the code that freed them says so.

    Gradients of leaf tensors that are not weights (an embedding's output, say) go with those tensors, not where the
    others are freed.
    """
    start, phase = facts.phases.start[:-1], facts.phases.phase
    # A step that asks for nothing and frees nothing has no span: what comes behind it shows it.
    unseen = (phase == Phase.BETWEEN) & (np.append(Phase.UNKNOWN, phase[:-1]) == Phase.BACKWARD)
    steps = np.where(unseen, start - 1, start)[unseen | (phase == Phase.OPTIMIZER)]
    kept = _survivors(facts, by_autograd) & (facts.size >= _SMALLEST_PARAMETER_BYTES)
    rows = np.flatnonzero(kept)
    following = np.append(steps, NEVER)[places(steps, facts.born[rows])]
    until_step = facts.ended[rows] > following if len(steps) else facts.outlives_span[rows]
    kept[rows] = until_step | facts.freed_by_program[rows] | facts.persistent[rows]
    freed = kept & (facts.free_stack >= 0) & ~facts.persistent
    gives_up = facts.stacks.has(Tag.ZERO_GRAD) | (facts.stacks.kind == Kind.OPTIMIZER)
    as_gradient = freed & gives_up[facts.free_stack]
    is_sure = bool(as_gradient.sum() * 2 > freed.sum())
    if is_sure:
        kept &= as_gradient | (~freed & among(facts.size, facts.size[as_gradient]))
    return kept, is_sure


def _most_at_once(facts: Facts, rows: Bool) -> dict[int, int]:
    """How many of each size the pass with most of them made, or were there when a step began: of a loss in pieces, each
    piece's backward pass leaves its own."""
    start, phase = facts.phases.start[:-1], facts.phases.phase
    index = np.flatnonzero(rows)
    passes = np.searchsorted(start[phase == Phase.FORWARD], facts.born[index])
    groups = [index[passes == number] for number in distinct(passes)]
    for step in start[phase == Phase.OPTIMIZER].tolist():
        groups.append(index[(facts.born[index] < step) & (facts.ended[index] >= step)])
    most: Counter[int] = Counter()
    for group in groups:
        most |= Counter(facts.size[group].tolist())
    return dict(most)


def _made_before_training(facts: Facts) -> Bool:
    """There before the trace, or made by loading, by the program or by code that left no stack, before any pass, and
    alive through one, or up to the step that puts others in their place."""
    ready = facts.is_kind(Kind.OTHER, Kind.NONE) & facts.in_phase(Phase.LOAD, Phase.UNKNOWN) & ~facts.before_trace
    older = facts.before_trace & ~facts.is_kind(Kind.FORWARD, Kind.RECOMPUTE)
    replaced = facts.freed_by_program & (facts.death_phase == Phase.OPTIMIZER)
    return ((older | ready) & (facts.lives_on | replaced)) | (facts.is_kind(Kind.LOAD) & facts.stays)
