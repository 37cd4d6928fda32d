"""Boolean columns that rules test, worked out from the facts. A name here is a word of the rule table."""

from __future__ import annotations

from collections import Counter
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from memtrace.arrays import among, distinct, places
from memtrace.attribution.attention import outgrown
from memtrace.attribution.categories import Category
from memtrace.attribution.compiled import beside_loss
from memtrace.attribution.copies import runs_without_gradients, second_set
from memtrace.attribution.facts import Facts, cut_spans
from memtrace.attribution.frame_tags import Tag
from memtrace.attribution.head import head_stacks
from memtrace.attribution.phases import Phase, optimizer_ranges
from memtrace.attribution.shapes import (
    CUBLAS_WORKSPACE_BYTES,
    adapter_sizes,
    gathered_quantized,
    is_weight_copy,
    quantized_sizes,
    split_scales,
)
from memtrace.attribution.stack_facts import Kind
from memtrace.attribution.strays import threads_by_stack, threads_of
from memtrace.attribution.trained import Trained, find_trained
from memtrace.attribution.unfinished import would_be_held
from memtrace.history.timeline import NEVER
from memtrace.snapshot.model import Action

_AT_ONCE = 1 << 16  # rows
_RESULTS_SHARE = 8  # of a call's tensors, results are at most one in so many
_HARDLY_BEGUN = 100  # allocations
_KEPT_SHARE = 32  # without a graph a pass leaves less of what it made
_ROUND_ELEMENTS = 1_000_000  # buckets of DeepSpeed have 500,000,000 unless told otherwise, two bytes each or four
_LARGE_BYTES = 1 << 20  # below this, sizes coincide too easily to mean anything

Bool = NDArray[np.bool_]
I8 = NDArray[np.int64]


