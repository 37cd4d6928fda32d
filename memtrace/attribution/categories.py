"""The six budget categories, their subcategories and one line on each. Every output uses these names."""

from __future__ import annotations

from enum import StrEnum


class Category(StrEnum):
    """Where a byte of reserved memory belongs. ``UNATTRIBUTED`` is what no evidence speaks for."""

    BASE_WEIGHTS = "base_weights"
    LORA = "lora"
    ACTIVATIONS = "activations"
    TEMPORARY = "temporary"
    RUNTIME = "runtime"
    FRAGMENTATION = "fragmentation"
    UNATTRIBUTED = "unattributed"


MEANING: dict[Category, str] = {
    Category.BASE_WEIGHTS: "the frozen model: stored weights, quantisation constants, dequantised and loading copies",
    Category.LORA: "what is trained: parameters, their gradients and optimizer states",
    Category.ACTIVATIONS: "made in the forward pass (or its recomputation) and held for the backward pass",
    Category.TEMPORARY: "logits, loss, attention matrices, gradients of activations, other short-lived tensors",
    Category.RUNTIME: "workspaces of cuBLAS and the like",
    Category.FRAGMENTATION: "reserved but in nobody's hands: rounding, tails, holes, cached segments, pending frees",
    Category.UNATTRIBUTED: "live, but nothing recorded says what for",
}

SUBCATEGORIES: dict[Category, dict[str, str]] = {
    Category.BASE_WEIGHTS: {
        "quantized": "weights stored in 4 or 8 bits",
        "quant_state": "scales, code tables and offsets of the quantised weights",
        "unquantized": "weights stored in 16 or 32 bits",
        "buffer": "buffers of the model (rotary tables, say)",
        "dequant": "16- or 32-bit copies of quantised weights made for a product",
        "loading": "copies that exist only while the model is loaded or converted",
    },
    Category.LORA: {
        "params": "trainable parameters (adapters, or all weights in full fine-tuning)",
        "grads": "gradients of trainable parameters, gradient buckets included",
        "optimizer_state": "moments and other states of the optimizer",
    },
    Category.ACTIVATIONS: {
        "saved": "made in the forward pass and still held when the backward pass begins",
        "checkpoint_input": "inputs of checkpointed blocks",
        "recompute": "made again by gradient checkpointing and held for the block's backward pass",
        "kv_cache": "keys and values kept between forward passes",
    },
    Category.TEMPORARY: {
        "logits": "outputs of the language-model head and copies of them",
        "loss": "the loss and its intermediate tensors",
        "attention_matrix": "scores or weights of attention, tokens × tokens",
        "forward": "freed before the forward pass (or the recomputation) ends",
        "backward": "gradients of activations and other tensors of the backward pass",
        "optimizer": "freed before the optimizer step ends",
        "other": "inputs, metrics, anything short-lived outside the phases",
    },
    Category.RUNTIME: {
        "cublas_workspace": "workspaces of cuBLAS and cuBLASLt",
        "communication": "buffers of collective communication",
    },
    Category.FRAGMENTATION: {
        "rounding": "requests rounded up to a multiple of the block size",
        "unsplit_tail": "rest of a block too small to be split off",
        "holes": "free blocks in segments that are partly in use",
        "cached_segments": "whole segments that are free and kept for reuse",
        "pending_free": "freed by the program, but another stream may still use it",
    },
    Category.UNATTRIBUTED: {"unattributed": "nothing recorded says what it is for"},
}


class Evidence(StrEnum):
    """What kind of fact a decision rests on, strongest first."""

    LABEL = "label"
    FRAME = "frame"
    LIFETIME = "lifetime"
    SHAPE = "shape"
    NEIGHBOUR = "neighbour"
    REPETITION = "repetition"
    NONE = "none"
