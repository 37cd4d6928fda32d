"""Closed formulas of a training step's memory: the second route, without the engine, that tests hold against it. Bytes.

Sources: read from the code that the engine mirrors (Transformers 5.17, PEFT 0.21, bitsandbytes 0.50, PyTorch 2.11).
Terms, one function each, ``None`` where a formula does not cover the setup; then the requested peak of each phase, for
llama-like layers with all seven matrices adapted, full loss, a warm process (both threads have all their workspaces)
and at least the second step. Each candidate is the live set at one point of the step; the peak is their maximum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from memtrace.errors import UsageError
from memtrace.estimate.engine.kernels import KernelDevice, attention_kernel, fused_4bit_product
from memtrace.estimate.options import RunOptions
from memtrace.estimate.shapes import ModelShape

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@dataclass(frozen=True, slots=True)
class Symbols:
    """h hidden, f FFN width, L layers, a query heads, k kv heads, d head dimension, q = a·d, kv = k·d, V vocabulary,
    r rank, b batch, s sequence, t = b·s, e bytes of a hidden-state element, l bytes of an adapter element.

    ``dropout`` (P): LoRA dropout is on. ``casts`` (C): PEFT casts the adapter input, because l ≠ e. ``adapted``: names
    of the adapted layers. ``kernel``: what runs the attention.
    """

    shape: ModelShape
    options: RunOptions
    device: KernelDevice
    h: int
    f: int
    L: int
    a: int
    k: int
    d: int
    q: int
    kv: int
    V: int
    r: int
    b: int
    s: int
    t: int
    e: int
    l: int  # noqa: E741 - the reference's letter
    dropout: bool
    casts: bool
    adapted: frozenset[str]
    kernel: str

    @property
    def shared(self) -> bool:
        """Adapters with the same input share one saved copy: neither dropout nor a cast makes their own."""
        return not self.dropout and not self.casts

    def own(self, width: int) -> int:
        """Bytes per token that one adapter keeps of its own input of ``width`` elements."""
        if self.dropout:
            return (self.l + 1) * width
        return self.l * width if self.casts else 0

    def has(self, *names: str) -> int:
        """How many of these layers are adapted."""
        return sum(name in self.adapted for name in names)

    @property
    def layer_parameters(self) -> int:
        """N₁: adapter parameters of one layer, r·(inputs + outputs) of every adapted matrix."""
        return sum(self.r * (i + o) for name, i, o, _ in self.shape.linears if name in self.adapted)

    @property
    def adapter_parameters(self) -> int:
        """N: adapter parameters of the model."""
        return self.L * self.layer_parameters

    @property
    def adapter_sizes(self) -> tuple[int, ...]:
        """Elements of every adapter matrix of one layer."""
        return tuple(
            self.r * n for name, i, o, _ in self.shape.linears if name in self.adapted for n in (i, o)
        )  # fmt: skip

    @property
    def closed(self) -> bool:
        """Whether the formulas of activations cover this setup (llama-like layers, 4-bit or plain, no autocast)."""
        plain = self.shape.family in ("llama", "mistral", "qwen2") and self.options.quant != "int8"
        window = self.shape.sliding_window
        return plain and not self.options.autocast and not (window is not None and self.s >= window)


def symbols(shape: ModelShape, options: RunOptions, device: KernelDevice) -> Symbols:
    """All symbols of one setup."""
    e, width = options.hidden_bytes, 4 if options.adapter_dtype == "fp32" else 2
    shared_heads = shape.heads != shape.kv_heads
    kernel = attention_kernel(
        device, options.attention, 2 if options.autocast else e, shared_heads, shape.head_dim
    )  # fmt: skip
    return Symbols(
        shape, options, device,
        h=shape.hidden, f=shape.ffn, L=shape.layers, a=shape.heads, k=shape.kv_heads, d=shape.head_dim,
        q=shape.query, kv=shape.kv, V=shape.vocabulary, r=options.rank,
        b=options.batch, s=options.sequence, t=options.tokens, e=e, l=width,
        dropout=options.dropout > 0,
        casts=width != e and not options.autocast,
        adapted=frozenset(options.adapted(shape)),
        kernel=kernel,
    )  # fmt: skip


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
    """4·d: ``inv_freq`` and its original, d/2 fp32 numbers each (+ 2 for a scaled embedding's factor)."""
    rotated = round(x.d * x.shape.rotary_share)
    return 2 * 4 * (rotated // 2) + (2 if x.shape.is_gemma else 0)


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


#: The term's name in an estimate → its formula.
FORMULAS: dict[str, Callable[[Symbols], int | None]] = {
    "quantized weights": packed_weights,
    "quantisation state": quantisation_state,
    "8-bit map": quantisation_map,
    "embedding": embedding,
    "head": head,
    "norms": norms,
    "biases": biases,
    "weights": plain_weights,
    "rotary buffers": rotary_buffers,
    "adapters": adapters,
    "gradients": gradients,
    "optimizer states": optimizer_state,
    "cuBLAS workspaces": cublas_workspaces,
    "cuBLASLt workspaces": cublaslt_workspaces,
    "token ids": token_ids,
    "position ids": position_ids,
    "rotary tables": rotary_tables,
    "attention mask": attention_mask,
    "layer inputs": layer_inputs,
    "final norm": final_norm,
    "norms' inputs": saved_norms,
    "qkv inputs": saved_qkv,
    "attention": saved_attention,
    "o input": saved_output,
    "gate": saved_gate,
    "up": saved_up,
    "down input": saved_down,
    "log-probabilities": log_probabilities,
    "gradients of the loss": loss_gradients,
    "optimizer temporaries": optimizer_temporaries,
}


# ---- peaks of the phases --------------------------------------------------------------------------------------------
def static_bytes(x: Symbols) -> int:
    """W: everything that exists before the forward pass of a later step."""
    parts = (
        packed_weights, quantisation_state, quantisation_map, embedding, head,
        norms, biases, rotary_buffers, adapters, optimizer_state,
        cublas_workspaces, cublaslt_workspaces, token_ids,
    )  # fmt: skip
    return sum(part(x) for part in parts)


def closure_bytes(x: Symbols) -> int:
    """8s + 2·s·d·e + (eager: e·b·s²): what every checkpointed layer's closure holds."""
    mask = x.e * x.b * x.s * x.s if x.kernel == "eager" else 0
    return 8 * x.s + 2 * x.s * x.d * x.e + mask


def resident_bytes(x: Symbols) -> int:
    """R: checkpointing L·e·h·t + closure, else L·S·t + 2·s·d·e (+ e·h·t for the embedding output if e = 2)."""
    if x.options.checkpointing:
        return x.L * x.e * x.h * x.t + closure_bytes(x)
    embedding = x.e * x.h * x.t if x.e == 2 else 0
    return x.L * _saved(x) + 2 * x.s * x.d * x.e + embedding


def forward_peak(x: Symbols) -> int:
    """Highest requested bytes of a forward pass with its loss."""
    _check(x)
    return static_bytes(x) + resident_bytes(x) + max(_forward_points(x))


def backward_peak(x: Symbols) -> int:
    """Highest requested bytes of a backward pass: the loss, or inside the first or last layer."""
    _check(x)
    final = _final_norm(x)
    top = static_bytes(x) + resident_bytes(x) + final
    loss = top + 12 * x.V * x.t + 8 + _kept(x)
    norm = top - final + 24 * x.h * x.t + 8 + _kept(x)
    inside = max(_layer_base(x, first=True), _layer_base(x, first=False)) + max(_layer_points(x))
    return max(loss, norm, inside)


def optimizer_peak(x: Symbols) -> int:
    """W + l·N gradients + the multi-tensor AdamW's l·N temporaries."""
    _check(x)
    return static_bytes(x) + gradients(x) + optimizer_temporaries(x)


def _check(x: Symbols) -> None:
    complete = len(x.adapted) == len(x.shape.linears)
    if not (x.closed and complete and x.options.loss == "full" and x.options.quant.startswith("nf4")):
        raise UsageError(
            "the closed formulas cover llama-like 4-bit models, all layers adapted, full loss, no autocast"
        )


# ---- parts -----------------------------------------------------------------------------------------------------------
def _saved(x: Symbols) -> int:
    return saved_layer(x) or 0


def _final_norm(x: Symbols) -> int:
    return 4 * x.h * x.t + 4 * x.t


def _kept(x: Symbols) -> int:
    """Logits that the caller holds during backward: V·t·e."""
    return x.V * x.t * x.e if x.options.keep_logits else 0


def _cast(x: Symbols, width: int) -> int:
    """16-bit copy of a product's input, per token."""
    return 2 * width if x.e == 4 else 0


def _dequantised(x: Symbols, outputs: int, inputs: int) -> int:
    """D(n): 2n + n/8 if the forward product dequantises (2n without double quantisation), 0 if it is fused."""
    if fused_4bit_product(x.device, x.t, outputs, inputs):
        return 0
    n = outputs * inputs
    return 2 * n + (n // 8 if x.options.quant == "nf4-dq" else 0)


def _absmax(x: Symbols, n: int) -> int:
    """Scales of a dequantisation in backward: n/16 with double quantisation."""
    return n // 16 if x.options.quant == "nf4-dq" else 0


def _attention_extra(x: Symbols) -> int:
    """Transient bytes of the attention call in the forward pass, its output apart from the kernels' 256."""
    scores = x.a * x.s * x.t
    shared_heads = x.a != x.k
    if x.kernel == "math":
        repeated = 8 * x.q * x.t if shared_heads else 0
        batched = 4 * x.q * x.t if x.b > 1 else 0  # the token-major q is copied for a batched product
        product = 4 * scores + 4 * x.q * x.t + batched
        return 4 * x.q * x.t + repeated + 4 * x.s * x.s + max(9 * scores + x.a * x.t + 4, product)
    if x.kernel == "eager":
        return (8 if x.e == 4 else 10) * scores + (2 * x.e * x.q * x.t if shared_heads else 0)
    return x.e * x.q * x.t + (4 * x.b * x.a * (-(-x.s // 32) * 32) if x.kernel == "efficient" else 4 * x.a * x.t + 272)


def _forward_points(x: Symbols) -> Iterator[int]:
    """Live bytes above W + R at the points of the forward pass that can be highest."""
    final, labels = _final_norm(x), 8 * x.b * (x.s + 1) + (8 * x.t if x.b > 1 else 0)
    mask = x.e * x.b * x.s * x.s if x.kernel == "eager" else 0
    yield final + x.e * x.h * x.t + (8 if x.e == 4 else 10) * x.V * x.t + labels + 8
    closure = 0 if x.options.checkpointing else 8 * x.s + mask
    yield final + x.t * ((8 * x.h if x.e == 4 else 10 * x.h) + 4) + closure
    adapter = x.t * 2 * max(x.l, x.e) * x.f  # adapter output, scaled, converted, summed: two of them at a time
    if x.options.checkpointing:
        weights = x.e * x.a * x.s * x.t if x.kernel == "eager" else 0
        up = x.t * (2 * x.e * x.h + x.e * x.f) + weights  # SiLU's output waits for the product
        yield up + x.t * (_cast(x, x.h) + 2 * x.f) + _dequantised(x, x.f, x.h)
        yield up + x.t * (x.e * x.f + (x.l * x.h if x.casts else 0)) + adapter
        yield x.t * (x.e * x.h + x.e * (x.q + 2 * x.kv)) + _attention_extra(x)
    else:
        yield _last_attention(x) + closure
        yield from (point + closure for point in _last_down(x))


def _last_attention(x: Symbols) -> int:
    """Without checkpointing, the softmax of the last layer: what later modules save is not there yet.

    Besides what attention saves: the raw scores (with e = 2 also in fp32), q, k and v as the caller holds them where
    copies are what is saved, and on the math path the mask, the test for masked rows and the repeated keys.
    """
    later = sum(part(x) or 0 for part in (saved_output, saved_gate, saved_up, saved_down))
    base = -later - (4 * x.h + 4) * x.t + (0 if x.shared else x.e * x.h * x.t) + _layer_input(x)
    scores = x.a * x.s * x.t
    if x.kernel == "eager":
        held = (x.q if x.b > 1 else 0) + (2 * x.kv if x.a != x.k else x.kv if x.b > 1 else 0)
        return base + 4 * scores + x.e * held * x.t
    if x.kernel == "math":
        held = x.q + 2 * x.kv + (x.q if x.b > 1 else 0) + x.q
        return base + 5 * scores + x.a * x.t + 4 + 4 * x.s * x.s + 4 * held * x.t
    return base


def _layer_input(x: Symbols) -> int:
    """The caller holds a layer's input during the call; with e = 4 it is what the first norm saved."""
    return x.e * x.h * x.t if x.e == 2 else 0


def _last_down(x: Symbols) -> Iterator[int]:
    """Without checkpointing, the down projection of the last layer: its base product, and its adapter."""
    product = x.e * x.f * x.t  # saved itself only where adapters share their inputs
    norm_out = 0 if x.shared else x.e * x.h * x.t
    middle = x.e * x.h * x.t if x.e == 2 else 0
    base = -(saved_down(x) or 0) + product + norm_out + middle + _layer_input(x)
    yield base + x.t * (_cast(x, x.f) + 2 * x.h) + _dequantised(x, x.h, x.f)
    cast = x.l * x.f if x.casts and x.dropout else 0
    output = x.e * x.h + 2 * max(x.l, x.e) * x.h
    yield base + x.t * (x.own(x.f) + x.l * x.r + cast + output)


def _layer_base(x: Symbols, first: bool) -> int:
    """What stands below a layer's backward: the layer visited first (the last one), or last (gradients are there)."""
    width = x.e * x.h * x.t
    one_layer = x.l * x.layer_parameters
    own_input = 4 * x.h * x.t if x.e == 4 else 0
    if x.options.checkpointing:
        rest = x.L * width if first else width + (x.L - 1) * one_layer
        return static_bytes(x) + closure_bytes(x) + 8 + rest - own_input + _kept(x) + _seeds(x)
    embedding = width if x.e == 2 else 0
    rest = (x.L - 1) * _saved(x) if first else (x.L - 1) * one_layer
    return static_bytes(x) + 2 * x.s * x.d * x.e + 8 + rest + embedding + _kept(x) + _seeds(x)


def _seeds(x: Symbols) -> int:
    return 16 if x.kernel in ("cudnn", "flash") else 0


def _layer_points(x: Symbols) -> Iterator[int]:
    """Live bytes above the base at the points of a layer's recompute and backward that can be highest."""
    h, f, q, t, e, l = x.h, x.f, x.q, x.t, x.e, x.l  # noqa: E741
    down, up = saved_down(x) or 0, saved_up(x) or 0
    saved = _saved(x) - _seeds(x) - down
    incoming = (e + l) * h * t  # gradient of the residual stream, and the one entering the down adapter
    norm_out = 0 if x.shared else e * h * t
    middle = 2 * h * t if e == 2 else 0
    adapters = l * x.r * (h + f)
    n = h * f
    cast_f, cast_h = x.l * f * t if x.casts else 0, x.l * h * t if x.casts else 0
    drop_f, drop_h = ((l + 1) * f * t, (l + 1) * h * t) if x.dropout else (0, 0)
    if x.options.checkpointing:
        recompute = incoming + saved + norm_out + middle
        yield recompute + t * (e * f + _cast(x, f) + 2 * h) + _dequantised(x, h, f)
        yield recompute + t * (e * f + e * h + l * x.r) + cast_f + drop_f
        yield recompute - up + t * (e * f + l * x.r + 2 * l * f) + cast_h + drop_h
        yield recompute - up + t * (_cast(x, h) + 2 * f) + _dequantised(x, f, h)
    yield e * h * t + saved + t * (e * f + _cast(x, h)) + 2 * n + max(2 * f * t, _absmax(x, n)) + adapters
    yield 2 * e * h * t + saved - up + 2 * f * t + 2 * n + max(2 * h * t, _absmax(x, n)) + 2 * adapters
    yield e * h * t + saved + 3 * e * f * t + adapters
    if x.kernel in ("eager", "math"):
        norm = (4 * h + 4) * t
        inside = norm + (saved_qkv(x) or 0) + 3 * e * q * t + e * h * t + 16 * x.a * x.s * t
        yield inside + 3 * adapters + l * x.r * (q + h)