class Signals:
    """All signals of one device's allocations: boolean arrays with one entry an allocation, or one answer for all.

    Kept where more than one rule or signal asks; of millions of allocations each takes megabytes.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.persistent = facts.persistent
        self.stays = facts.stays
        self.outlives_span = facts.outlives_span
        self.held = facts.held
        self.in_trace = facts.born >= 0

    # -- the optimizer and gradients ------------------------------------------------------------------------------

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
        f = self.facts
        steps = f.phases.start[:-1][f.phases.phase == Phase.OPTIMIZER]
        rows, result = np.flatnonzero(self.in_optimizer), np.zeros(len(f.size), dtype=np.bool_)
        following = np.append(steps, -1).astype(np.int32)[places(steps, f.born[rows], side="right")]
        gone = f.outlives_span[rows] & (f.ended[rows] < following)
        stack = f.timeline.allocations.stack[
            rows
        ]  # behind the last step, what the same call left in earlier ones tells
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
    def step_gradients(self) -> Bool:
        """As large as a state, or twice as large as a gradient, and gone before the next step begins."""
        f = self.facts
        sizes = np.concatenate([f.size[self.step_leaves], 2 * f.size[self.trained.gradients]])
        return self._gone_before_next_step & ~self._gone_in_its_call & among(f.size, sizes[sizes >= _LARGE_BYTES])

    @cached_property
    def _frameless(self) -> Bool:
        return self.facts.is_kind(Kind.NONE) & self.in_trace

    @cached_property
    def in_backward(self) -> Bool:
        f = self.facts
        return (f.is_kind(Kind.BACKWARD) & self.in_trace) | (self._frameless & f.in_phase(Phase.BACKWARD))

    @property
    def differentiated(self) -> Bool:
        """Made by autograd, and given up by autograd after the program had gone on and called it again: gradients of
        gradients need it."""
        f = self.facts
        if self._takes_turns:
            return np.zeros(len(f.size), dtype=np.bool_)
        outermost, stack = f.stacks.ends()[1], f.timeline.allocations.stack
        # Hooks that run on autograd's thread are not called by the program.
        callers = outermost[stack[f.is_kind(Kind.FORWARD) & (stack >= 0)]]
        by_program = among(f.stacks.kind, [int(Kind.OTHER), int(Kind.FORWARD), int(Kind.OPTIMIZER)])
        by_program &= among(outermost, callers)
        calls = f.born[by_program[stack] & self.in_trace]
        ended = self.in_backward & (f.death_phase == Phase.BACKWARD) & ~f.freed_by_program
        rows = np.flatnonzero(ended)
        went_on = np.append(calls, NEVER)[np.searchsorted(calls, f.born[rows])]
        ended[rows] = (f.ended[rows] > went_on) & ~among(f.size[rows], self._trained_sizes)
        return ended

    @cached_property
    def trained(self) -> Trained:
        workspaces = self.cublas_frames | self.cublas_once
        return find_trained(self.facts, self.in_backward, self.step_leaves, workspaces | self._stored_quantized)

    @cached_property
    def _trained_sizes(self) -> I8:
        return distinct(self.facts.size[self.trained.gradients | self.trained.weights])

    @property
    def bucket_frames(self) -> Bool:
        f = self.facts
        return f.stacks.is_bucket[f.timeline.allocations.stack] & f.stays & (f.size >= _LARGE_BYTES)

    @property
    def loss_gradients(self) -> Bool:
        """Made in a backward pass, and as large as one of the loss's own tensors or of the head's, and as nothing that
        the layers make."""
        f = self.facts
        made = (self.loss_frames | self.head_frames) & (f.size >= _LARGE_BYTES)
        others = self.in_forward & ~made & ~self.head_copies & ~self.cublas_once
        rows = np.flatnonzero(among(f.size, distinct(f.size[made])))
        size = f.size[rows] * (self._passes.max(initial=0) + 1) + self._passes[rows]  # of each pass its own
        sizes = distinct(size[made[rows]])
        result = np.zeros(len(made), dtype=np.bool_)
        result[rows] = self.in_backward[rows] & among(size, sizes[~among(sizes, size[others[rows]])])
        return result

    @cached_property
    def _passes(self) -> NDArray[np.int32]:
        """The pass that runs, or was the last to run, when each was made; 0 before the first."""
        phases = self.facts.phases
        return places(phases.start[:-1][phases.phase == Phase.FORWARD], self.facts.born, side="right")

    # -- loading --------------------------------------------------------------------------------------------------

    @cached_property
    def adapter_frames(self) -> Bool:
        return self.facts.has(Tag.ADAPTER_INIT) & self.facts.is_kind(Kind.LOAD)

    @cached_property
    def load_frames(self) -> Bool:
        return self.facts.is_kind(Kind.LOAD)

    @property
    def offloaded_weights(self) -> Bool:
        return self.load_frames & (self.facts.stacks.depth[self.facts.timeline.allocations.stack] > 0)

    @cached_property
    def quantizing(self) -> Bool:
        return self.facts.has(Tag.QUANTIZE) & self.facts.is_kind(Kind.LOAD) & self.facts.stays

    @cached_property
    def quantized_storage(self) -> Bool:
        """Packed weights: all that quantisation leaves, less the sites that only leave scales (1/32 or 1/8 of one)."""
        f = self.facts
        stack = f.timeline.allocations.stack
        sizes = distinct(f.size[f.has(Tag.QUANTIZE) & f.is_kind(Kind.LOAD)])  # sharding may replace what was packed
        packed = self.quantizing & (f.size > 2048)
        rows = np.flatnonzero(packed)
        as_scales = among(f.size[rows] * 32, sizes) | among(f.size[rows] * 8, sizes)
        return packed & among(stack, stack[rows[~as_scales]])

    @cached_property
    def in_load(self) -> Bool:
        return self.facts.in_phase(Phase.LOAD, Phase.UNKNOWN) & self.in_trace

    @cached_property
    def among_loading(self) -> Bool:
        """Made while a model was loaded, without a stack (loading functions ran, or the first pass is to come) or by
        code that memtrace does not know."""
        f = self.facts
        unknown = self.lives_through_passes
        if f.size[unknown].sum() > f.size[self._known_weights].sum():
            return (self._frameless | f.is_kind(Kind.OTHER)) & (f.born < f.born[unknown].max())
        if self.load_frames.any():
            return self._frameless
        return self._frameless & (f.born < self._first_pass)

    @cached_property
    def untold(self) -> Bool:
        """Not known to be frozen: something is trained, no adapters are in play, and no backward pass that the
        recording sees from its beginning to its end shows what gets gradients."""
        f, phases = self.facts, self.facts.phases
        none = np.zeros(len(f.size), dtype=np.bool_)
        if not self.trains_whole or self.quantizing.any() or self.dequant_frames.any():
            return none
        backward = phases.phase == Phase.BACKWARD
        if not (backward | (phases.phase == Phase.OPTIMIZER)).any():
            return none | self._may_keep_a_graph
        ended = np.append(phases.phase[1:] != Phase.UNKNOWN, False) & ~cut_spans(phases, f.timeline.trace)
        if not (backward & ended & (phases.start[:-1] > 0)).any() or not (
            self.trained.is_sure or self.trained.weights.any()
        ):
            return ~none
        states = self.step_leaves | self.trained.states | self.masters | self.early_other_states
        if not states.any():  # where are they?
            return f.before_trace & (f.size >= _LARGE_BYTES)
        return among(f.size, self._trained_sizes) if self._takes_turns or self._torn else none

    @property
    def kept_like_weights(self) -> Bool:
        """Whatever else the rules would take for frozen weights."""
        return self.early_persistent | self.lives_through_passes | (self.in_load & self.stays & self.among_loading)

    @property
    def _may_keep_a_graph(self) -> bool:
        """An error ended a pass that left something of each layer, or that had hardly begun."""
        f = self.facts
        made = f.is_kind(Kind.FORWARD) & (f.pass_end == NEVER)
        if not (f.timeline.trace.action == Action.OOM).any() or f.has(Tag.GENERATE).any():
            return False
        site = f.stacks.site[f.timeline.allocations.stack]
        left = made & f.persistent & ~f.has(Tag.KV_CACHE) & ~f.is_loss
        times, of_all = (np.bincount(site[rows], minlength=1).max() for rows in (left, made))
        kept = left.sum() * _KEPT_SHARE > made.sum() or (times > 1 and times * _RESULTS_SHARE > of_all)
        return bool(kept or made.sum() < _HARDLY_BEGUN)

    @property
    def inputs_untold(self) -> Bool:
        """Made by the program, and there when an error ended a pass, in a recording without any backward pass."""
        f = self.facts
        made = self.in_trace & f.is_kind(Kind.OTHER) & self.persistent & (f.size >= _LARGE_BYTES)
        ahead = made & (f.born < self._first_pass) & self._trains & (not self.trains_whole)
        return ahead | (made & self._may_keep_a_graph & (not (f.phases.phase == Phase.BACKWARD).any()))

    # -- forward passes -------------------------------------------------------------------------------------------

    @cached_property
    def in_forward(self) -> Bool:
        f = self.facts
        inside = f.in_phase(Phase.FORWARD, Phase.EVALUATION, Phase.GENERATION) & ~self._untrained
        return (f.is_kind(Kind.FORWARD) | (inside & f.is_kind(Kind.OTHER, Kind.NONE))) & self.in_trace

    @property
    def saved_inputs(self) -> Bool:
        """Made by the program before a pass (or before the pass's first module ran), and given up by autograd in the
        pass's backward; where the recording doesn't see that, as its call site's were before."""
        f = self.facts
        made = (self.in_trace & f.is_kind(Kind.OTHER) & ~f.in_phase(Phase.FORWARD)) | self._by_helpers
        by_autograd = (f.death_phase == Phase.BACKWARD) & ~f.freed_by_program
        by_autograd &= (f.free_stack >= 0) | ~f.in_phase(Phase.OPTIMIZER)  # whoever it was that freed a step's own
        saved = made & by_autograd
        rows = np.flatnonzero(saved)
        saved[rows] = f.phases.span_of(np.minimum(f.ended[rows], len(f.timeline.trace))) > f.span[rows]
        stack = f.timeline.allocations.stack
        return saved | (made & f.persistent & among(stack, stack[saved]))

    @cached_property
    def kept_data(self) -> Bool:
        """Made by the program itself during a pass, and kept beyond two further ones: a store of samples, say."""
        f = self.facts
        made = self.in_forward & f.is_kind(Kind.OTHER) & self.held & f.lives_on
        by_autograd = (f.death_phase == Phase.BACKWARD) & ~f.freed_by_program
        return made & ~by_autograd & (self._passes + 2 <= (f.phases.phase == Phase.FORWARD).sum())

    @cached_property
    def results(self) -> Bool:
        """Left by whole calls of a model that nothing trains, which leave next to nothing else of what they make."""
        f = self.facts
        made = np.flatnonzero(f.is_kind(Kind.FORWARD) & self._untrained & (f.call_end < len(f.timeline.trace)))
        kept = f.ended[made] > f.call_end[made]
        _, call = np.unique(f.call_end[made], return_inverse=True)
        result = np.zeros(len(f.size), dtype=np.bool_)
        result[made] = kept & (np.bincount(call, kept) * _RESULTS_SHARE <= np.bincount(call))[call]
        return result

    @cached_property
    def recomputed(self) -> Bool:
        return self.facts.is_kind(Kind.RECOMPUTE) & self.in_trace

    @cached_property
    def would_be_held(self) -> Bool:
        return would_be_held(self.facts)

    @property
    def checkpointed(self) -> Bool:
        return self.in_forward & self.facts.has(Tag.CHECKPOINT)

    @cached_property
    def loss_frames(self) -> Bool:
        return self.facts.is_loss & self.facts.is_kind(Kind.FORWARD, Kind.OTHER)

    @property
    def loss_saves(self) -> Bool:
        """Kept by a loss for the backward pass, and as large as what layers keep: the gradient of its input."""
        f = self.facts
        kept = self.loss_frames & self.held & (f.death_phase == Phase.BACKWARD) & (f.size >= _LARGE_BYTES)
        layers = self.in_forward & self.held & ~self.loss_frames & f.is_kind(Kind.FORWARD) & ~f.has(Tag.LINEAR)
        kept[kept] = among(f.size[kept], f.size[layers])
        return kept

    @cached_property
    def head_frames(self) -> Bool:
        """What a call of the head leaves last: before its output, autocast makes 16-bit copies of weight and input."""
        f = self.facts
        stack = f.timeline.allocations.stack
        made = f.is_kind(Kind.FORWARD) & ~self.cublas_once & ~self.cublas_frames
        of_head, of_small_head = head_stacks(f.stacks)
        head = of_head[stack] & made
        for linear in (of_small_head[stack], f.has(Tag.LINEAR)):  # the latter outside any
            head |= linear & made & self._as_large_as_loss & ~among(self._passes, self._passes[head])
        followed = np.append(head[1:] & (stack[1:] == stack[:-1]), False)
        return head & ~followed

    @cached_property
    def _as_large_as_loss(self) -> Bool:
        """As large as the loss's largest tensor in 16 or 32 bits, give or take the token that labels are shifted by."""
        size, loss = self.facts.size, self.loss_frames
        largest = np.zeros(self._passes.max(initial=0) + 1, dtype=np.int64)
        np.maximum.at(largest, self._passes[loss], size[loss])
        largest = np.where(largest >= _LARGE_BYTES, largest, size[loss].max(initial=0))
        large = np.flatnonzero(size >= _LARGE_BYTES // 4)
        fits = np.zeros(len(size), dtype=np.bool_)
        for start in range(0, len(large), _AT_ONCE):
            rows = large[start : start + _AT_ONCE]
            of_loss = largest[self._passes[rows]]
            for wanted in (of_loss // 2, of_loss, of_loss * 2):
                fits[rows] |= (np.abs(size[rows] - wanted) * 64 <= wanted) & (of_loss >= _LARGE_BYTES)
        return fits

    @property
    def logits_in_loss(self) -> Bool:
        """Copies of the logits that the loss makes: outside PyTorch's own loss function, and not saved; or inside it,
        in 32 bits, before another tensor of that size or after one of half of it."""
        f = self.facts
        made = self.loss_frames & self._as_large_as_loss & self.head_frames.any()
        rows, stack = np.flatnonzero(made), f.timeline.allocations.stack
        after, before = np.minimum(rows + 1, len(made) - 1), np.maximum(rows - 1, 0)
        copies = (after > rows) & (stack[after] == stack[rows]) & (f.size[after] == f.size[rows])
        copies |= (before < rows) & (stack[before] == stack[rows]) & (f.size[rows] == 2 * f.size[before])
        made[rows] = np.where(f.stacks.has(Tag.CROSS_ENTROPY)[stack[rows]], copies, ~f.held[rows])
        return made

    @cached_property
    def head_copies(self) -> Bool:
        """As large as the head's output in 16 or 32 bits (or as the loss's tensors), made outside the layers, and not
        before the pass's first such output."""
        f = self.facts
        if not self.head_frames.any():
            return self.head_frames
        largest = distinct(f.size[self.head_frames & (f.size > _LARGE_BYTES)])
        depth = f.stacks.depth[f.timeline.allocations.stack]
        outside = (depth < np.min(depth[self.head_frames])) & self.in_trace & f.is_kind(Kind.FORWARD, Kind.OTHER)
        outside &= f.in_phase(Phase.FORWARD, Phase.EVALUATION, Phase.GENERATION)
        first = np.full(self._passes.max(initial=0) + 1, NEVER)
        np.minimum.at(first, self._passes[self.head_frames], f.born[self.head_frames])
        outside &= f.born >= first[self._passes]
        rows = np.flatnonzero(outside)  # a few of millions
        alike = among(f.size[rows], np.concatenate([largest, largest * 2, largest // 2]))
        outside[rows] = alike | self._as_large_as_loss[rows]
        return outside

    @property
    def compiled_logits(self) -> Bool:
        """In compiled code: made by the function that calls the loss, as large as the loss's own in 16 or 32 bits."""
        f = self.facts
        from_loss, from_caller = (each[f.timeline.allocations.stack] for each in beside_loss(f.stacks))
        largest = f.size[from_loss & self.in_trace].max(initial=0)
        made = from_caller & f.is_kind(Kind.FORWARD) & f.in_phase(Phase.FORWARD, Phase.EVALUATION)
        return made & (f.size >= _LARGE_BYTES) & among(f.size, np.array([largest // 2, largest, largest * 2]))

    @property
    def attention_matrices(self) -> Bool:
        """Inside attention, and clearly larger than the queries of the same pass: tokens by tokens, not by width. Where
        no rotary embedding shows the queries, larger than whatever the modules inside the same module make."""
        f = self.facts
        inside = f.has(Tag.ATTENTION) & f.is_kind(Kind.FORWARD, Kind.RECOMPUTE) & self.in_trace
        queries = np.zeros(len(f.phases) + 1, dtype=np.int64)
        rotary = f.has(Tag.ROPE) & self.in_trace & ~self.cublas_once & ~self.cublas_frames
        rows = np.flatnonzero(rotary)
        np.maximum.at(queries, f.span[rows], f.size[rows])
        known = self.cublas_once | self.cublas_frames | self.dequant_frames | self.weight_copies | self.head_frames
        known |= self.gathered | self.reduced
        found, rows = outgrown(f, known), np.flatnonzero(inside)
        limit = (queries * 5 // 4)[f.span[rows]]
        found[rows] |= (limit > 0) & (f.size[rows] > limit)
        stack, older = f.timeline.allocations.stack, np.flatnonzero(f.before_trace)  # than a ring's beginning
        found[older] |= among(stack[older], stack[found])
        return found

    @property
    def kv_cache(self) -> Bool:
        """Kept from one call of the model to the next: by cache code, or from a call site of which most of what is gone
        was freed by the model itself in a later call."""
        f = self.facts
        kept = f.is_kind(Kind.FORWARD, Kind.OTHER) & (f.ended > f.call_end) & (f.death_phase != Phase.BACKWARD)
        rows, stack = np.flatnonzero(kept), f.timeline.allocations.stack
        # Of a call that the recording does not see end, what such calls' tensors became decides.
        saved = f.stacks.site[stack[f.has(Tag.KV_CACHE) & (f.death_phase == Phase.BACKWARD)]]
        rows = rows[(f.call_end[rows] < len(f.timeline.trace)) | ~among(f.stacks.site[stack[rows]], saved)]
        by_cache = f.stacks.has(Tag.KV_CACHE)[stack[rows]]
        by_model = (f.stacks.kind[f.free_stack[rows]] == Kind.FORWARD) & (f.free_stack[rows] >= 0)
        replaced = rows[by_model & (f.kind[rows] == Kind.FORWARD) & ~f.persistent[rows]]
        result = np.zeros(len(kept), dtype=np.bool_)
        if len(replaced) and not self._takes_turns:
            site = f.stacks.site[stack]
            gone = np.bincount(site[self.in_trace & ~f.persistent] + 1, minlength=site.max(initial=0) + 2)
            by_cache |= (np.bincount(site[replaced] + 1, minlength=len(gone)) * 2 > gone)[site[rows] + 1]
        result[rows[by_cache]] = True
        return result

    @property
    def _untrained(self) -> Bool:
        """Made in a pass of a program that trains nothing, as far as the recording shows."""
        return self.in_trace & np.append(self.facts.phases.step < 0, True)[self.facts.span]

    @property
    def cast_for_good(self) -> Bool:
        """A quantised linear module casts its bias once and keeps it: made in the first pass only."""
        f = self.facts
        made_once = f.has(Tag.QUANT_MODULE) & f.is_kind(Kind.FORWARD) & f.persistent & (f.pass_end < NEVER)
        made_once &= f.span >= 0
        # The recording goes on past the pass, and no later pass makes this size at this call site.
        stack = f.timeline.allocations.stack
        alike = np.flatnonzero(among(stack, stack[made_once]))
        key = stack[alike].astype(np.int64) * (1 << 42) + np.minimum(f.size[alike], (1 << 42) - 1)
        _, inverse = np.unique(key, return_inverse=True)
        last_span = np.full(inverse.max(initial=-1) + 1, -1, dtype=np.int64)
        np.maximum.at(last_span, inverse, f.span[alike])
        made_once[alike] &= last_span[inverse] == f.span[alike]
        return made_once

    # -- products with quantised weights, workspaces, communication -------------------------------------------------

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
        # Outside passes (an adapter's first product, say): what a line leaves once, the first time, of all it makes.
        rows = np.flatnonzero(sized & f.is_kind(Kind.LOAD, Kind.OTHER))
        alike = np.flatnonzero(among(stack, stack[rows]))
        kept = np.bincount(stack[alike[f.persistent[alike]]] + 1, minlength=len(f.stacks.kind))[stack[rows] + 1]
        made = np.bincount(stack[alike] + 1, minlength=len(f.stacks.kind))[stack[rows] + 1]
        first = np.full(len(f.stacks.kind), len(stack))
        np.minimum.at(first, stack[alike], alike)
        is_first = (first[stack[rows]] == rows) | (first[stack[rows]] == rows - 1)  # the product's output comes before
        result = np.zeros(len(stack), dtype=np.bool_)
        result[rows] = is_first & (kept == 1) & (made > 2)
        # Compiled code has its products write where it wants them; what outlives the next pass is no activation.
        result |= sized & f.has(Tag.COMPILED) & f.is_kind(Kind.FORWARD) & (f.pass_end < NEVER) & f.followed
        calls = [Kind.FORWARD, *([] if f.stacks.has(Tag.CALL).any() else [Kind.OTHER])]  # functions on plain tensors
        sized &= f.is_kind(*calls, Kind.NONE, Kind.BACKWARD, Kind.RECOMPUTE)
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

    @property
    def communication(self) -> Bool:
        """Within a pass, what a collective makes is the model's: what becomes of it decides."""
        of_model = self.facts.is_kind(Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD) & ~self.facts.has(Tag.ENGINE_CPP)
        return self.facts.has(Tag.COMM) & ~of_model

    @cached_property
    def gathered(self) -> Bool:
        return self.facts.has(Tag.GATHER) & self.in_trace

    @property
    def gathered_trained(self) -> Bool:
        """Whole copies of trained weights: of all where no adapters are in play, else of those whose size whole
        gradients have."""
        return self.gathered & (
            among(self.facts.size, self.facts.size[self.reduced & ~self.gathered]) | self.trains_whole
        )

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

    # -- before the recording ---------------------------------------------------------------------------------------

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
    def early_zeroed(self) -> Bool:
        f = self.facts
        return self.early & (f.free_stack >= 0) & f.stacks.has(Tag.ZERO_GRAD)[f.free_stack]

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
        given_up = self.early & (f.size >= _LARGE_BYTES) & (f.death_phase == Phase.OPTIMIZER)
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
        worked = self.in_optimizer & f.is_kind(Kind.OPTIMIZER) & (f.size >= _LARGE_BYTES) & ~self.step_leaves
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
    def early_buckets(self) -> Bool:
        f = self.facts
        return self.early & (f.free_stack >= 0) & f.stacks.has(Tag.BUCKET)[f.free_stack]

    @property
    def early_saved(self) -> Bool:
        """Sharded training frees gathered weights and reduced gradients there, too."""
        sharded = bool(self.facts.stacks.has(Tag.GATHER | Tag.REDUCE).any())
        return self.early & (self.facts.death_phase == Phase.BACKWARD) & (not sharded)

    @property
    def early_held(self) -> Bool:
        after = among(self.facts.death_phase, [Phase.BETWEEN, Phase.FORWARD])
        return self.early & ~self.persistent & after & (not self._torn)

    @cached_property
    def early_persistent(self) -> Bool:
        return self.early & self.persistent

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
        large = self.facts.size >= _LARGE_BYTES
        return second_set(self.facts, self.trained.weights & large, self._early_rest & large)

    @property
    def early_followers(self) -> Bool:
        """Copies of weights that no pass runs: a teacher's or a reference's runs in each step, without gradients."""
        return self._early_copies & self.trains_whole & (not runs_without_gradients(self.facts))

    def _few_untrained(self, rest: Bool, at_most: int = 0) -> Bool:
        """The large ones of ``rest``, where whole models are trained and most else that stays gets gradients."""
        rest = rest & (self.facts.size >= _LARGE_BYTES) & self.trains_whole
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
        flat = self.early_sharded & ~self.masters & (f.size >= _LARGE_BYTES)
        result = flat & (f.size % (2 * _ROUND_ELEMENTS) == 0)
        for size, count in Counter((f.size[self.masters] // 2).tolist()).items():
            result[np.flatnonzero(flat & (f.size == size))[count:]] = True
        return result

    @property
    def _stored_quantized(self) -> Bool:
        return self.early_scales | self.early_quantized

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
            had_none = among(f.size, np.intersect1d(of_autograd, of_program))
            return sized & (by_model | unlike_weights | ~(among(f.size, self._trained_sizes) | had_none))
        # Autograd's thread made one in the recording, and the program's thread none for all its products: it had one.
        older = sized & among(f.size, of_autograd) & ~among(f.size, of_program) & ~by_model & self._multiplies
        last = np.zeros(len(sized), dtype=np.bool_)
        last[np.flatnonzero(older)[-1:]] = True
        return by_model | unlike_weights | last

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

    # -- the rest -----------------------------------------------------------------------------------------------------

    @property
    def short_lived(self) -> Bool:
        """Freed again, and outside the phases, which lifetimes alone don't tell for sure; a missing stack says so only
        where some pass is known."""
        seen = self.in_trace & (~self.facts.is_kind(Kind.STRAY) | self._by_helpers)
        seen &= (self._trains | ~self._frameless) & ~self.unsure_backward
        return seen & ~self.persistent & (not self.facts.blind)

    @cached_property
    def _by_helpers(self) -> Bool:
        f = self.facts
        return f.is_kind(Kind.STRAY) & (f.stacks.kind[f.timeline.allocations.stack] != Kind.NONE)

    @cached_property
    def in_known_pass(self) -> Bool:
        """Where neither stacks nor recorded steps confirm phases, they are as often wrong as right about long lives;
        and what never ends tells nothing there."""
        return ~self.unended & (not self.facts.guessed)

    @cached_property
    def unsure_backward(self) -> Bool:
        """Without a stack, and not gone with the backward pass, where stacks are missing or threads take turns."""
        f = self.facts
        kept = self.persistent | f.outlives_span
        return self._frameless & kept & (self._torn or self._takes_turns)

    @cached_property
    def _torn(self) -> bool:
        """Stacks are missing."""
        return bool((self.facts.is_kind(Kind.STRAY) & ~self._by_helpers).any())

    @property
    def unsure_forward(self) -> Bool:
        """Where stacks are missing, a pass is not known to have ended, nor what never ends to be short-lived; and what
        the model itself gave up was not kept for a backward pass."""
        f = self.facts
        by_model = (f.free_stack >= 0) & (f.stacks.kind[f.free_stack] == Kind.FORWARD)
        return self.unended | ((self.persistent & ~f.held | by_model & f.held) & self._torn)

    @cached_property
    def _takes_turns(self) -> bool:
        return len(threads_of(self.facts.stacks, Kind.FORWARD)) > 1

    @property
    def unended(self) -> Bool:
        """Never freed, where lifetimes alone tell the phases."""
        return self.persistent & self.facts.blind

    @property
    def left_by_layers(self) -> Bool:
        """Where lifetimes tell the phases: made by the model's forward pass and still there when the program ran out of
        memory, from call sites that left more than one."""
        f = self.facts
        left = f.is_kind(Kind.FORWARD) & self.persistent & self.in_trace
        asked = f.timeline.trace.action[among(f.timeline.trace.action, [Action.ALLOC, Action.OOM])]
        ran_out = f.blind and asked[-1:] == Action.OOM and not f.stacks.has(Tag.GENERATE).any()
        site = f.stacks.site[f.timeline.allocations.stack]
        return left & (np.bincount(site[left] + 1, minlength=site.max(initial=0) + 2)[site + 1] > 1) & ran_out

    @cached_property
    def _known_weights(self) -> Bool:
        return (self.load_frames | self.facts.before_trace) & self.facts.stays

    @cached_property
    def lives_through_passes(self) -> Bool:
        """Made by unknown code before the first pass and alive until the last one: what a model consists of, where
        this is more than what loading code left, and that is not trained (beside a model that is, it may be data), and
        the recorder did not say which tensors weights are; else what was made in the midst of loading, or as a weight's
        copy."""
        f = self.facts
        passes = f.phases.start[:-1][f.phases.phase == Phase.FORWARD]
        ready = (f.born < self._first_pass) & f.is_kind(Kind.OTHER) & self.in_trace & ~f.has(Tag.KV_CACHE)
        unknown = ready & (f.persistent | (f.ended > (passes[-1] if len(passes) else NEVER)))
        more = f.size[unknown].sum() > f.size[self._known_weights].sum()
        labelled = any(
            label.get("category") in (Category.BASE_WEIGHTS, Category.LORA) for label in f.timeline.snapshot.labels
        )
        if more and not labelled and not (self.trained.weights & self.load_frames & f.stays).any():
            return unknown & ~self._few_untrained(unknown & ~self.trained.weights)
        loaded = f.born[self.load_frames & f.stays]
        between = (f.born > loaded.min(initial=NEVER)) & (f.born < loaded.max(initial=-1))
        copies = among(f.size, f.size[self._known_weights])
        return ready & (f.size >= _LARGE_BYTES) & f.persistent & (copies | between)

    @property
    def other_frames(self) -> Bool:
        return (self.in_trace & self.facts.is_kind(Kind.OTHER, Kind.LOAD)) | self._by_helpers
