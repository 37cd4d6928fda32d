"""Attention: rotary embedding, the kernels of ``scaled_dot_product_attention``, and the eager path.

Mirrors ``modeling_llama.py`` (``apply_rotary_pos_emb``, ``eager_attention_forward``),
``integrations/sdpa_attention.py`` of Transformers 5.17, and PyTorch 2.11's
``aten/src/ATen/native/transformers/attention.cpp`` and ``cuda/attention_backward.cu``.
q, k, v come in token-major memory ([b, s, heads, d], seen transposed).
"""

from __future__ import annotations

from dataclasses import replace

from memtrace.attribution.categories import Purpose
from memtrace.estimate.engine.autograd import Grads, Storage, Tensor
from memtrace.estimate.engine.kernels import KernelDevice, efficient_backward_workspace, fused_backward_workspace
from memtrace.estimate.engine.ops import Ops
from memtrace.frozen import dataclass

_ALIGNED_COLUMNS = 8


@dataclass(frozen=True, slots=True)
class Geometry:
    """One attention call: the card, batch, sequence, heads, key/value heads, head dimension, soft cap in use."""

    device: KernelDevice
    batch: int
    sequence: int
    heads: int
    kv_heads: int
    head_dim: int
    softcap: bool = False

    @property
    def groups(self) -> int:
        """Query heads a key/value head."""
        return self.heads // self.kv_heads

    @property
    def query_elements(self) -> int:
        """Elements of q (and of the output)."""
        return self.batch * self.sequence * self.heads * self.head_dim

    @property
    def kv_elements(self) -> int:
        """Elements of k, and of v."""
        return self.batch * self.sequence * self.kv_heads * self.head_dim

    @property
    def score_elements(self) -> int:
        """Elements of the attention matrix."""
        return self.batch * self.heads * self.sequence * self.sequence

    @property
    def row_elements(self) -> int:
        """Rows of the attention matrix."""
        return self.batch * self.heads * self.sequence


