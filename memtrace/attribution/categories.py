"""The six budget categories, their subcategories and one line on each. Everything that speaks of either uses these."""

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


class Purpose(StrEnum):
    """What an allocation was for: ``category/subcategory``, the words of every output and of the tests' truth."""

    QUANTIZED = "base_weights/quantized"
    QUANT_STATE = "base_weights/quant_state"
    UNQUANTIZED = "base_weights/unquantized"
    BUFFER = "base_weights/buffer"
    DEQUANT = "base_weights/dequant"
    GATHERED = "base_weights/gathered"
    LOADING = "base_weights/loading"

    PARAMS = "lora/params"
    GRADS = "lora/grads"
    OPTIMIZER_STATE = "lora/optimizer_state"
    TRAINED_GATHERED = "lora/gathered"

    SAVED = "activations/saved"
    CHECKPOINT_INPUT = "activations/checkpoint_input"
    RECOMPUTE = "activations/recompute"
    KV_CACHE = "activations/kv_cache"

    LOGITS = "temporary/logits"
    LOSS = "temporary/loss"
    ATTENTION_MATRIX = "temporary/attention_matrix"
    FORWARD = "temporary/forward"
    BACKWARD = "temporary/backward"
    OPTIMIZER = "temporary/optimizer"
    OTHER = "temporary/other"

    CUBLAS_WORKSPACE = "runtime/cublas_workspace"
    COMMUNICATION = "runtime/communication"

    ROUNDING = "fragmentation/rounding"
    UNSPLIT_TAIL = "fragmentation/unsplit_tail"
    HOLES = "fragmentation/holes"
    CACHED_SEGMENTS = "fragmentation/cached_segments"
    PENDING_FREE = "fragmentation/pending_free"

    UNATTRIBUTED = "unattributed/unattributed"

    @property
    def category(self) -> Category:
        """The part before the stroke."""
        return Category(self.partition("/")[0])

    @property
    def subcategory(self) -> str:
        """The part behind the stroke."""
        return self.partition("/")[2]


PURPOSE_MEANING: dict[Purpose, str] = {
    Purpose.QUANTIZED: "weights stored in 4 or 8 bits",
    Purpose.QUANT_STATE: "scales, code tables and offsets of the quantised weights",
    Purpose.UNQUANTIZED: "weights stored in 16 or 32 bits",
    Purpose.BUFFER: "buffers of the model (rotary tables, say)",
    Purpose.DEQUANT: "16- or 32-bit copies of quantised weights made for a product",
    Purpose.GATHERED: "whole copies of sharded weights, for one module's turn, and the buffers that bring them",
    Purpose.LOADING: "copies that exist only while the model is loaded or converted",
    Purpose.PARAMS: "trainable parameters (adapters, or all weights in full fine-tuning)",
    Purpose.GRADS: "gradients of trainable parameters, gradient buckets included",
    Purpose.OPTIMIZER_STATE: "moments and other states of the optimizer",
    Purpose.TRAINED_GATHERED: "the same of weights that are trained",
    Purpose.SAVED: "made in the forward pass and still held when the backward pass begins",
    Purpose.CHECKPOINT_INPUT: "inputs of checkpointed blocks",
    Purpose.RECOMPUTE: "made again by gradient checkpointing and held for the block's backward pass",
    Purpose.KV_CACHE: "keys and values kept between forward passes",
    Purpose.LOGITS: "outputs of the language-model head and copies of them",
    Purpose.LOSS: "the loss and its intermediate tensors",
    Purpose.ATTENTION_MATRIX: "scores or weights of attention, tokens × tokens",
    Purpose.FORWARD: "freed before the forward pass (or the recomputation) ends",
    Purpose.BACKWARD: "gradients of activations and other tensors of the backward pass",
    Purpose.OPTIMIZER: "freed before the optimizer step ends",
    Purpose.OTHER: "inputs, metrics, anything short-lived outside the phases",
    Purpose.CUBLAS_WORKSPACE: "workspaces of cuBLAS and cuBLASLt",
    Purpose.COMMUNICATION: "buffers of collective communication",
    Purpose.ROUNDING: "requests rounded up to a multiple of the block size",
    Purpose.UNSPLIT_TAIL: "rest of a block too small to be split off",
    Purpose.HOLES: "free blocks in segments that are partly in use",
    Purpose.CACHED_SEGMENTS: "whole segments that are free and kept for reuse",
    Purpose.PENDING_FREE: "freed by the program, but another stream may still use it",
    Purpose.UNATTRIBUTED: "nothing recorded says what it is for",
}

SUBCATEGORIES: dict[Category, dict[str, Purpose]] = {
    category: {purpose.subcategory: purpose for purpose in Purpose if purpose.category is category}
    for category in Category
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


def category_name(purpose: str, meaning: str) -> str:
    """What people call a category, or ``category/subcategory``: without adapters (``meaning`` of the report's ``lora``)
    *trained* for that key."""
    category, slash, sub = purpose.partition("/")
    return f"trained{slash}{sub}" if category == Category.LORA and meaning == "trained" else purpose


def category_words(purpose: str, meaning: str) -> str:
    """The same in a sentence: ``base weights`` for ``base_weights``."""
    return category_name(purpose, meaning).replace("_", " ")
