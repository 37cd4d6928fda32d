"""Signals about memory that was there before the recording began."""

from __future__ import annotations

from collections import Counter
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from memtrace.arrays import among
from memtrace.attribution.basics import LARGE_BYTES, Basics
from memtrace.attribution.copies import runs_without_gradients, second_set
from memtrace.attribution.frame_tags import Tag
from memtrace.attribution.phases import Phase
from memtrace.attribution.shapes import CUBLAS_WORKSPACE_BYTES, adapter_sizes
from memtrace.attribution.stack_facts import Kind
from memtrace.history.timeline import NEVER

_ROUND_ELEMENTS = 1_000_000  # buckets of DeepSpeed have 500,000,000 unless told otherwise, two bytes each or four

Bool = NDArray[np.bool_]


class EarlySignals(Basics):
    """What becomes of what is older than the recording, and what that tells of it."""

    @cached_property
    def step_gradients(self) -> Bool:
        """As large as a state, or twice as large as a gradient, and gone before the next step begins."""
        f = self.facts
        sizes = np.concatenate([f.size[self.step_leaves], 2 * f.size[self.trained.gradients]])
        return self._gone_before_next_step & ~self._gone_in_its_call & among(f.size, sizes[sizes >= LARGE_BYTES])

    @cached_property
    def adapter_frames(self) -> Bool:
        return self.facts.has(Tag.ADAPTER_INIT) & self.facts.is_kind(Kind.LOAD)

    @cached_property
    def early_trained(self) -> Bool:
        """Of a trained weight's size, and freed where gradients and replaced states are: after a backward pass."""
        f = self.facts
        fits = among(f.size, self._trained_sizes)
        after_backward = among(f.death_phase, [Phase.OPTIMIZER, Phase.BETWEEN, Phase.FORWARD])
        after_backward |= (f.death_phase == Phase.BACKWARD) & f.freed_by_program
        return self.early & fits & ~f.persistent & after_backward & ~self.trained.weights

    @cached_property
    def early_made(self) -> Bool:
        made = self.early & self.facts.is_kind(Kind.FORWARD, Kind.RECOMPUTE)  # known where a ring lost its beginning
        return made & ~among(self.facts.size, CUBLAS_WORKSPACE_BYTES)

    @property
    def early_given_up(self) -> Bool:
        f = self.facts
        return self.early & (f.free_stack >= 0) & f.stacks.has(Tag.ZERO_GRAD | Tag.BUCKET)[f.free_stack]

    @cached_property
    def early_replaced_states(self) -> Bool:
        """The pass had made its own gradients of that size before."""
        f = self.facts
        replaced = self.early_trained & (f.death_phase == Phase.OPTIMIZER)
        rows = np.flatnonzero(replaced)
        made = np.flatnonzero(self.trained.gradients & self.in_trace)
        sizes, first = np.unique(f.size[made], return_index=True)
        place = np.searchsorted(sizes, f.size[rows])
        found = np.append(sizes, -1)[place] == f.size[rows]
        born = np.append(f.born[made[first]], NEVER)[np.where(found, place, len(sizes))]
        replaced[rows] = born < f.ended[rows]
        return replaced

    @cached_property
    def early_other_states(self) -> Bool:
        """Freed by a step that leaves another of its size, and no gradient; and of that size what stays, if it is no
        more than that: states that steps replace now and then, and those that they update in place."""
        f = self.facts
        given_up = self.early & (f.size >= LARGE_BYTES) & (f.death_phase == Phase.OPTIMIZER)
        result = given_up & among(f.size, f.size[self.step_leaves])
        result &= ~self.early_trained | self.early_replaced_states
        for size, count in Counter(f.size[result].tolist()).items():
            beside = self.early_persistent & (f.size == size) & ~self.trained.weights & ~self.trained.states
            result |= beside & (beside.sum() <= count)
        return result

    @cached_property
    def masters(self) -> Bool:
        """As many of a size as a step makes gradients of that size for itself, or two or three times as many: an
        optimizer's own copies of weights, and states of them."""
        f = self.facts
        result = np.zeros(len(f.size), dtype=np.bool_)
        made = np.flatnonzero(self.step_gradients)
        ready = self.early_persistent | (self.in_trace & f.is_kind(Kind.OTHER) & (f.born < self._first_pass) & f.stays)
        counts = Counter(zip(f.size[made].tolist(), f.span[made].tolist(), strict=True))
        for size, count in {(size, count) for (size, _), count in counts.items()}:
            rows = np.flatnonzero(ready & (f.size == size))
            others = rows[~self.trained.weights[rows]]
            result[others if len(others) in (2 * count, 3 * count) else rows[-count:]] = True
        return result

    @cached_property
    def early_parts(self) -> Bool:
        """As many of a size that no trained weight has as a line of optimizer steps works on, or twice as many: states
        of weights that lie in one piece (those of cuDNN's recurrent layers)."""
        f = self.facts
        worked = self.in_optimizer & f.is_kind(Kind.OPTIMIZER) & (f.size >= LARGE_BYTES) & ~self.step_leaves
        worked &= among(f.size, f.size[self.early_persistent & ~self.trained.weights & ~self.trained.states])
        worked &= ~among(f.size, self._trained_sizes)
        columns = (f.size[worked], f.span[worked], f.timeline.allocations.stack[worked])
        counts = Counter(zip(*(column.tolist() for column in columns), strict=True))
        result = np.zeros(len(f.size), dtype=np.bool_)
        for size, count in {(size, count) for (size, *_), count in counts.items()}:
            rows = self.early_persistent & (f.size == size)
            result |= rows & (rows.sum() in (count, 2 * count))
        return result

    @property
    def early_saved(self) -> Bool:
        """Freed in a backward pass (where sharded training frees gathered weights and gradients, too), or after it, if
        that is known to be one."""
        f = self.facts
        sharded = bool(f.stacks.has(Tag.GATHER | Tag.REDUCE).any())
        inside = (f.death_phase == Phase.BACKWARD) & (not sharded)
        after = among(f.death_phase, [Phase.BETWEEN, Phase.FORWARD]) & ~f.persistent & (not f.blind)
        return self.early & (inside | after & (not self._torn))

    @property
    def early_few(self) -> Bool:
        """Where whole models are trained and all but a few large tensors get gradients, those few are as likely data,
        or flat states, as frozen weights: that is not told."""
        return self._few_untrained(self._early_rest & ~self._early_copies, 3)

    @property
    def _early_rest(self) -> Bool:
        known = self.trained.weights | self.trained.states | self.masters | self.early_other_states
        return self.early_persistent & ~known & ~self.early_made & ~self.early_workspaces

    @cached_property
    def _early_copies(self) -> Bool:
        large = self.facts.size >= LARGE_BYTES
        return second_set(self.facts, self.trained.weights & large, self._early_rest & large)

    @property
    def early_followers(self) -> Bool:
        """Copies of weights that no pass runs: a teacher's or a reference's runs in each step, without gradients."""
        copies = self._early_copies & self.trains_whole
        return copies & (not copies.any() or not runs_without_gradients(self.facts))

    def _few_untrained(self, rest: Bool, at_most: int = 0) -> Bool:
        """The large ones of ``rest``, where whole models are trained and most else that stays gets gradients."""
        rest = rest & (self.facts.size >= LARGE_BYTES) & self.trains_whole
        return rest & (rest.sum() <= max(self.trained.weights.sum() // 4, at_most))

    @property
    def early_sharded(self) -> Bool:
        workspaces = among(self.facts.size, CUBLAS_WORKSPACE_BYTES)
        sharded = self.facts.stacks.has(Tag.REDUCE).any()
        return self.early_persistent & self.trains_whole & sharded & ~workspaces

    @property
    def early_flat_gradients(self) -> Bool:
        """Of flat tensors half as large as masters one is the weights in 16 bits for each master, the others gradients;
        so are buckets, which are made for a round number of elements."""
        f = self.facts
        flat = self.early_sharded & ~self.masters & (f.size >= LARGE_BYTES)
        result = flat & (f.size % (2 * _ROUND_ELEMENTS) == 0)
        for size, count in Counter((f.size[self.masters] // 2).tolist()).items():
            result[np.flatnonzero(flat & (f.size == size))[count:]] = True
        return result

    @property
    def early_adapters(self) -> Bool:
        f = self.facts
        rest = self.early_persistent & ~self.early_scales & ~self.early_quantized
        made = Counter(f.size[self.adapter_frames & f.stays].tolist())
        twins = rest & among(f.size, list(made))
        if made and Counter(f.size[twins].tolist()) == made:  # a second set, beside the one made here: a reference
            return twins
        if (self.early_persistent & self.trained.weights).any() or not f.has(Tag.LORA).any():
            return np.zeros(len(f.size), dtype=np.bool_)
        return rest & among(f.size, adapter_sizes(f.size[rest], f.size[self.early_quantized]))

    @cached_property
    def _multiplies(self) -> bool:
        """A module's product ran in a forward pass of the recording."""
        return bool((self.facts.has(Tag.LINEAR) & self.facts.is_kind(Kind.FORWARD) & self.in_trace).any())

    @cached_property
    def early_workspaces(self) -> Bool:
        f = self.facts
        sized = self.early_persistent & among(f.size, CUBLAS_WORKSPACE_BYTES[:2])
        by_model = sized & f.is_kind(Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD)  # the final state has its stack
        unlike_weights = sized & among(f.size, [size for size in CUBLAS_WORKSPACE_BYTES if size % (1 << 20)])
        made = (self.cublas_once | self.cublas_frames) & self.in_trace
        by_autograd = f.is_kind(Kind.NONE, Kind.BACKWARD, Kind.RECOMPUTE)
        of_autograd, of_program = (f.size[made & rows] for rows in (by_autograd, ~by_autograd))
        if sized.sum() <= 2:
            had_none = among(f.size, of_autograd[among(of_autograd, of_program)])
            return sized & (by_model | unlike_weights | ~(among(f.size, self._trained_sizes) | had_none))
        # Autograd's thread made one in the recording, and the program's thread none for all its products: it had one.
        older = sized & among(f.size, of_autograd) & ~among(f.size, of_program) & ~by_model & self._multiplies
        last = np.zeros(len(sized), dtype=np.bool_)
        last[np.flatnonzero(older)[-1:]] = True
        return by_model | unlike_weights | last

    @cached_property
    def _by_helpers(self) -> Bool:
        f = self.facts
        return f.is_kind(Kind.STRAY) & (f.stacks.kind[f.timeline.allocations.stack] != Kind.NONE)

    @cached_property
    def _torn(self) -> bool:
        """Stacks are missing."""
        return bool((self.facts.is_kind(Kind.STRAY) & ~self._by_helpers).any())
