"""The table that decides: rules in order, the first that fits an allocation gives its category.

A rule has an id (shown by ``report --why``), the kind of evidence it rests on, the answer, a test over
:class:`Signals` (boolean columns, one entry an allocation) and a sentence that says why the test means that.
To teach memtrace something new, add a line here or, without touching code, a pattern in a rules file
(:mod:`memtrace.attribution.user_rules`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memtrace.attribution.categories import Category, Evidence, Purpose
from memtrace.attribution.frame_tags import Tag
from memtrace.attribution.signals import Signals

Bool = NDArray[np.bool_]
P, E = Purpose, Evidence


class Rule(NamedTuple):
    """One line of the table."""

    id: str
    purpose: Purpose
    evidence: Evidence
    test: Callable[[Signals], Bool]
    why: str

    @property
    def category(self) -> Category:
        """The purpose's category."""
        return self.purpose.category

    @property
    def subcategory(self) -> str:
        """The purpose's subcategory."""
        return self.purpose.subcategory


_UNTOLD = "as weights are kept, but no backward pass that this recording has whole tells whether they are trained"

RULES: tuple[Rule, ...] = (
    # Workspaces: one a thread and stream, made by the first product, never given back.
    Rule("cublas-frame", P.CUBLAS_WORKSPACE, E.FRAME, lambda s: s.cublas_frames,
         "allocated inside cuBLAS' workspace function"),
    Rule("cublas-once", P.CUBLAS_WORKSPACE, E.SHAPE, lambda s: s.cublas_once,
         "a workspace's size, made once beside a product's output and never freed, while the same code ran again without it"),
    Rule("communication", P.COMMUNICATION, E.FRAME, lambda s: s.communication,
         "allocated inside a collective communication call"),
    # Sharded data parallel
    Rule("gathered-trained", P.TRAINED_GATHERED, E.FRAME, lambda s: s.gathered_trained,
         "made where sharded training brings weights together, and no adapters are in play, or gradients of its size are reduced: a copy of trained weights"),
    Rule("gathered", P.GATHERED, E.FRAME, lambda s: s.gathered,
         "made where sharded training brings weights together"),
    Rule("sharded-weight", P.PARAMS, E.FRAME, lambda s: s.facts.has(Tag.SHARDS) & s.stays & s.in_trace,
         "made where trained weights are laid out in shards, and it stayed"),
    Rule("master-copy", P.OPTIMIZER_STATE, E.FRAME, lambda s: s.facts.has(Tag.MASTERS) & s.stays & s.in_trace,
         "made where an optimizer of shards is set up, and it stayed"),
    Rule("reduced-gradient", P.GRADS, E.FRAME, lambda s: s.reduced,
         "made or given up where sharded training reduces gradients"),
    # What the program itself makes for a pass
    Rule("saved-input", P.SAVED, E.LIFETIME, lambda s: s.saved_inputs,
         "made by the program ahead of a pass's modules, at a call site whose tensors autograd gives up in the backward pass"),
    # The optimizer
    Rule("replaced-weight", P.PARAMS, E.NEIGHBOUR, lambda s: s.trained.weights & s.in_optimizer,
         "made in the optimizer step, of a trained weight's size, just before the step freed that one"),
    Rule("optimizer-state", P.OPTIMIZER_STATE, E.LIFETIME, lambda s: s.step_leaves,
         "made in the optimizer step and kept: alive after it, or, where the recording stops in the step, from a call site that leaves states"),
    Rule("step-gradient", P.GRADS, E.LIFETIME, lambda s: s.step_gradients,
         "made in the optimizer step, as large as its states, and gone before the next step: a gradient in their precision"),
    Rule("optimizer-temporary", P.OPTIMIZER, E.LIFETIME, lambda s: s.in_optimizer,
         "made during the optimizer step and {ended}"),
    # Gradients
    Rule("gradient-bucket", P.GRADS, E.FRAME, lambda s: s.bucket_frames,
         "a bucket that data-parallel training gathers gradients in"),
    Rule("gradient", P.GRADS, E.LIFETIME, lambda s: s.trained.gradients,
         "made in the backward pass, kept by the program when autograd was through with it, and of a trained weight's size"),
    Rule("master", P.OPTIMIZER_STATE, E.SHAPE, lambda s: s.masters,
         "{there}, {stays}, and one for each gradient of its size that optimizer steps make for themselves, or a few"),
    # Loading, before the first forward pass or inside loading functions
    Rule("adapter", P.PARAMS, E.FRAME, lambda s: s.adapter_frames & s.stays,
         "made while adapters were created, and it stayed"),
    Rule("one-of-equals", P.PARAMS, E.SHAPE, lambda s: s.trained.weights & s.trained.alike & (s.in_trace | s.load_frames),
         "of a size for which fewer gradients are left than such tensors were made: so many of them are trained, but not which is known"),
    Rule("trained-weight", P.PARAMS, E.SHAPE, lambda s: s.trained.weights & (s.in_trace | s.load_frames),
         "a weight for whose size every backward pass leaves a gradient"),
    Rule("state-ahead", P.OPTIMIZER_STATE, E.SHAPE, lambda s: s.trained.states & (s.early_persistent | s.in_trace),
         "made before any step and of a trained weight's size, one or two more than there are weights, while no step leaves states that last"),
    Rule("quantized", P.QUANTIZED, E.FRAME, lambda s: s.quantized_storage,
         "made while weights were quantised: the packed weights"),
    Rule("quant-state", P.QUANT_STATE, E.FRAME, lambda s: s.quantizing & ~s.quantized_storage,
         "made while weights were quantised, and it stayed: scales, codes, offsets"),
    Rule("weight-untold", P.UNATTRIBUTED, E.NONE, lambda s: s.load_frames & s.stays & s.untold,
         _UNTOLD),
    Rule("loaded-weight", P.UNQUANTIZED, E.FRAME, lambda s: s.load_frames & s.stays,
         "made by code that loads, moves or converts a model, and it stayed"),
    Rule("offloaded-weight", P.UNQUANTIZED, E.FRAME, lambda s: s.offloaded_weights,
         "brought in by code that loads a model, inside the call of the module that needs it, and given back"),
    Rule("loading-copy", P.LOADING, E.FRAME, lambda s: s.load_frames,
         "made by code that loads, moves or converts a model, and freed"),
    Rule("weight-copy", P.DEQUANT, E.FRAME, lambda s: s.dequant_frames,
         "made inside a dequantising function"),
    Rule("weight-copy-shape", P.DEQUANT, E.SHAPE, lambda s: s.weight_copies,
         "made inside a product with quantised weights, at a call site that only makes sizes of weight copies"),
    # Outputs of the model
    Rule("logits-in-loss", P.LOGITS, E.SHAPE, lambda s: s.logits_in_loss,
         "made by a loss function before its own work, and of the size of the head's output in 16 or 32 bits: a copy of the logits"),
    Rule("loss-saves", P.SAVED, E.SHAPE, lambda s: s.loss_saves,
         "made by a loss function, kept for the backward pass, and as large as what layers keep: its input's gradient"),
    Rule("loss", P.LOSS, E.FRAME, lambda s: s.loss_frames,
         "made by a loss function, not by a module it runs"),
    Rule("logits", P.LOGITS, E.FRAME, lambda s: s.head_frames,
         "made by the head: the linear module that the model's outermost forward calls beside its layers"),
    Rule("logits-copy", P.LOGITS, E.SHAPE, lambda s: s.head_copies,
         "made outside the layers, and of the head's output's size in 16 or 32 bits"),
    Rule("logits-compiled", P.LOGITS, E.SHAPE, lambda s: s.compiled_logits,
         "made in compiled code for the function that calls the loss, and as large as the loss's own in 16 or 32 bits"),
    Rule("kv-cache", P.KV_CACHE, E.FRAME, lambda s: s.kv_cache,
         "made by the key/value cache"),
    Rule("attention-matrix", P.ATTENTION_MATRIX, E.SHAPE, lambda s: s.attention_matrices,
         "made inside attention, and larger than its output: tokens by tokens"),
    # Forward passes and recomputation
    Rule("recompute", P.RECOMPUTE, E.LIFETIME, lambda s: s.recomputed & s.held,
         "made by gradient checkpointing's recomputation and alive when it ended"),
    Rule("recompute-unfinished", P.RECOMPUTE, E.REPETITION, lambda s: s.recomputed & s.would_be_held,
         "this recomputation was cut short; its call site kept such a tensor in one that ended, or in the block before"),
    Rule("recompute-temporary", P.FORWARD, E.LIFETIME, lambda s: s.recomputed,
         "made by gradient checkpointing's recomputation and {ended}"),
    Rule("cast-for-good", P.UNQUANTIZED, E.LIFETIME, lambda s: s.cast_for_good,
         "made in the first forward pass by a quantised module, never freed, and never made again"),
    Rule("checkpoint-input", P.CHECKPOINT_INPUT, E.LIFETIME, lambda s: s.checkpointed & s.held,
         "made inside a checkpointed block and alive when the forward pass ended: the next block's input"),
    Rule("kept-data", P.OTHER, E.LIFETIME, lambda s: s.kept_data,
         "made by the program itself during a forward pass, and kept beyond two further ones"),
    Rule("result", P.FORWARD, E.LIFETIME, lambda s: s.results,
         "left by a call of the model that left next to nothing else, in a recording in which nothing is trained"),
    Rule("activation", P.SAVED, E.LIFETIME, lambda s: s.in_forward & s.held & s.in_known_pass & ~s.unsure_forward,
         "made in the forward pass and alive when it ended"),
    Rule("activation-unfinished", P.SAVED, E.REPETITION, lambda s: s.in_forward & s.would_be_held,
         "this forward pass was cut short; its call site kept such a tensor in one that ended, or in the layer before"),
    Rule("activation-left", P.SAVED, E.REPETITION, lambda s: s.left_by_layers,
         "made by the model's forward pass, once a layer, and still there when the program ran out of memory"),
    Rule("forward-temporary", P.FORWARD, E.LIFETIME, lambda s: s.in_forward & ~s.held & ~s.unsure_forward,
         "made in the forward pass and {ended}"),
    Rule("loss-gradient", P.LOSS, E.SHAPE, lambda s: s.loss_gradients,
         "made in the backward pass, and of the size of the logits or of the loss's own tensors"),
    Rule("later-gradient", P.GRADS, E.SHAPE, lambda s: s.put_in_place[1],
         "made in the backward pass, kept, and of a size of which the program had put weights in the place of others"),
    Rule("backward", P.BACKWARD, E.LIFETIME, lambda s: s.in_backward & s.in_known_pass & ~s.unsure_backward,
         "made in the backward pass, and no gradient of a parameter"),
    # What was there before the recording began
    Rule("early-made", P.SAVED, E.FRAME, lambda s: s.early_made,
         "there before the first recorded event, made by the model's forward pass, and no workspace"),
    Rule("early-state", P.OPTIMIZER_STATE, E.SHAPE, lambda s: s.early_replaced_states,
         "{there}, of a trained weight's size, and freed by an optimizer step whose pass had made its own gradients"),
    Rule("early-other-state", P.OPTIMIZER_STATE, E.SHAPE, lambda s: s.early_other_states,
         "{there}, and of a size of which optimizer steps free tensors and leave others"),
    Rule("early-one-of-equals", P.PARAMS, E.SHAPE, lambda s: s.early & s.trained.weights & s.trained.alike,
         "{there}, {stays}, of a size for which fewer gradients are left than there are such tensors: so many are trained, but not which is known"),
    Rule("early-trainable", P.PARAMS, E.SHAPE, lambda s: s.early & s.trained.weights,
         "{there}, {stays}, and of a size for which backward passes leave gradients"),
    Rule("early-gradient", P.GRADS, E.SHAPE, lambda s: s.early_trained,
         "{there}, freed where gradients are, and of a trainable parameter's size"),
    Rule("early-given-up", P.GRADS, E.FRAME, lambda s: s.early_given_up,
         "{there}, and given up by zero_grad, or where data-parallel training lays out its buckets anew"),
    Rule("early-activation", P.SAVED, E.LIFETIME, lambda s: s.early_saved,
         "{there} and freed by the backward pass, or only after it: kept for it, or with the graph"),
    Rule("early-scales", P.QUANT_STATE, E.SHAPE, lambda s: s.early_scales,
         "{there}, {stays}, and as large as the scales of a stored weight, one for each"),
    Rule("early-flat-gradients", P.GRADS, E.SHAPE, lambda s: s.early_flat_gradients,
         "{there}, {stays}, in a program that reduces gradients to shards, and a further one of half a master's size, or of a bucket's round one"),
    Rule("early-sharded", P.PARAMS, E.NEIGHBOUR, lambda s: s.early_sharded,
         "{there}, {stays}, in a program that reduces gradients to shards and has no adapters: trained, or its states"),
    Rule("early-part", P.OPTIMIZER_STATE, E.NEIGHBOUR, lambda s: s.early_parts,
         "{there}, {stays}, and one or two for each tensor of its size that a line of optimizer steps makes"),
    Rule("early-adapter", P.PARAMS, E.SHAPE, lambda s: s.early_adapters,
         "{there}, {stays}, and one of a pair that fits a stored weight as an adapter of one rank"),
    Rule("early-workspace", P.CUBLAS_WORKSPACE, E.SHAPE, lambda s: s.early_workspaces,
         "{there}, {stays}, and of exactly a workspace's size, which no weight here has"),
    Rule("early-quantized", P.QUANTIZED, E.SHAPE, lambda s: s.early_quantized,
         "{there}, {stays}, and products make copies of four times its size"),
    Rule("early-follower", P.OPTIMIZER_STATE, E.NEIGHBOUR, lambda s: s.early_followers,
         "{there}, {stays}, one for each trained weight, and no pass runs them without gradients: an average or slow weights, not a second model"),
    Rule("early-unknown", P.UNATTRIBUTED, E.NONE, lambda s: s.early_few,
         "{there}, {stays}, and without a gradient where nearly all else gets one: data, a frozen weight or flat states, and nothing in the recording tells which"),
    Rule("early-untold", P.UNATTRIBUTED, E.NONE, lambda s: s.kept_like_weights & s.untold,
         _UNTOLD),
    Rule("early-weight", P.UNQUANTIZED, E.LIFETIME, lambda s: s.early_persistent,
         "{there}, {stays}, with passes in between"),
    # Loading without frames, and the rest
    Rule("lives-through", P.UNQUANTIZED, E.LIFETIME, lambda s: s.lives_through_passes,
         "made by the program before its first pass, and alive through the passes: what a model consists of"),
    Rule("loaded-unseen", P.UNQUANTIZED, E.LIFETIME, lambda s: s.in_load & s.stays & s.among_loading,
         "made without a stack while a model was loaded, and it stayed"),
    Rule("loading-unseen", P.LOADING, E.LIFETIME, lambda s: s.in_load & s.among_loading & (not s.facts.blind),
         "made and freed while the model was loaded"),
    Rule("input-untold", P.UNATTRIBUTED, E.NONE, lambda s: s.inputs_untold,
         "made by the program, and no backward pass in this recording tells whether autograd keeps it"),
    Rule("later-weight", P.PARAMS, E.SHAPE, lambda s: s.put_in_place[0],
         "made by the program between steps and kept, and of a size of which gradients are left from then on: a weight in the place of another, or a state of it"),
    Rule("other", P.OTHER, E.LIFETIME, lambda s: s.short_lived,
         "made outside the phases and freed again"),
    Rule("other-frames", P.OTHER, E.FRAME, lambda s: s.other_frames,
         "made by the program outside the model, the optimizer and loading"),
)  # fmt: skip
