"""CUDA's autocast for ``meta`` tensors, which PyTorch's own does not know.

Source: PyTorch 2.11 ``aten/src/ATen/autocast_mode.{h,cpp}``: which operators run in 16 bits, which in fp32, which in
the widest type, and the cache of 16-bit copies of trainable fp32 leaves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memtrace.estimate.dryrun.observer import DEVICE
from memtrace.estimate.dryrun.patches import replaced

_LOWER = (
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "conv1d",
    "conv2d", "scaled_dot_product_attention", "prelu",
)  # fmt: skip
_FP32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow", "__pow__", "__rpow__", "softplus", "layer_norm", "group_norm", "rms_norm", "norm", "nuclear_norm",
    "cosine_similarity", "nll_loss", "cross_entropy", "cross_entropy_loss", "mse_loss", "l1_loss", "smooth_l1_loss",
    "kl_div", "renorm", "logsumexp", "cdist", "dist", "pdist",
)  # fmt: skip
_FP32_UNLESS_TYPED = ("prod", "softmax", "log_softmax", "cumprod", "cumsum", "sum")
_WIDEST = ("cat", "concat", "stack", "addcdiv", "addcmul", "bilinear", "cross", "dot", "index_put", "scatter_add")


class MetaAutocast(TorchFunctionMode):  # type: ignore[misc]
    """Casts arguments as autocast would; entered by :class:`MetaRegion`."""

    def __init__(self, dtype: Any, cache: dict[int, tuple[Any, Any]]) -> None:
        super().__init__()
        self.dtype = dtype
        self.cache = cache

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _LOWER:
            args, kwargs = self._map(args, self._lower), {key: self._one(v, self._lower) for key, v in kwargs.items()}
        elif name in _FP32:
            args, kwargs = self._map(args, _fp32), {key: self._one(v, _fp32) for key, v in kwargs.items()}
        elif name in _FP32_UNLESS_TYPED and kwargs.get("dtype") is None:
            if not any(isinstance(a, torch.dtype) for a in args) and _is_half(args):
                kwargs = kwargs | {"dtype": torch.float32}
        elif name in _WIDEST and args:
            args = self._map(args, _fp32) if _mixed(args) else args
        return func(*args, **kwargs)

    def _map(self, args: Any, cast: Any) -> Any:
        return tuple(self._one(item, cast) for item in args)

    def _one(self, value: Any, cast: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return cast(value)
        if type(value) in (list, tuple):
            return type(value)(self._one(item, cast) for item in value)
        return value

    def _lower(self, tensor: Any) -> Any:
        """To 16 bits; copies of trainable fp32 leaves are kept until autocast ends."""
        if tensor.dtype == self.dtype or not tensor.is_floating_point() or tensor.dtype == torch.float64:
            return tensor
        if not (tensor.requires_grad and tensor.is_leaf and tensor.dtype == torch.float32 and not tensor._is_view()):
            return tensor.to(self.dtype)
        known = self.cache.get(id(tensor))
        if known is None:
            known = self.cache[id(tensor)] = tensor, tensor.to(self.dtype)
        return known[1]


def _fp32(tensor: Any) -> Any:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _is_half(args: Any) -> bool:
    return bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype in (torch.float16, torch.bfloat16)


def _mixed(args: Any) -> bool:
    items = args[0] if isinstance(args[0], list | tuple) else args
    kinds = {item.dtype for item in items if isinstance(item, torch.Tensor) and item.is_floating_point()}
    return len(kinds) > 1 and torch.float32 in kinds


class MetaRegion(contextlib.AbstractContextManager["MetaRegion"]):
    """``torch.autocast("meta", …)``. Code that asks whether autocast is on (for CUDA, the default) gets the answer."""

    def __init__(self, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        self.dtype = dtype or torch.bfloat16
        self.enabled = enabled
        self._stack = contextlib.ExitStack()
        self._cache: dict[int, tuple[Any, Any]] = {}

    def __enter__(self) -> MetaRegion:
        before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        self._stack.callback(torch.set_autocast_dtype, "cuda", before[1])
        self._stack.callback(torch.set_autocast_enabled, "cuda", before[0])
        torch.set_autocast_enabled("cuda", self.enabled)
        torch.set_autocast_dtype("cuda", self.dtype)
        if self.enabled:
            self._stack.enter_context(MetaAutocast(self.dtype, self._cache))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._cache.clear()


@contextlib.contextmanager
def meta_autocast() -> Iterator[None]:
    """``torch.autocast`` knows the device type ``meta`` for the duration of the block."""
    original, is_enabled, dtype_of = torch.autocast, torch.is_autocast_enabled, torch.get_autocast_dtype

    def autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return (
            MetaRegion(device_type, *args, **kwargs)
            if device_type == DEVICE
            else original(device_type, *args, **kwargs)
        )

    def is_autocast_enabled(device_type: str = "cuda") -> bool:
        return bool(is_enabled("cuda" if device_type == DEVICE else device_type))

    def get_autocast_dtype(device_type: str) -> Any:
        return dtype_of("cuda" if device_type == DEVICE else device_type)

    functions = {"is_autocast_enabled": is_autocast_enabled, "get_autocast_dtype": get_autocast_dtype}
    with replaced(torch, autocast=autocast, **functions), replaced(torch.amp, autocast=autocast):
        yield
