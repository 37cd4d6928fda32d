"""Which term of the budget an allocation belongs to, and the term's formula as text.

Letters: h hidden, f FFN width, L layers, a query heads, d head dimension, q = a·d, V vocabulary, r rank, b batch,
s sequence, t = b·s, e bytes of a hidden-state element, l of an adapter element, n elements of a weight, N of all
adapters; own(w) what an adapter keeps of an input of width w, sh whether adapters share one.
"""

from __future__ import annotations

import json
from pathlib import Path

from memtrace.attribution.categories import Category, Purpose

# Term -> its formula.
TERMS: dict[str, str] = json.loads(Path(__file__).with_name("terms.json").read_bytes())


def term_name(label: str, op: str, site: str, layer: int, last_layer: int) -> str:
    """Which term an allocation belongs to, by its label, operator and module."""
    fixed = _BY_LABEL.get(label)
    if fixed is not None:
        return fixed
    category, _, kind = label.partition("/")
    if label == Purpose.UNQUANTIZED:
        kind = "norms" if "norm" in site else "weights" if op == "materialize_weight" else "biases"
        return _TABLES.get(site, kind)
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


def _activation(op: str, site: str, layer: int, last_layer: int) -> str:
    if op in ("mask", "sliding_mask"):
        return "attention mask"
    if layer < 0 or (op == "mlp_residual" and layer == last_layer):
        if op == "mlp_residual":
            return "final norm"
        return _OUTSIDE.get(site, "position ids" if op == "add" and not site else "other activations")
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


_TABLES = {"embed_tokens": "embedding", "lm_head": "head"}
_OUTSIDE = {"rotary_emb": "rotary tables", "norm": "final norm", "embed_tokens": "embedding output"}
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
