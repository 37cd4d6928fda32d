"""Operators that PyTorch composes differently on CUDA: dropout, RMSNorm and scaled dot product attention.

They are composite, so what runs is decided above the device's kernels; here they are replaced for ``meta`` tensors
at the autograd key for as long as a dry run lasts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from memtrace.estimate.engine.kernels import KernelDevice, attention_kernel

aten = torch.ops.aten


@contextlib.contextmanager
def cuda_composites(device: KernelDevice, attention: str) -> Iterator[None]:
    """Compose as CUDA does. ``attention`` is the kernel asked for: ``sdpa`` or ``flash``."""
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("dropout", _dropout, "AutogradMeta")
        library.impl("rms_norm", _rms_norm, "AutogradMeta")
        library.impl("scaled_dot_product_attention", _Attention(device, attention), "AutogradMeta")
        yield
    finally:
        library._destroy()


def _dropout(x: Any, p: float, train: bool) -> Any:
    """The fused kernel, whose mask has one byte an element."""
    if train and 0 < p < 1 and x.numel():
        return aten.native_dropout(x, p, train)[0]
    return x if not train or p == 0 else x * 0


def _rms_norm(x: Any, normalized_shape: list[int], weight: Any = None, eps: float | None = None) -> Any:
    """One kernel (PyTorch 2.9 and newer)."""
    return aten._fused_rms_norm(x, normalized_shape, weight, eps)[0]


class _Attention:
    """``scaled_dot_product_attention``: the kernel that this GPU would run."""

    def __init__(self, device: KernelDevice, asked: str) -> None:
        self.device = device
        self.asked = asked

    def __call__(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        shared = key.shape[-3] != query.shape[-3]
        kernel = attention_kernel(self.device, self.asked, query.element_size(), shared, query.shape[-1])
        if kernel == "flash" and attn_mask is not None:
            kernel = "efficient"  # flash attention takes no mask
        if query.dim() != 4 or query.shape[-1] != value.shape[-1]:
            kernel = "math"
        if attn_mask is not None and attn_mask.dtype == torch.bool and kernel != "math":
            zero, minus_infinity = (query.new_full((), number) for number in (0.0, float("-inf")))
            attn_mask = torch.where(attn_mask, zero, minus_infinity)
        wants_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        if kernel == "math":
            options = {"scale": scale, "enable_gqa": enable_gqa}
            return aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, None, **options
            )[0]
        if kernel == "efficient":
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, attn_mask, wants_grad, dropout_p, is_causal, scale=scale
            )[0]
        if kernel == "cudnn":
            return aten._scaled_dot_product_cudnn_attention(
                query, key, value, attn_mask, wants_grad, dropout_p, is_causal, False, scale=scale
            )[0]
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
