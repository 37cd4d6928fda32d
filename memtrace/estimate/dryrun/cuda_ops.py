"""What operators do to memory on CUDA and not on ``meta``: kernels' own buffers, workspaces, sums in place.

Sources: bitsandbytes 0.50 ``backends/cuda/ops.py``; PyTorch 2.11 ``aten/src/ATen/native/cuda/SoftMax.cu``,
``transformers/cuda/attention_backward.cu``, ``cuda/CUDABlas.cpp``, ``torch/csrc/autograd/input_buffer.cpp``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memtrace.attribution.categories import Purpose
from memtrace.estimate.dryrun.observer import DispatchMode, Handler
from memtrace.estimate.dryrun.stacks import called_by_engine
from memtrace.estimate.dryrun.values import value_of
from memtrace.estimate.engine.kernels import (
    KernelDevice,
    efficient_backward_workspace,
    fused_4bit_product,
    fused_backward_workspace,
)
from memtrace.estimate.engine.linears import BLOCK


class CudaOps:
    """Handlers for one dry run on ``device``; they keep which workspaces exist."""

    def __init__(self, device: KernelDevice) -> None:
        self.device = device
        self.products: set[tuple[int, int]] = set()  # (outputs, inputs) of the 4-bit products that ran
        self._workspaces: set[tuple[str, str]] = set()
        self._sole_references = _Probe.measure()

    def handlers(self) -> dict[str, Handler]:
        """By operator name."""
        return {
            "mm": self._product,
            "bmm": self._product,
            "baddbmm": self._product,
            "addmm": self._biased_product,
            "add": self._add,
            "mul": self._elementwise,
            "native_dropout": self._dropout,
            "native_dropout_backward": self._dropout_backward,
            "gemm_4bit": self._gemm_4bit,
            "dequantize_4bit": self._dequantize,
            "dequantize_blockwise": self._dequantize,
            "int8_vectorwise_quant": self._int8_quant,
            "int8_scaled_mm": self._int8_product,
            "int8_mixed_scaled_mm": self._int8_product,
            "_softmax": self._softmax,
            "_safe_softmax": self._safe_softmax,
            "_softmax_backward_data": self._softmax_backward,
            "_scaled_dot_product_efficient_attention": self._efficient,
            "_scaled_dot_product_cudnn_attention": self._cudnn,
            "_scaled_dot_product_efficient_attention_backward": self._efficient_backward,
            "_scaled_dot_product_cudnn_attention_backward": self._fused_backward,
            "_scaled_dot_product_flash_attention_backward": self._fused_backward,
            "_local_scalar_dense": self._read,
            "index": self._index,
            "_fused_adamw_": self._in_place,
        }

    # ---- products ------------------------------------------------------------------------------------------------
    def workspace(self, mode: DispatchMode, library: str, thread: str | None = None) -> None:
        """A library's workspace: made by a thread's first product, kept for ever."""
        thread = thread or ("backward" if torch._C._current_graph_task_id() != -1 else "forward")
        if (library, thread) in self._workspaces:
            return
        self._workspaces.add((library, thread))
        lt = library == "cublaslt"
        size = self.device.cublaslt_workspace_bytes if lt else self.device.cublas_workspace_bytes
        mode.observer.born(size, f"{library}_workspace", Purpose.CUBLAS_WORKSPACE)

    def warm_up(self, mode: DispatchMode, biased: bool) -> None:
        """Both threads have multiplied before."""
        for thread in ("backward", "forward"):
            self.workspace(mode, "cublas", thread)
            if biased:
                self.workspace(mode, "cublaslt", thread)

    def _product(self, mode: DispatchMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        mode.note(result, func._schema.name.partition("::")[2])
        self.workspace(mode, "cublas")
        return result

    def _biased_product(self, mode: DispatchMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        mode.note(result, "addmm")
        self.workspace(mode, "cublaslt" if args[0].dim() == 1 else "cublas")
        return result

    def _gemm_4bit(self, mode: DispatchMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The fused kernel, or dequantise (two scale vectors under double quantisation) and multiply."""
        x, _, (outputs, inputs) = args[:3]
        rows = x.numel() // inputs
        self.products.add((outputs, inputs))
        if fused_4bit_product(self.device, self.device.product_rows or rows, outputs, inputs):
            return func(*args, **kwargs)
        blocks = 4 * -(-outputs * inputs // BLOCK)
        named = _named(func, args, kwargs)
        nested = named.get("absmax_8bit") is not None
        scales = [blocks, blocks] if nested else []
        with mode.buffers("dequantize_4bit", *scales, outputs * inputs * x.element_size(), label=Purpose.DEQUANT):
            result = func(*args, **kwargs)
            mode.note(result, "gemm_4bit")
            self.workspace(mode, "cublaslt" if named.get("bias") is not None else "cublas")
        return result

    def _dequantize(self, mode: DispatchMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        mode.note(result, func._schema.name.partition("::")[2], Purpose.DEQUANT)
        return result

    def _int8_quant(self, mode: DispatchMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """No outlier columns: which there are depends on values. Finding them needs magnitudes and a mask."""
        x = args[0]
        threshold = args[1] if len(args) > 1 else kwargs.get("threshold", 0.0)
        result = func(x, 0.0)
        mode.note(result, "int8_vectorwise_quant")
        if not threshold:
            return result
        with mode.buffers("int8_outliers", x.numel() * x.element_size(), x.numel()):
            pass
        return result[0], result[1], x.new_empty((0,), dtype=torch.int64)

    def _int8_product(self, mode: DispatchMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The int32 product lives until it is scaled to 16 bits."""
        quantized, weight = (args[1], args[2]) if "mixed" in func._schema.name else (args[0], args[1])
        rows = quantized.numel() // quantized.shape[-1]
        shape = (*quantized.shape[:-1], weight.shape[0])
        dtype = args[0].dtype if "mixed" in func._schema.name else kwargs.get("dtype", torch.float16)
        with mode.buffers("int8_linear_matmul", rows * weight.shape[0] * 4):
            out = torch.empty(shape, dtype=dtype, device=quantized.device)
            mode.note(out, "int8_mm_dequant")
        return (out, None) if "mixed" in func._schema.name else out

    # ---- sums ----------------------------------------------------------------------------------------------------
    def _add(self, mode: DispatchMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The autograd engine sums gradients in place in the first one, if nobody else holds it.

        A dispatch mode switches that off, so it is done here: the engine's own sums run outside of any node.
        """
        if torch.is_grad_enabled() or torch._C._current_graph_task_id() == -1 or not called_by_engine():
            return elementwise(func, args, kwargs)
        return args[0] if _references(args[0]) <= self._sole_references else func(*args, **kwargs)

    def _elementwise(self, mode: DispatchMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return elementwise(func, args, kwargs)

    def _dropout(self, mode: DispatchMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result and a mask of one byte an element."""
        return torch.empty_like(args[0]), torch.empty_like(args[0], dtype=torch.bool)

    def _dropout_backward(self, mode: DispatchMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return torch.empty_like(args[0])

    def _in_place(self, mode: DispatchMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An update of values, of which there are none."""
        return None

    # ---- softmax and attention -----------------------------------------------------------------------------------
    def _softmax(self, mode: DispatchMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        mode.note(result, "_softmax", _matrix_label(mode, result))
        return result

    def _safe_softmax(self, mode: DispatchMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Tests for fully masked rows with a 1-byte matrix."""
        result = func(*args, **kwargs)
        mode.note(result, "_safe_softmax", _matrix_label(mode, result))
        with mode.buffers("_safe_softmax", result.numel(), result.numel() // result.shape[-1], 4):
            pass
        return result

    def _softmax_backward(self, mode: DispatchMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The product of gradient and output is a temporary."""
        result = func(*args, **kwargs)
        mode.note(result, "_softmax_backward_data")
        with mode.buffers("_softmax_backward_data", args[0].numel() * args[0].element_size()):
            pass
        return result

    def _efficient(self, mode: DispatchMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Its random-number state lies on the host."""
        result = func(*args, **kwargs)
        mode.note(result[:2], "efficient_attention")
        return (*result[:2], torch.empty((), dtype=torch.long), torch.empty((), dtype=torch.long))

    def _cudnn(self, mode: DispatchMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A workspace of 256 bytes; no log-sum-exp unless a gradient is wanted."""
        result = list(func(*args, **kwargs))
        wanted = args[4] if len(args) > 4 else kwargs.get("compute_log_sumexp", True)
        if not wanted:
            result[1] = result[1].new_empty((0,))
        mode.note(result, "cudnn_attention")
        with mode.buffers("cudnn_workspace", 256):
            pass
        return tuple(result)

    def _efficient_backward(self, mode: DispatchMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An fp32 product, two vectors of one number a row, then the kernel's workspace of dQ tiles."""
        result = func(*args, **kwargs)
        mode.note(result, "efficient_attention_backward")
        batch, heads, sequence, head_dim = args[1].shape
        rows = batch * heads * sequence * 4
        op = "efficient_attention_backward"
        product = mode.observer.born(args[1].numel() * 4, op)
        sums = mode.observer.born(rows, op)
        delta = mode.observer.born(rows, op)
        mode.observer.gone(sums)
        mode.observer.gone(product)
        with mode.buffers(op, efficient_backward_workspace(self.device, batch * heads, sequence, head_dim)):
            mode.observer.gone(delta)
        return result

    def _fused_backward(self, mode: DispatchMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An fp32 gradient of q and one number a row; with shared heads also dK and dV at the full head count."""
        result = func(*args, **kwargs)
        op = func._schema.name.partition("::")[2].removeprefix("_scaled_dot_product_")
        mode.note(result, op)
        query, key = args[1], args[2]
        rows, shared = query.numel() // query.shape[-1], key.shape[1] != query.shape[1]
        with mode.buffers(op, fused_backward_workspace(query.numel(), rows, query.element_size(), shared)):
            pass
        return result

    # ---- values --------------------------------------------------------------------------------------------------
    def _read(self, mode: DispatchMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args[0].device.type != "meta":
            return func(*args, **kwargs)
        return value_of(args[0])

    def _index(self, mode: DispatchMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Selection by a mask: every element is taken, as where no token is padding."""
        x, indices = args
        masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
        if len(masks) != 1 or len(indices) != 1 or masks[0].device.type != "meta":
            return func(*args, **kwargs)
        mask = masks[0]
        with mode.buffers("nonzero", 8 * mask.numel() * mask.dim()):
            out = x.new_empty((mask.numel(), *x.shape[mask.dim() :]))
            mode.note(out, "index")
        return out


class _Probe(TorchDispatchMode):  # type: ignore[misc]
    """Measures what :func:`_references` gives in a handler for a gradient that the engine alone holds."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "aten::add":
            self.seen.append(_references(args[0]))
        return func(*args, **(kwargs or {}))

    @classmethod
    def measure(cls) -> tuple[int, int]:
        """Sum two gradients of one leaf, each of them fresh."""
        leaf = torch.ones(2, requires_grad=True)
        product = (leaf * 2) * (leaf * 3)
        with cls() as probe:
            torch.autograd.backward(product, torch.ones(2))
        return min(probe.seen, default=(0, 0))


def _references(tensor: Any) -> tuple[int, int]:
    """How many hold the tensor, and how many its storage."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an elementwise operator whose first operand is contiguous and has the result's type and shape.

    PyTorch's own rules, written in Python, take ten times as long for the same answer; they decide every other case.
    """
    first, second = args[0], args[1] if len(args) > 1 else None
    plain = kwargs or func._schema.returns[0].alias_info is not None or not isinstance(first, torch.Tensor)
    if plain or not first.is_floating_point() or not first.is_contiguous():
        return func(*args, **kwargs)
    if isinstance(second, torch.Tensor):
        fits = second.dtype == first.dtype and second.dim() <= first.dim() and second.device == first.device
        if not fits or not second.is_contiguous():
            return func(*args, **kwargs)
        trailing = first.shape[first.dim() - second.dim() :]
        if any(mine not in (1, its) for mine, its in zip(second.shape, trailing, strict=True)):
            return func(*args, **kwargs)
    elif not isinstance(second, int | float) or isinstance(second, bool):
        return func(*args, **kwargs)
    return torch.empty_like(first)


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name."""
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def _matrix_label(mode: DispatchMode, result: Any) -> str | None:
    """Attention matrices have a category of their own in the forward pass."""
    square = result.dim() == 4 and result.shape[-1] == result.shape[-2] > 1
    passing = mode.observer.tape.default_label in (Purpose.FORWARD, Purpose.BACKWARD)
    return Purpose.ATTENTION_MATRIX if square and passing else None
