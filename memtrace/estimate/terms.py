"""The terms of a training step's memory as closed formulas, one function a formula. Bytes.

Sources: read from the code that the engine mirrors (Transformers 5.17, PEFT 0.21, bitsandbytes 0.50, PyTorch 2.11)
and equal to the byte to the engine's streams, which equal recordings on an H200. Letters as in
:class:`memtrace.estimate.symbols.Symbols`. ``None`` where a formula does not cover the setup.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memtrace.attribution.categories import Category, Purpose
from memtrace.estimate.symbols import Symbols

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


# ---- what does not depend on the tokens ------------------------------------------------------------------------------
def packed_weights(x: Symbols) -> int:
    """n/2 bytes for n elements of 4-bit weights, n for 8-bit. bitsandbytes ``quantize_4bit``, ``Int8Params``."""
    n = x.shape.linear_parameters
    return {"nf4": n // 2, "nf4-dq": n // 2, "int8": n, "none": 0}[x.options.quant]


def quantisation_state(x: Symbols) -> int:
    """Per matrix of n: double quantisation n/64 + 4·⌈n/16384⌉ + 4 + 64 + 1024, else n/16 + 64; 8-bit 4 a row.

    bitsandbytes ``quantize_4bit``: 8-bit scales of 64 elements, fp32 scales of 256 of those, the offset, the
    16-entry code, the 256-entry code.
    """
    total = 0
    for _, inputs, outputs, _ in x.shape.linears:
        n = inputs * outputs
        if x.options.quant == "nf4-dq":
            blocks = -(-n // 64)
            total += blocks + 4 * -(-blocks // 256) + 4 + 64 + 1024
        elif x.options.quant == "nf4":
            total += 4 * -(-n // 64) + 64
        elif x.options.quant == "int8":
            total += 4 * outputs
    return x.L * total


def quantisation_map(x: Symbols) -> int:
    """1,024 once a process with double quantisation: the 8-bit map (``create_dynamic_map``)."""
    return 1024 if x.options.quant == "nf4-dq" else 0


def embedding(x: Symbols) -> int:
    """V·h·e: never quantised; with tied embeddings it is the head too."""
    return x.V * x.h * x.e


def head(x: Symbols) -> int:
    """V·h·e, none of its own if tied."""
    return 0 if x.shape.tied_embeddings else x.V * x.h * x.e


def norms(x: Symbols) -> int:
    """(2L + 1)·h·e, plus the inner norms of the family."""
    return x.e * (x.L * sum(n for _, n in x.shape.norms) + x.h)


def biases(x: Symbols) -> int:
    """2 bytes per output of a biased layer: the first forward recasts them to 16 bits for good (``Linear4bit``)."""
    width = x.e if x.options.quant in ("none", "int8") else 2
    return width * x.L * sum(outputs for _, _, outputs, bias in x.shape.linears if bias)


def plain_weights(x: Symbols) -> int:
    """n·e for linear layers that are not quantised."""
    return x.shape.linear_parameters * x.e if x.options.quant == "none" else 0


def rotary_buffers(x: Symbols) -> int:
    """4·d: ``inv_freq`` and its original, d/2 fp32 numbers each (+ 4 for a scaled embedding's factor)."""
    rotated = round(x.d * x.shape.rotary_share)
    return 2 * 4 * (rotated // 2) + (4 if x.shape.scaled_embedding else 0)


def adapters(x: Symbols) -> int:
    """l·N."""
    return x.l * x.adapter_parameters


def gradients(x: Symbols) -> int:
    """l·N once every layer's backward has run (fewer before); freed by ``zero_grad(set_to_none=True)``."""
    return x.l * x.adapter_parameters


def optimizer_state(x: Symbols) -> int:
    """AdamW 2·l·N (fused + 4 a tensor); bnb 32-bit 8·N; bnb 8-bit 2·n + 8·⌈n/256⌉ a tensor (8·n below 4,096) + 2,048.

    Paged optimizers keep the two states of tensors of 100,000 elements or more in managed memory, which is outside
    the allocator. ``torch/optim/adam.py``; ``bitsandbytes/optim/optimizer.py``.
    """
    name, sizes = x.options.optimizer, x.adapter_sizes
    if name == "sgd":
        return 0
    if name.startswith("adamw_torch"):
        return 2 * x.l * x.adapter_parameters + (4 * len(sizes) * x.L if name.endswith("fused") else 0)
    total, maps = 0, 0
    for n in sizes:
        managed = name.startswith("paged") and n >= 100_000
        if name.endswith("8bit") and n >= 4096:
            total += (0 if managed else 2 * n) + 8 * -(-n // 256)
            maps = 2048
        else:
            total += 0 if managed else 8 * n
    return x.L * total + maps


def cublas_workspaces(x: Symbols) -> int:
    """One for each thread that multiplies: forward, and (after the first backward has begun) autograd's."""
    return 2 * x.device.cublas_workspace_bytes


def cublaslt_workspaces(x: Symbols) -> int:
    """One for each thread that has run a quantised layer with a bias: forward, and autograd's once layers were
    recomputed (with checkpointing, in this run or earlier in the process).
    """
    biased = any(bias for *_, bias in x.shape.linears) and x.options.quant != "int8"
    return 2 * x.device.cublaslt_workspace_bytes if biased else 0


def token_ids(x: Symbols) -> int:
    """8·t."""
    return 8 * x.t


# ---- alive through a step --------------------------------------------------------------------------------------------
def position_ids(x: Symbols) -> int:
    """8·s."""
    return 8 * x.s


def rotary_tables(x: Symbols) -> int:
    """cos and sin: 2·s·d·e."""
    return 2 * x.s * round(x.d * x.shape.rotary_share) * x.e


def attention_mask(x: Symbols) -> int | None:
    """Eager attention with checkpointing, which holds it for the recompute: e·b·s²."""
    if not x.closed or not x.options.checkpointing:
        return None
    return x.e * x.b * x.s * x.s if x.kernel == "eager" else 0


def layer_inputs(x: Symbols) -> int:
    """With checkpointing, L·e·h·t: the input of every layer."""
    return x.L * x.e * x.h * x.t


def final_norm(x: Symbols) -> int | None:
    """4·h·t + 4·t: the last norm's fp32 input and one rsqrt a token."""
    return 4 * x.h * x.t + 4 * x.t if x.closed else None


# ---- saved for backward, one layer -----------------------------------------------------------------------------------
def saved_norms(x: Symbols) -> int | None:
    """2·(4h + 4)·t: two norms' fp32 inputs (with e = 4 the residual stream itself) and rsqrt."""
    return 2 * (4 * x.h + 4) * x.t if x.closed else None


def saved_qkv(x: Symbols) -> int | None:
    """(3·own(h) + 3·l·r + shared·e·h)·t when q, k and v are adapted."""
    if not x.closed:
        return None
    count = x.has(*QKV)
    return (count * (x.own(x.h) + x.l * x.r) + (x.e * x.h if count and x.shared else 0)) * x.t


def saved_attention(x: Symbols) -> int | None:
    """q, k, v, output, log-sum-exp: efficient 16q + 4a·⌈s/32⌉·32/s; cuDNN and flash 4q + 4kv + 4a (+ 16 a layer);
    math 12q + 4·a·s; eager 3·e·q + 4·a·s (e = 4) or 6·a·s (e = 2). Times t.
    """
    if not x.closed:
        return None
    if x.kernel == "efficient":
        return x.e * (2 * x.q + 2 * x.kv) * x.t + 4 * x.b * x.a * (-(-x.s // 32) * 32)
    if x.kernel in ("cudnn", "flash"):
        return (x.e * (2 * x.q + 2 * x.kv) + 4 * x.a) * x.t + 16
    matrix = 4 * x.a * x.s * x.t if x.e == 4 else 6 * x.a * x.s * x.t
    if x.kernel == "math" and x.e == 2:
        matrix = 2 * x.a * x.s * x.t
    return 3 * x.e * x.q * x.t + matrix


def saved_output(x: Symbols) -> int | None:
    """(own(q) + l·r)·t; eager and math also keep the copied output, shared·e·q."""
    if not x.closed:
        return None
    if not x.has("self_attn.o_proj"):
        return 0
    copy = x.e * x.q if x.shared and x.kernel in ("eager", "math") else 0
    return (x.own(x.q) + x.l * x.r + copy) * x.t


def saved_gate(x: Symbols) -> int | None:
    """(own(h) + l·r + shared·e·h + 2·e·f)·t: adapter, the gate's output and SiLU's."""
    if not x.closed:
        return None
    adapter = x.own(x.h) + x.l * x.r if x.has("mlp.gate_proj") else 0
    copy = x.e * x.h if x.shared and x.has("mlp.gate_proj", "mlp.up_proj") else 0
    return (adapter + copy + 2 * x.e * x.f) * x.t


def saved_up(x: Symbols) -> int | None:
    """(own(h) + l·r + e·f)·t."""
    if not x.closed:
        return None
    return ((x.own(x.h) + x.l * x.r if x.has("mlp.up_proj") else 0) + x.e * x.f) * x.t


def saved_down(x: Symbols) -> int | None:
    """(own(f) + l·r + shared·e·f)·t."""
    if not x.closed or not x.has("mlp.down_proj"):
        return 0 if x.closed else None
    return (x.own(x.f) + x.l * x.r + (x.e * x.f if x.shared else 0)) * x.t


def saved_layer(x: Symbols) -> int | None:
    """S·t (+ 16 for cuDNN): everything a layer keeps for its backward."""
    if not x.closed:
        return None
    parts = (saved_norms, saved_qkv, saved_attention, saved_output, saved_gate, saved_up, saved_down)
    return sum(part(x) or 0 for part in parts)


# ---- the loss --------------------------------------------------------------------------------------------------------
def log_probabilities(x: Symbols) -> int | None:
    """Full loss: 4·V·t, the saved log-softmax."""
    return 4 * x.V * x.t if x.options.loss == "full" else None


def loss_gradients(x: Symbols) -> int | None:
    """Full loss: 8·V·t at its backward peak, the gradient into and out of the log-softmax."""
    return 8 * x.V * x.t if x.options.loss == "full" else None


def optimizer_temporaries(x: Symbols) -> int:
    """l·N for the multi-tensor AdamW (``_foreach_sqrt`` of all tensors at once), else 0."""
    return x.l * x.adapter_parameters if x.options.optimizer == "adamw_torch" else 0


# ---- registry --------------------------------------------------------------------------------------------------------
Formula = Callable[[Symbols], int | None]


@dataclass(frozen=True, slots=True)
class TermSpec:
    """A term's category, its formula as text, and the function that evaluates it (None: read off the engine)."""

    category: Category
    text: str
    function: Formula | None = None


ENGINE = "live at the peak, from the engine"
TERMS: dict[str, TermSpec] = {
    "quantized weights": TermSpec(Category.BASE_WEIGHTS, "n/2", packed_weights),
    "quantisation state": TermSpec(Category.BASE_WEIGHTS, "n/64 + 4·⌈n/16384⌉ + 1092 a matrix", quantisation_state),
    "8-bit map": TermSpec(Category.BASE_WEIGHTS, "1024", quantisation_map),
    "embedding": TermSpec(Category.BASE_WEIGHTS, "V·h·e", embedding),
    "head": TermSpec(Category.BASE_WEIGHTS, "V·h·e", head),
    "norms": TermSpec(Category.BASE_WEIGHTS, "(2L+1)·h·e", norms),
    "biases": TermSpec(Category.BASE_WEIGHTS, "2·outputs·L", biases),
    "weights": TermSpec(Category.BASE_WEIGHTS, "n·e", plain_weights),
    "rotary buffers": TermSpec(Category.BASE_WEIGHTS, "4·d", rotary_buffers),
    "loading copies": TermSpec(Category.BASE_WEIGHTS, ENGINE),
    "dequantised weight": TermSpec(Category.BASE_WEIGHTS, "2n + n/8 of the layer at work", None),
    "adapters": TermSpec(Category.LORA, "l·N", adapters),
    "gradients": TermSpec(Category.LORA, "l·N", gradients),
    "optimizer states": TermSpec(Category.LORA, "by optimizer and N", optimizer_state),
    "cuBLAS workspaces": TermSpec(Category.RUNTIME, "one a thread", cublas_workspaces),
    "cuBLASLt workspaces": TermSpec(Category.RUNTIME, "one a thread", cublaslt_workspaces),
    "token ids": TermSpec(Category.TEMPORARY, "8·t", token_ids),
    "position ids": TermSpec(Category.ACTIVATIONS, "8·s", position_ids),
    "rotary tables": TermSpec(Category.ACTIVATIONS, "2·s·d·e", rotary_tables),
    "attention mask": TermSpec(Category.ACTIVATIONS, "e·b·s²", attention_mask),
    "layer inputs": TermSpec(Category.ACTIVATIONS, "L·e·h·t", layer_inputs),
    "embedding output": TermSpec(Category.ACTIVATIONS, "e·h·t"),
    "final norm": TermSpec(Category.ACTIVATIONS, "4h·t + 4t", final_norm),
    "norms' inputs": TermSpec(Category.ACTIVATIONS, "2·(4h+4)·t a layer", saved_norms),
    "qkv inputs": TermSpec(Category.ACTIVATIONS, "(3·own(h) + 3·l·r + sh·e·h)·t a layer", saved_qkv),
    "attention": TermSpec(Category.ACTIVATIONS, "q, k, v, output, row sums a layer", saved_attention),
    "o input": TermSpec(Category.ACTIVATIONS, "(own(q) + l·r)·t a layer", saved_output),
    "gate": TermSpec(Category.ACTIVATIONS, "(own(h) + l·r + sh·e·h + 2·e·f)·t a layer", saved_gate),
    "up": TermSpec(Category.ACTIVATIONS, "(own(h) + l·r + e·f)·t a layer", saved_up),
    "down input": TermSpec(Category.ACTIVATIONS, "(own(f) + l·r + sh·e·f)·t a layer", saved_down),
    "other activations": TermSpec(Category.ACTIVATIONS, ENGINE),
    "logits": TermSpec(Category.TEMPORARY, "V·t·e"),
    "log-probabilities": TermSpec(Category.TEMPORARY, "4·V·t", log_probabilities),
    "gradients of the loss": TermSpec(Category.TEMPORARY, "8·V·t", loss_gradients),
    "attention matrices": TermSpec(Category.TEMPORARY, "4·a·s·t and copies"),
    "forward in flight": TermSpec(Category.TEMPORARY, ENGINE),
    "gradients in flight": TermSpec(Category.TEMPORARY, ENGINE),
    "optimizer temporaries": TermSpec(Category.TEMPORARY, "l·N", optimizer_temporaries),
}


def term_name(label: str, op: str, site: str, layer: int, last_layer: int) -> str:
    """Which term an allocation belongs to, by its label, operator and module."""
    fixed = _BY_LABEL.get(label)
    if fixed is not None:
        return fixed
    category, _, kind = label.partition("/")
    if label == Purpose.UNQUANTIZED:
        return _unquantized(op, site)
    if label == Purpose.LOADING:
        return "8-bit map" if op == "create_dynamic_map" else "loading copies"
    if category == Category.RUNTIME:
        return "cuBLASLt workspaces" if op.startswith("cublaslt") else "cuBLAS workspaces"
    if kind == "loss":
        return "log-probabilities" if op == "log_softmax" else "gradients of the loss"
    return _activation(op, site, layer, last_layer)


_BY_LABEL: dict[str, str] = {
    Purpose.QUANTIZED: "quantized weights",
    Purpose.QUANT_STATE: "quantisation state",
    Purpose.BUFFER: "rotary buffers",
    Purpose.DEQUANT: "dequantised weight",
    Purpose.PARAMS: "adapters",
    Purpose.GRADS: "gradients",
    Purpose.OPTIMIZER_STATE: "optimizer states",
    Purpose.OTHER: "token ids",
    Purpose.LOGITS: "logits",
    Purpose.ATTENTION_MATRIX: "attention matrices",
    Purpose.FORWARD: "forward in flight",
    Purpose.BACKWARD: "gradients in flight",
    Purpose.OPTIMIZER: "optimizer temporaries",
    Purpose.CHECKPOINT_INPUT: "layer inputs",
}


def _unquantized(op: str, site: str) -> str:
    if site in ("embed_tokens",):
        return "embedding"
    if site == "lm_head":
        return "head"
    if "norm" in site:
        return "norms"
    return "weights" if op == "materialize_weight" else "biases"


def _activation(op: str, site: str, layer: int, last_layer: int) -> str:
    if layer < 0 or (op == "mlp_residual" and layer == last_layer):
        outside = {"rotary_emb": "rotary tables", "norm": "final norm", "embed_tokens": "embedding output"}
        if op in ("mask", "sliding_mask"):
            return "attention mask"
        if op == "mlp_residual":
            return "final norm"
        return outside.get(site, "position ids" if op == "add" and not site else "other activations")
    if op == "mul" and site in _SHARED_INPUT:  # a norm's output is saved only as the input that adapters share
        return _SHARED_INPUT[site]
    if op.endswith("residual") or site.endswith("layernorm"):
        return "norms' inputs"
    module = site.removesuffix(".lora")
    values = module in ("self_attn.v_proj", "self_attn.qkv_proj")  # v is not rotated: the projection's own output
    if module == "self_attn" and op == "contiguous":  # a copy of the output, saved only as o's shared input
        return "o input"
    if module == "self_attn" or (values and (op == "add_adapter" or module == site)):
        return "attention"
    return _BY_MODULE.get(module if module != "mlp" else f"mlp/{op}", "other activations")


_SHARED_INPUT = {
    "input_layernorm": "qkv inputs",
    "post_attention_layernorm": "gate",
    "pre_feedforward_layernorm": "gate",
}
_BY_MODULE = {
    "self_attn.q_proj": "qkv inputs",
    "self_attn.k_proj": "qkv inputs",
    "self_attn.v_proj": "qkv inputs",
    "self_attn.qkv_proj": "qkv inputs",
    "self_attn.q_norm": "attention",
    "self_attn.k_norm": "attention",
    "self_attn.o_proj": "o input",
    "mlp.gate_proj": "gate",
    "mlp.gate_up_proj": "gate",
    "mlp/silu": "gate",
    "mlp/gelu": "gate",
    "mlp.up_proj": "up",
    "mlp/mul": "down input",
    "mlp.down_proj": "down input",
}
