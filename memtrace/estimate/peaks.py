"""Closed formulas for the requested peak of each phase: the second route, without the engine. Bytes.

For llama-like layers with all seven matrices adapted, full loss, a warm process (both threads have all their
workspaces) and at least the second step. Each candidate is the live set at one point of the step; the peak is their
maximum. The points were read from the module code and hold to the byte against the engine, which holds against
measurements.
"""

from __future__ import annotations

from collections.abc import Iterator

from memtrace.errors import UsageError
from memtrace.estimate import terms
from memtrace.estimate.engine.kernels import fused_4bit_product
from memtrace.estimate.symbols import Symbols


def static_bytes(x: Symbols) -> int:
    """W: everything that exists before the forward pass of a later step."""
    parts = (
        terms.packed_weights, terms.quantisation_state, terms.quantisation_map, terms.embedding, terms.head,
        terms.norms, terms.biases, terms.rotary_buffers, terms.adapters, terms.optimizer_state,
        terms.cublas_workspaces, terms.cublaslt_workspaces, terms.token_ids,
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
    return static_bytes(x) + terms.gradients(x) + terms.optimizer_temporaries(x)


def _check(x: Symbols) -> None:
    complete = len(x.adapted) == len(x.shape.linears)
    if not (x.closed and complete and x.options.loss == "full" and x.options.quant.startswith("nf4")):
        raise UsageError(
            "the closed formulas cover llama-like 4-bit models, all layers adapted, full loss, no autocast"
        )


# ---- parts -----------------------------------------------------------------------------------------------------------
def _saved(x: Symbols) -> int:
    return terms.saved_layer(x) or 0


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
    later = sum(part(x) or 0 for part in (terms.saved_output, terms.saved_gate, terms.saved_up, terms.saved_down))
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
    base = -(terms.saved_down(x) or 0) + product + norm_out + middle + _layer_input(x)
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
    down, up = terms.saved_down(x) or 0, terms.saved_up(x) or 0
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
        inside = norm + (terms.saved_qkv(x) or 0) + 3 * e * q * t + e * h * t + 16 * x.a * x.s * t
        yield inside + 3 * adapters + l * x.r * (q + h)
