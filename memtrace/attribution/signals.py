"""Boolean columns that rules test, worked out from the facts. A name here is a word of the rule table."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from memtrace.arrays import among, distinct, places
from memtrace.attribution.attention import outgrown
from memtrace.attribution.basics import LARGE_BYTES
from memtrace.attribution.categories import Category
from memtrace.attribution.compiled import beside_loss
from memtrace.attribution.early import EarlySignals
from memtrace.attribution.facts import cut_spans
from memtrace.attribution.frame_tags import Tag
from memtrace.attribution.head import head_stacks
from memtrace.attribution.phases import Phase
from memtrace.attribution.stack_facts import Kind
from memtrace.attribution.strays import threads_of
from memtrace.attribution.unfinished import would_be_held
from memtrace.history.timeline import NEVER
from memtrace.snapshot.model import Action

_AT_ONCE = 1 << 16  # rows
_RESULTS_SHARE = 8  # of a call's tensors, results are at most one in so many
_HARDLY_BEGUN = 100  # allocations
_KEPT_SHARE = 32  # without a graph a pass leaves less of what it made

Bool = NDArray[np.bool_]


class Signals(EarlySignals):
    """All signals of one device's allocations: boolean arrays with one entry an allocation, or one answer for all.

    Kept where more than one rule or signal asks; of millions of allocations each takes megabytes.
    """

    # -- the optimizer and gradients -----------------------------------------------------------------------------------

    @property
    def bucket_frames(self) -> Bool:
        f = self.facts
        return f.stacks.is_bucket[f.timeline.allocations.stack] & f.stays & (f.size >= LARGE_BYTES)

    @property
    def loss_gradients(self) -> Bool:
        """Made in a backward pass, and as large as one of the loss's own tensors or of the head's, and as nothing that
        the layers make."""
        f = self.facts
        made = (self.loss_frames | self.head_frames) & (f.size >= LARGE_BYTES)
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

    @cached_property
    def put_in_place(self) -> tuple[Bool, Bool]:
        """(made by the program behind a step, and kept; gradients), of large sizes of which later backward passes leave
        gradients and which no older weight has: weights of other sizes than those before, and states."""
        f = self.facts
        large = (f.size >= LARGE_BYTES) & ~among(f.size, self._trained_sizes)
        made = large & f.is_kind(Kind.OTHER) & f.in_phase(Phase.BETWEEN, Phase.BACKWARD) & f.stays & self.in_trace
        zeroed = (f.free_stack >= 0) & f.stacks.has(Tag.ZERO_GRAD)[f.free_stack]
        left = large & self.in_backward & f.is_kind(Kind.NONE) & (f.outlives_span | zeroed | f.persistent)
        put = made & among(f.size, f.size[left & zeroed])
        stack = f.timeline.allocations.stack  # behind the last step, what the same code put there before tells
        return put | (made & f.persistent & among(stack, stack[put])), left & among(f.size, f.size[put])

    # -- loading -------------------------------------------------------------------------------------------------------

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
            return f.before_trace & (f.size >= LARGE_BYTES)
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
        began = f.blind or (f.phases.phase == Phase.FORWARD).any()  # else it died loading
        return bool(kept or (began and made.sum() < _HARDLY_BEGUN))

    @property
    def inputs_untold(self) -> Bool:
        """Made by the program, and there when an error ended a pass, in a recording without any backward pass."""
        f = self.facts
        made = self.in_trace & f.is_kind(Kind.OTHER) & self.persistent & (f.size >= LARGE_BYTES)
        if not self._trains:  # it died loading, or in functions on plain tensors
            return made & bool((f.timeline.trace.action == Action.OOM).any())
        ahead = made & (f.born < self._first_pass) & (not self.trains_whole)
        return ahead | (made & self._may_keep_a_graph & (not (f.phases.phase == Phase.BACKWARD).any()))

    # -- forward passes ------------------------------------------------------------------------------------------------

    @cached_property
    def in_forward(self) -> Bool:
        f = self.facts
        inside = f.in_phase(Phase.FORWARD, Phase.EVALUATION) & ~self._untrained
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
        kept = self.loss_frames & self.held & (f.death_phase == Phase.BACKWARD) & (f.size >= LARGE_BYTES)
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
        with_loss = among(self._passes, distinct(self._passes[self.loss_frames]))
        for linear in (of_small_head[stack], f.has(Tag.LINEAR) & with_loss):  # the latter outside any
            head |= linear & made & self._as_large_as_loss & ~among(self._passes, self._passes[head])
        followed = np.append(head[1:] & (stack[1:] == stack[:-1]), False)
        return head & ~followed

    @cached_property
    def _as_large_as_loss(self) -> Bool:
        """As large as the loss's largest tensor in 16 or 32 bits, give or take the token that labels are shifted by."""
        size, loss = self.facts.size, self.loss_frames
        largest = np.zeros(self._passes.max(initial=0) + 1, dtype=np.int64)
        np.maximum.at(largest, self._passes[loss], size[loss])
        largest = np.where(largest >= LARGE_BYTES, largest, size[loss].max(initial=0))
        large = np.flatnonzero(size >= LARGE_BYTES // 4)
        fits = np.zeros(len(size), dtype=np.bool_)
        for start in range(0, len(large), _AT_ONCE):
            rows = large[start : start + _AT_ONCE]
            of_loss = largest[self._passes[rows]]
            for wanted in (of_loss // 2, of_loss, of_loss * 2):
                fits[rows] |= (np.abs(size[rows] - wanted) * 64 <= wanted) & (of_loss >= LARGE_BYTES)
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
        largest = distinct(f.size[self.head_frames & (f.size > LARGE_BYTES)])
        depth = f.stacks.depth[f.timeline.allocations.stack]
        outside = (depth < np.min(depth[self.head_frames])) & self.in_trace & f.is_kind(Kind.FORWARD, Kind.OTHER)
        outside &= f.in_phase(Phase.FORWARD, Phase.EVALUATION)
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
        return made & (f.size >= LARGE_BYTES) & among(f.size, np.array([largest // 2, largest, largest * 2]))

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

    # -- products with quantised weights, workspaces, communication ----------------------------------------------------

    @property
    def communication(self) -> Bool:
        """Within a pass, what a collective makes is the model's: what becomes of it decides."""
        of_model = self.facts.is_kind(Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD) & ~self.facts.has(Tag.ENGINE_CPP)
        return self.facts.has(Tag.COMM) & ~of_model

    @property
    def gathered_trained(self) -> Bool:
        """Whole copies of trained weights: of all where no adapters are in play, else of those whose size whole
        gradients have."""
        return self.gathered & (
            among(self.facts.size, self.facts.size[self.reduced & ~self.gathered]) | self.trains_whole
        )

    # -- the rest ------------------------------------------------------------------------------------------------------

    @property
    def short_lived(self) -> Bool:
        """Freed again, and outside the phases, which lifetimes alone don't tell for sure; a missing stack says so only
        where some pass is known."""
        seen = self.in_trace & (~self.facts.is_kind(Kind.STRAY) | self._by_helpers)
        seen &= (self._trains | ~self._frameless) & ~self.unsure_backward
        return seen & ~self.persistent & (not self.facts.blind)

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
        if not f.blind or f.stacks.has(Tag.GENERATE).any():
            return np.zeros(len(f.size), dtype=np.bool_)
        left = f.is_kind(Kind.FORWARD) & self.persistent & self.in_trace
        asked = f.timeline.trace.action[among(f.timeline.trace.action, [Action.ALLOC, Action.OOM])]
        ran_out = (asked[-1:] == Action.OOM).any()
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
        return ready & (f.size >= LARGE_BYTES) & f.persistent & (copies | between)

    @property
    def other_frames(self) -> Bool:
        return (self.in_trace & self.facts.is_kind(Kind.OTHER, Kind.LOAD)) | self._by_helpers