def rotate_half(ops: Ops, x: Tensor) -> Tensor:
    """``cat((-x2, x1))``; its backward makes two zero-filled gradients and sums them in place."""
    node = ops.node(x)
    x2 = ops.new(x.elements // 2, x.width, "neg")
    out = ops.new(x.elements, x.width, "cat")
    del x2
    if node is not None:
        elements, width = x.elements, x.width

        def backward(_grad: Tensor, _saved: list[Storage]) -> Grads:
            negated = ops.new(elements // 2, width, "neg_backward")
            second = ops.new(elements, width, "slice_backward")
            del negated
            ops.new(elements, width, "slice_backward")  # summed into the second one and gone
            second.head_major = True
            return (second,)

        ops.attach(out, node, backward)
    return out


def apply_rotary(
    ops: Ops, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, part: float | None = None
) -> tuple[Tensor, Tensor]:
    """``apply_rotary_pos_emb``.

    ``part``: the share of each head that is rotated, for code that slices it off and concatenates it again (Phi 3),
    which it does even where the share is all of it.
    """
    if part is not None:
        q_rot, q_pass = _split_head(ops, q, part)
        k_rot, k_pass = _split_head(ops, k, part)
        q_embed = ops.concat(ops.add(ops.mul(q_rot, cos), ops.mul(rotate_half(ops, q_rot), sin)), q_pass)
        k_embed = ops.concat(ops.add(ops.mul(k_rot, cos), ops.mul(rotate_half(ops, k_rot), sin)), k_pass)
        return q_embed, k_embed
    q_embed = ops.add(ops.mul(q, cos), ops.mul(rotate_half(ops, q), sin))
    k_embed = ops.add(ops.mul(k, cos), ops.mul(rotate_half(ops, k), sin))
    return q_embed, k_embed


def _split_head(ops: Ops, x: Tensor, part: float) -> tuple[Tensor, Tensor]:
    """The rotated columns of each head (``x`` itself if all are) and the others, which may be none."""
    rotated = round(x.elements * part)
    rot = x if rotated == x.elements else ops.slice_columns(x, rotated, x.elements)
    return rot, ops.slice_columns(x, x.elements - rotated, x.elements)


def with_mask(kernel: str, groups: int) -> str:
    """The kernel that runs with a mask: shared heads are repeated for it, and the memory-efficient one takes them."""
    return "efficient" if kernel == "math" and groups > 1 else kernel


def sdpa(ops: Ops, kernel: str, g: Geometry, query: Tensor, key: Tensor, value: Tensor, masked: bool = False) -> Tensor:
    """``sdpa_attention_forward``: causal attention, output in token-major memory.

    ``masked``: with a mask (a sequence longer than a sliding window) shared heads are repeated first, and the
    1-byte mask becomes an additive one of b·s² elements, its rows padded for the memory-efficient kernel (PyTorch
    ``attention.cpp``, ``pad_bias``).
    """
    if masked:
        if g.groups > 1:
            key, value = ops.repeat_heads(key, g.groups), ops.repeat_heads(value, g.groups)
            kernel, g = with_mask(kernel, g.groups), replace(g, kv_heads=g.heads)
        bias = ops.new(g.batch * g.sequence * g.sequence, query.width, "attention_bias")
        if kernel == "efficient" and g.sequence % _ALIGNED_COLUMNS:  # its rows begin at multiples of 8 elements
            columns = -(-g.sequence // _ALIGNED_COLUMNS) * _ALIGNED_COLUMNS
            bias = ops.new(g.batch * g.sequence * columns, query.width, "attention_bias_padded")
        out = sdpa(ops, kernel, g, query, key, value)
        if out.node is not None:
            ops.save(out.node, bias)
        return out
    if ops.autocast:
        query, key, value = ops.to(query, 2), ops.to(key, 2), ops.to(value, 2)
    if kernel == "math":
        return ops.clone(_math(ops, g, query, key, value), "contiguous")
    return _fused(ops, kernel, g, query, key, value)


def _fused(ops: Ops, kernel: str, g: Geometry, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One fused kernel: keeps q, k, v, the output and the log-sum-exp of every row."""
    node = ops.node(query, key, value)
    if node is not None:
        for tensor in (query, key, value):
            ops.save(node, tensor)
    seeds = [ops.new(1, 8, kernel), ops.new(1, 8, kernel)] if kernel == "cudnn" else []  # random seed and offset
    out = ops.new(g.query_elements, query.width, kernel)
    row_sums = None
    if node is not None:
        rows = -(-g.sequence // 32) * 32 if kernel == "efficient" else g.sequence
        row_sums = ops.new(g.batch * g.heads * rows, 4, kernel)
    if kernel == "flash":
        seeds = [ops.new(2, 8, kernel), ops.new(1, 8, kernel)]
    if kernel == "cudnn":
        ops.new(256, 1, "cudnn_workspace")
    if node is not None and row_sums is not None:
        ops.save(node, out)
        ops.save(node, row_sums)
        for seed in seeds:
            ops.save(node, seed)
        width = query.width

        def backward(_grad: Tensor, _saved: list[Storage]) -> Grads:
            return _fused_backward(ops, kernel, g, width)

        ops.attach(out, node, backward)
    return out


def _fused_backward(ops: Ops, kernel: str, g: Geometry, width: int) -> Grads:
    """Gradients of q, k, v, and the kernel's own buffers."""
    of_q = ops.new(g.query_elements, width, f"{kernel}_backward")
    of_k = ops.new(g.kv_elements, width, f"{kernel}_backward")
    of_v = ops.new(g.kv_elements, width, f"{kernel}_backward")
    if kernel == "efficient":
        product = ops.new(g.query_elements, 4, "efficient_backward")
        rows = ops.new(g.row_elements, 4, "efficient_backward")
        delta = ops.new(g.row_elements, 4, "efficient_backward")
        del rows, product
        size = efficient_backward_workspace(g.device, g.batch * g.heads, g.sequence, g.head_dim)
        workspace = ops.new(size, 1, "efficient_backward_workspace")
        del delta, workspace
    else:
        size = fused_backward_workspace(g.query_elements, g.row_elements, width, g.groups > 1)
        workspace = ops.new(size, 1, f"{kernel}_backward_workspace")
        del workspace
    return of_q, of_k, of_v


def _math(ops: Ops, g: Geometry, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """``_scaled_dot_product_attention_math``: the attention matrix in full; q and k scaled, k and v repeated."""
    query = ops.scale(query)
    ones = ops.new(g.sequence * g.sequence, 1, "ones")
    allowed = ops.new(g.sequence * g.sequence, 1, "tril")
    del ones
    zero, minus_infinity = ops.new(1, 4, "scalar_tensor"), ops.new(1, 4, "scalar_tensor")
    mask = ops.new(g.sequence * g.sequence, query.width, "where")
    del minus_infinity, zero, allowed
    key_expanded = ops.repeat_heads(key, g.groups) if g.groups > 1 else key
    value_expanded = ops.repeat_heads(value, g.groups) if g.groups > 1 else value
    attention = _scores(ops, g, query, ops.scale(key_expanded))
    # attention.add_(mask) is in place
    attention = _safe_softmax(ops, g, attention)
    out = _unbatched(ops, g, ops.bmm(attention, _batched(ops, g, value_expanded), g.query_elements))
    del key_expanded, value_expanded, query, mask, attention
    return out


def _scores(ops: Ops, g: Geometry, query: Tensor, key: Tensor) -> Tensor:
    """``matmul(q, k.transpose(-2, -1))``; a batch of more than one token-major q is copied first."""
    return ops.bmm(_batched(ops, g, query), _batched(ops, g, key), g.score_elements)


def _batched(ops: Ops, g: Geometry, x: Tensor) -> Tensor:
    """The reshape to [b·heads, s, d] before a batched product: a copy if b > 1 and the memory is token-major."""
    return ops.clone(x, "reshape") if g.batch > 1 and not x.head_major else x


def _unbatched(ops: Ops, g: Geometry, x: Tensor) -> Tensor:
    """The view back to [b, heads, s, d]: backward copies a token-major gradient if b > 1."""
    node = ops.node(x)
    if node is None or g.batch == 1:
        return x
    elements, width = x.elements, x.width
    out = Tensor(x.storage, elements, width)

    def backward(grad: Tensor, _saved: list[Storage]) -> Grads:
        return (grad,) if grad.head_major else (ops.new(elements, width, "reshape_backward"),)

    ops.attach(out, node, backward)
    return out


def _safe_softmax(ops: Ops, g: Geometry, attention: Tensor) -> Tensor:
    """``_safe_softmax``: tests for fully masked rows with a 1-byte matrix."""
    out = ops.softmax(attention, Purpose.ATTENTION_MATRIX)
    masked = ops.new(g.score_elements, 1, "eq")
    masked_rows = ops.new(g.row_elements, 1, "all")
    zero = ops.new(1, 4, "scalar_tensor")
    del zero, masked_rows, masked
    return out


def eager(ops: Ops, g: Geometry, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """``eager_attention_forward``: returns the output and the attention weights, which the caller keeps."""
    key_states = ops.repeat_heads(key, g.groups) if g.groups > 1 else key
    value_states = ops.repeat_heads(value, g.groups) if g.groups > 1 else value
    width = query.width
    if ops.autocast:
        query, key_states = ops.to(query, 2), ops.to(key_states, 2)
    weights = ops.scale(_scores(ops, g, query, key_states))
    if g.softcap:
        weights = ops.scale(weights, "div")
        weights = ops.tanh(weights)
        weights = ops.scale(weights)
    weights = ops.add_mask(weights, width)
    weights = ops.to(ops.softmax(ops.to(weights, 4), Purpose.ATTENTION_MATRIX), width, Purpose.ATTENTION_MATRIX)
    if ops.autocast:
        weights_16, value_states = ops.to(weights, 2), ops.to(value_states, 2)
        out = ops.bmm(weights_16, _batched(ops, g, value_states), g.query_elements)
    else:
        out = ops.bmm(weights, _batched(ops, g, value_states), g.query_elements)
    out = ops.clone(_unbatched(ops, g, out), "contiguous")
    return out, weights
