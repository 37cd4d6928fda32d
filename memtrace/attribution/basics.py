"""What other signals rest on: whose steps and passes allocations were made in, what is trained, workspaces."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from memtrace.arrays import among, distinct, places
from memtrace.attribution.facts import Facts
from memtrace.attribution.frame_tags import Tag
from memtrace.attribution.phases import Phase, optimizer_ranges
from memtrace.attribution.shapes import (
    CUBLAS_WORKSPACE_BYTES,
    gathered_quantized,
    is_weight_copy,
    quantized_sizes,
    split_scales,
)
from memtrace.attribution.stack_facts import Kind
from memtrace.attribution.strays import threads_by_stack
from memtrace.attribution.trained import Trained, find_trained
from memtrace.history.timeline import NEVER

LARGE_BYTES = 1 << 20  # below this, sizes coincide too easily to mean anything

Bool = NDArray[np.bool_]
I8 = NDArray[np.int64]


class Basics:
    """Columns that other signals are made of."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.persistent = facts.persistent
        self.stays = facts.stays
        self.outlives_span = facts.outlives_span
        self.held = facts.held
        self.in_trace = facts.born >= 0

    # -- the optimizer and gradients -----------------------------------------------------------------------------------

    @cached_property
    def in_optimizer(self) -> Bool:
        f = self.facts
        by_hand = f.in_phase(Phase.OPTIMIZER) & f.is_kind(Kind.NONE, Kind.OTHER) & self.in_trace
        return f.is_kind(Kind.OPTIMIZER) | by_hand

    @cached_property
    def step_leaves(self) -> Bool:
        """Made in an optimizer step and alive after it. In a step that the recording does not see end: alive, and from
        a call site that left something in earlier steps, else from a function that makes states, else from a call site
        that left more than what it made last. What is gone before the next step begins is no state."""
        f = self.facts
        kept = self.in_optimizer & (f.outlives_span | (f.before_trace & f.persistent)) & ~self._gone_before_next_step
        kept &= ~self._gone_in_its_call
        alive = self.in_optimizer & f.persistent & (f.span == len(f.phases) - 1)
        stack = f.timeline.allocations.stack
        left_several = np.bincount(stack[alive] + 1, minlength=len(f.stacks.kind)) > 1
        if kept.any():
            return kept | (alive & among(stack, stack[kept]))
        alive &= ~among(stack, stack[self.in_optimizer & ~alive & (f.span >= 0)])  # left nothing before
        makes_states = f.has(Tag.OPTIMIZER_STATE)
        return alive & makes_states if (self.in_optimizer & makes_states).any() else alive & left_several[stack + 1]

    @cached_property
    def _gone_before_next_step(self) -> Bool:
        """But for states, which the program itself may put others in the place of."""
        f = self.facts
        steps = f.phases.start[:-1][f.phases.phase == Phase.OPTIMIZER]
        rows = np.flatnonzero(self.in_optimizer & ~f.has(Tag.OPTIMIZER_STATE))
        result = np.zeros(len(f.size), dtype=np.bool_)
        following = np.append(steps, -1).astype(np.int32)[places(steps, f.born[rows], side="right")]
        gone = f.outlives_span[rows] & (f.ended[rows] < following)
        stack = f.timeline.allocations.stack[rows]
        # Behind the last step, what the same call left in earlier ones tells.
        result[rows] = gone | (~f.persistent[rows] & (following < 0) & among(stack, stack[gone]))
        return result

    @cached_property
    def _gone_in_its_call(self) -> Bool:
        """Given up before the recorded step that made it was over: LBFGS runs several passes in one."""
        f = self.facts
        calls = np.array(optimizer_ranges(f.timeline.trace, f.timeline.snapshot.annotations)).reshape(-1, 2)
        rows, result = np.flatnonzero(self.in_optimizer), np.zeros(len(f.size), dtype=np.bool_)
        end = np.append(calls[:, 1], -1)[places(calls[:, 0], f.born[rows], side="right") - 1]
        result[rows] = (f.born[rows] < end) & (f.ended[rows] < end)
        return result

    @cached_property
    def _frameless(self) -> Bool:
        return self.facts.is_kind(Kind.NONE) & self.in_trace

    @cached_property
    def in_backward(self) -> Bool:
        f = self.facts
        return (f.is_kind(Kind.BACKWARD) & self.in_trace) | (self._frameless & f.in_phase(Phase.BACKWARD))

    @cached_property
    def trained(self) -> Trained:
        workspaces = self.cublas_frames | self.cublas_once
        return find_trained(self.facts, self.in_backward, self.step_leaves, workspaces | self._stored_quantized)

    @cached_property
    def _trained_sizes(self) -> I8:
        return distinct(self.facts.size[self.trained.gradients | self.trained.weights])

    # -- loading -------------------------------------------------------------------------------------------------------

    @cached_property
    def load_frames(self) -> Bool:
        return self.facts.is_kind(Kind.LOAD)

    # -- products with quantised weights, workspaces, communication ----------------------------------------------------

    @cached_property
    def dequant_frames(self) -> Bool:
        f = self.facts
        return f.has(Tag.DEQUANT) & f.is_kind(Kind.FORWARD, Kind.BACKWARD, Kind.RECOMPUTE)

    @cached_property
    def weight_copies(self) -> Bool:
        return is_weight_copy(self.facts)

    @cached_property
    def cublas_frames(self) -> Bool:
        return self.facts.has(Tag.CUBLAS) & self.facts.persistent

    @cached_property
    def cublas_once(self) -> Bool:
        """A known workspace size that stays, from code that also allocates something else right beside it."""
        f = self.facts
        sized = among(f.size, CUBLAS_WORKSPACE_BYTES) & f.persistent & self.in_trace
        # Code that gives up other things in the midst of the program gives up no workspace at its end.
        rows = np.flatnonzero(sized & (f.free_stack >= 0) & (f.stacks.kind[f.free_stack] != Kind.NONE))
        if len(rows):
            sized[rows] = ~among(f.free_stack[rows], f.free_stack[f.ended < NEVER])
        stack = f.timeline.allocations.stack
        # Outside modules (an adapter's first product, say): what a line leaves once, the first time, of all it makes.
        functions = [] if f.stacks.has(Tag.CALL).any() else [Kind.FORWARD, Kind.OTHER]  # on plain tensors
        rows = np.flatnonzero(sized & f.is_kind(Kind.LOAD, Kind.OTHER, *functions))
        alike = np.flatnonzero(among(stack, stack[rows]))
        stays = alike[f.persistent[alike] & (f.pass_end[alike] != NEVER)]  # in a pass that is cut short, anything does
        kept = np.bincount(stack[stays] + 1, minlength=len(f.stacks.kind))[stack[rows] + 1]
        made = np.bincount(stack[alike] + 1, minlength=len(f.stacks.kind))[stack[rows] + 1]
        first = np.full(len(f.stacks.kind), len(stack))
        np.minimum.at(first, stack[alike], alike)
        is_first = (first[stack[rows]] == rows) | (first[stack[rows]] == rows - 1)  # the product's output comes before
        result = np.zeros(len(stack), dtype=np.bool_)
        result[rows] = is_first & (kept == 1) & (made > 2)
        # Compiled code has its products write where it wants them; what outlives the next pass is no activation.
        result |= sized & f.has(Tag.COMPILED) & f.is_kind(Kind.FORWARD) & (f.pass_end < NEVER) & f.followed
        sized &= f.is_kind(Kind.FORWARD, *functions, Kind.NONE, Kind.BACKWARD, Kind.RECOMPUTE)
        # Rings that lost their beginning: of what is older and still there, the final state has the stack.
        older = self.early_persistent & among(f.size, CUBLAS_WORKSPACE_BYTES) & f.is_kind(Kind.FORWARD, Kind.BACKWARD)
        own = threads_by_stack(f.stacks)
        seen = {
            (int(f.size[row]), int(own[stack[row]]) if f.kind[row] == Kind.FORWARD else 0)
            for row in np.flatnonzero(older).tolist()
        }
        for row in np.flatnonzero(sized).tolist():
            by_autograd = f.kind[row] == Kind.BACKWARD or (
                f.kind[row] == Kind.NONE and f.phase[row] in (Phase.BACKWARD, Phase.UNKNOWN)
            )
            # A forward pass that the recording stops in holds activations of any size: there, a workspace shows by
            # another allocation of the same line right beside it. Autograd's thread makes its own with its first
            # product, before anything else of that size stays.
            near = [other for other in (row - 1, row + 1) if 0 <= other < len(f.size)]
            beside = any(stack[other] == stack[row] and f.size[other] != f.size[row] for other in near)
            thread = (int(f.size[row]), 0 if by_autograd or f.kind[row] == Kind.RECOMPUTE else int(own[stack[row]]))
            if (beside or by_autograd) and thread not in seen:
                seen.add(thread)
                result[row] = True
        return result

    @cached_property
    def gathered(self) -> Bool:
        return self.facts.has(Tag.GATHER) & self.in_trace

    @cached_property
    def reduced(self) -> Bool:
        """Buffers that reduce gradients, what comes out of them, and the whole gradients that go in."""
        f = self.facts
        given_up = (f.free_stack >= 0) & f.stacks.has(Tag.REDUCE)[f.free_stack] & self.in_backward
        lasting = self.in_backward | f.outlives_span | f.stays  # not what setting up or a step makes for itself
        return (f.has(Tag.REDUCE) & self.in_trace & lasting) | given_up

    @cached_property
    def trains_whole(self) -> bool:
        """No adapters are in play."""
        return not self.facts.stacks.has(Tag.ADAPTER_INIT | Tag.LORA).any()

    # -- before the recording ------------------------------------------------------------------------------------------

    @cached_property
    def early(self) -> Bool:
        """There before the recording began, or made without a stack before its first pass."""
        f = self.facts
        unseen = self._frameless & (f.born < self._first_pass) & f.stays
        return (f.before_trace | unseen) & ~self.load_frames & self._trains

    @cached_property
    def _first_pass(self) -> int:
        phases = self.facts.phases
        passes = np.flatnonzero(among(phases.phase, [Phase.FORWARD, Phase.BACKWARD, Phase.EVALUATION]))
        return int(phases.start[passes[0]]) if len(passes) else -1

    @cached_property
    def _trains(self) -> bool:
        return bool(among(self.facts.phases.phase, [Phase.FORWARD, Phase.BACKWARD, Phase.EVALUATION]).any())

    @cached_property
    def early_persistent(self) -> Bool:
        return self.early & self.persistent

    @property
    def _stored_quantized(self) -> Bool:
        return self.early_scales | self.early_quantized

    @cached_property
    def early_quantized(self) -> Bool:
        f = self.facts
        copies = distinct(f.size[(self.dequant_frames | self.weight_copies) & self.in_trace])
        copies = copies[~among(copies * 32, copies)]  # fp32 scales: 1/8 of a packed weight, 1/32 of its copy
        stored, _ = quantized_sizes(f)
        return self.early_persistent & among(f.size * 4, copies) & among(f.size, stored)

    @cached_property
    def early_scales(self) -> Bool:
        f, scales = self.facts, split_scales(self.facts, self.early_persistent, self.early_quantized)
        # Scales of matrices that sharding cuts stay whole; of eight ranks, each shard is as large.
        shards = distinct(f.size[self.early_persistent | self.gathered]).tolist()
        whole = gathered_quantized(f).tolist()
        cut = [size for size in whole if any(size % shard == 0 for shard in shards if size < shard * 8 < size * 8)]
        return scales | (self.early_persistent & among(f.size * 8, cut))
