"""What CUDA's own kernels do to memory beyond their results: buffers and workspaces.

Handlers stand in front of the general kernel of ``device.cpp``; ``Kernels.default`` calls it.
Sources: bitsandbytes 0.50 ``backends/cuda/ops.py``; PyTorch 2.11 ``aten/src/ATen/native/cuda/SoftMax.cu``,
``transformers/cuda/attention_backward.cu``, ``cuda/CUDABlas.cpp``.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from memtrace.estimate.dryrun.assumed import Assumptions
from memtrace.estimate.dryrun.convolutions import Convolutions
from memtrace.estimate.dryrun.machine import DryMemory
from memtrace.estimate.dryrun.recurrent import Recurrent
from memtrace.estimate.dryrun.selections import Handler, Selections, buffers
from memtrace.estimate.engine.kernels import (
    efficient_backward_workspace,
    fused_4bit_product,
    fused_backward_workspace,
)
from memtrace.estimate.engine.linears import BLOCK

_MATH, _FLASH, _EFFICIENT, _CUDNN = 0, 1, 2, 3  # at::SDPBackend


class Kernels:
    """Handlers of one process's operators, for the kernels of the card of ``memory``."""

    def __init__(self, helper: ctypes.CDLL, memory: DryMemory, assumed: Assumptions) -> None:
        self.helper, self.device, self.assumed = helper, memory.gpu.device, assumed
        self._selections = Selections(helper, self.device, assumed)
        self._convolutions, self._recurrent = (
            Convolutions(memory, assumed),
            Recurrent(assumed, memory.gpu.device.multiprocessors),
        )
        self._keys = torch._C.DispatchKeySet(torch._C._dispatch_key_parse("VE"))
        self._libraries: list[Any] = [_shapes_from_cpp()]
        self.only_flash = False  # as a package of its own takes attention over
        self.attention_kernel = "eager"  # which ran last
        self.products: set[tuple[int, int]] = set()  # (outputs, inputs) of the 4-bit products that ran

    def install(self, operators: list[str]) -> None:
        """Own ``operators`` of ATen, those of bitsandbytes that are loaded, and what has a handler."""
        composite = ["aten::convolution", "aten::isinf", "aten::_linalg_check_errors", *_RECURRENT]
        built = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")  # a CUDA build has kernels of its own
        known = {f"aten::{name}" for name in operators} | {name for name in built if name.startswith("aten::")}
        names = sorted(known - {f"aten::{name}" for name in _EXPLICIT}) + composite
        names += [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("bitsandbytes::")]
        self._own(dict.fromkeys(names), {**self._aten(), **self._bitsandbytes()})
        seen = set(torch._C._dispatch_get_all_op_names())
        load = torch.ops.load_library

        def load_library(path: Any) -> None:
            """Kernels for CUDA that a package brings would read what is not there: shapes come from its others."""
            load(path)
            fresh = set(torch._C._dispatch_get_all_op_names()) - seen
            seen.update(fresh)
            own = fresh & set(torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"))
            self._own(sorted(own | fresh & self._selections.of_packages().keys()), self._selections.of_packages())

        torch.ops.load_library = load_library

    def _own(self, names: Iterable[str], handlers: dict[str, Handler]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in names:
                space, _, short = name.partition("::")
                short = short.removesuffix(".default")
                handler = handlers.get(name)
                self.helper.memtrace_own(space.encode(), short.encode(), int(handler is not None))
                if handler is not None:
                    library = torch.library.Library(space, "FRAGMENT" if space != "aten" else "IMPL")
                    library.impl(short, self._bound(name, handler), "CUDA", allow_override=True)
                    self._libraries.append(library)

    def _bound(self, name: str, handler: Handler) -> Handler:
        space, _, short = name.partition("::")
        packet, _, overload = short.partition(".")
        operator = getattr(getattr(getattr(torch.ops, space), packet), overload or "default")

        def default(*args: Any, **kwargs: Any) -> Any:
            return operator.redispatch(self._keys, *args, **kwargs)

        def run(*args: Any, **kwargs: Any) -> Any:
            return handler(default, *args, **kwargs)

        return run

    def forget(self, value: Any) -> None:
        """A tensor was written by something that nobody sees: its values are no longer known."""
        if isinstance(value, torch.Tensor) and value.is_cuda:
            self.helper.memtrace_forget(value.untyped_storage()._cdata)

    # ---- attention ---------------------------------------------------------------------------------------------
    def attention(self, facts: Any) -> int:
        """Which kernel ``scaled_dot_product_attention`` takes."""
        kernel = self._choice(facts)
        self.attention_kernel = ("math", "flash", "efficient", "cudnn")[kernel]
        return kernel

    def _choice(self, facts: Any) -> int:
        """As ``sdp_utils.cpp`` chooses."""
        dim, width, size, value_size, heads, key_heads, queries, keys, masked, causal, grad_mask, dense = facts[:12]
        major = self.device.capability[0]
        on = torch.backends.cuda
        if dim != 4 or size != value_size or not dense:
            return _MATH
        if self.only_flash:
            return _EFFICIENT if masked else _FLASH
        half, shared = width == 2, heads != key_heads
        if half and major >= 8 and size <= 256 and not grad_mask:
            fits_cudnn = size <= 128 and size % 8 == 0 and major >= 9
            if fits_cudnn and on.cudnn_sdp_enabled() and queries > 1 and not (causal and queries != keys):
                return _CUDNN
            if not masked and on.flash_sdp_enabled() and not (causal and queries != keys):
                return _FLASH
        if not shared and on.mem_efficient_sdp_enabled():
            return _EFFICIENT
        return _MATH

    # ---- handlers ----------------------------------------------------------------------------------------------
    def _aten(self) -> dict[str, Handler]:
        fused, recurrent = self._fused_backward, self._recurrent
        return {
            **self._selections.handlers(),
            "aten::convolution": self._convolutions.forward,
            "aten::convolution_backward": self._convolutions.backward,
            **dict(zip(_RECURRENT, (recurrent.forward, recurrent.backward, recurrent.flatten), strict=True)),
            "aten::_softmax": self._dense,
            "aten::_log_softmax": self._dense,
            "aten::native_layer_norm": self._dense,
            "aten::_softmax_backward_data": self._softmax_backward,
            "aten::_log_softmax_backward_data": self._log_softmax_backward,
            "aten::mse_loss": self._loss,
            "aten::huber_loss": self._loss,
            "aten::smooth_l1_loss": self._loss,
            "aten::mse_loss_backward": self._loss_backward,
            "aten::huber_loss_backward": self._loss_backward,
            "aten::smooth_l1_loss_backward": self._loss_backward,
            "aten::binary_cross_entropy": self._binary_loss,
            "aten::upsample_nearest2d_backward": self._upsample_backward,
            "aten::_upsample_nearest_exact2d_backward": self._upsample_backward,
            "aten::_foreach_norm.Scalar": self._norms,
            "aten::_scaled_dot_product_efficient_attention": self._efficient,
            "aten::_scaled_dot_product_efficient_attention_backward": self._efficient_backward,
            "aten::_scaled_dot_product_cudnn_attention": self._cudnn,
            "aten::_scaled_dot_product_cudnn_attention_backward": fused,
            "aten::_scaled_dot_product_flash_attention_backward": fused,
            "aten::_grouped_mm": self._grouped_product,
            "aten::addmm.dtype_out": self._add_product,
            "aten::native_group_norm": self._group_norm,
            "aten::native_group_norm_backward": self._group_norm_backward,
            "aten::native_batch_norm": self._batch_norm,
            "aten::native_batch_norm_backward": self._batch_norm_backward,
            "aten::log_sigmoid_forward": lambda _default, x: (torch.empty_like(x), x.new_empty(0)),
            "aten::_thnn_fused_lstm_cell": lambda _default, gates, _hidden, cell, *_: tuple(
                reversed([torch.empty_like(made) for made in (gates, cell, cell)])
            ),
            "aten::_thnn_fused_lstm_cell_backward_impl": lambda _default, _hy, _cy, cell, _new, gates, biased: (
                torch.empty_like(gates),
                torch.empty_like(cell),
                gates.new_empty(gates.shape[1:] if biased else (0,)),
            ),
            "aten::_thnn_fused_gru_cell": lambda _default, _gates, _hidden, state, *_: tuple(
                reversed([state.new_empty((len(state), 5 * state.shape[1])), torch.empty_like(state)])
            ),
            "aten::_thnn_fused_gru_cell_backward": self._gru_backward,
            "aten::_linalg_check_errors": lambda *_, **__: None,  # every matrix can be factorised
            "aten::_cummax_helper": lambda *_: None,
            "aten::_cummin_helper": lambda *_: None,
        }

    def _dense(self, default: Handler, x: Any, *args: Any) -> Any:
        """Operands that are not contiguous are copied."""
        copy = None if x.is_contiguous() else buffers(x.numel() * x.element_size())
        result = default(x, *args)
        del copy
        return result

    def _loss(self, default: Handler, x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
        """A loss that is summed up is there once for each element first."""
        result = default(x, y, *args, **kwargs)
        if not result.dim():
            each = torch.empty(torch.broadcast_shapes(x.shape, y.shape), dtype=x.dtype, device="cuda")
            torch.sum(each, list(range(each.dim())), out=result)
        return result

    def _loss_backward(self, default: Handler, grad: Any, x: Any, *_: Any) -> Any:
        """Contiguous, whatever the layout of ``x``."""
        return torch.zeros_like(x, memory_format=torch.contiguous_format)

    def _upsample_backward(self, default: Handler, grad: Any, *args: Any) -> Any:
        """A part of a larger tensor is copied."""
        result = default(grad, *args)
        grad.contiguous(memory_format=suggest_memory_format(grad))
        return result

    def _binary_loss(self, default: Handler, x: Any, y: Any, weight: Any = None, reduction: int = 1) -> Any:
        """The sum keeps the storage of the losses that it sums up."""
        each = torch.empty_like(x)
        if reduction:
            total = each.sum()
            each.resize_(()).copy_(total)
        return each

    def _norms(self, default: Handler, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """One kernel for all of them keeps a number of 32 bits for each 65,536 elements (of the largest, for each)."""
        most = max((-(-tensor.numel() // (1 << 16)) for tensor in tensors), default=0)
        held = buffers(len(tensors) * most * 4 * (len({tensor.dtype for tensor in tensors}) == 1))
        found = default(tensors, *args, **kwargs)
        del held
        return found

    def _softmax_backward(self, default: Handler, grad: Any, *args: Any) -> Any:
        """The product of gradient and output is a temporary, which is copied where it is not contiguous."""
        result = default(grad, *args)
        product = grad * args[0]
        copies = [each.contiguous() for each in (product, args[0])]
        del copies, product
        return result

    def _log_softmax_backward(self, default: Handler, *args: Any) -> Any:
        """Operands that are not contiguous are copied."""
        result = default(*args)
        copies = [each.contiguous() for each in args[:2]]
        del copies
        return result

    def _efficient(self, default: Handler, *args: Any, **kwargs: Any) -> Any:
        """Its random-number state lies on the host."""
        out, log_sum, *_ = default(*args, **kwargs)
        return out, log_sum, torch.zeros((), dtype=torch.long), torch.zeros((), dtype=torch.long)

    def _cudnn(self, default: Handler, *args: Any, **kwargs: Any) -> Any:
        """A workspace of 256 bytes."""
        result = default(*args, **kwargs)
        buffers(256)
        return result

    def _efficient_backward(self, default: Handler, grad: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        """An fp32 product, two vectors of one number a row, then the kernel's workspace of dQ tiles."""
        batch, heads, sequence, head_dim = query.shape
        copy = None if grad.transpose(1, 2).is_contiguous() else buffers(grad.numel() * grad.element_size())
        result = default(grad, query, *args, **kwargs)
        rows = batch * heads * sequence * 4
        product, sums, delta = buffers(query.numel() * 4, rows, rows)
        del sums, product
        workspace = buffers(efficient_backward_workspace(self.device, batch * heads, sequence, head_dim))
        del delta
        del workspace
        del copy
        return result

    def _fused_backward(self, default: Handler, grad: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        """An fp32 gradient of q and one number a row; with shared heads also dK and dV at the full head count."""
        result = default(grad, query, key, *args, **kwargs)
        rows, shared = query.numel() // query.shape[-1], key.shape[1] != query.shape[1]
        buffers(fused_backward_workspace(query.numel(), rows, query.element_size(), shared))
        return result

    # ---- products of groups, recurrent cells -------------------------------------------------------------------
    def _grouped_product(
        self, default: Handler, a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
    ) -> Any:
        """The result's shape does not depend on how many rows each group has; rows are padded to 16 bytes."""
        dtype = out_dtype or a.dtype
        if a.dim() == b.dim():
            shape: Any = (len(offs), a.shape[0], b.shape[1]) if a.dim() == 2 else (a.shape[0], a.shape[1], b.shape[2])
        else:
            shape = (a.shape[0], b.shape[2]) if a.dim() == 2 else (a.shape[1], b.shape[1])
        grain = 16 // dtype.itemsize
        width = -(-shape[-1] // grain) * grain
        return a.new_empty((*shape[:-1], width), dtype=dtype)[..., : shape[-1]]

    def _add_product(self, default: Handler, *_: Any, out: Any, **__: Any) -> Any:
        """Some releases can't tell its shape, which is that of ``out``."""
        self.helper.memtrace_product(0)
        self.forget(out)
        return out

    def _gru_backward(self, default: Handler, grad: Any, workspace: Any, biased: bool) -> Any:
        gates = (len(workspace), 3 * workspace.shape[1] // 5)
        found = workspace.new_empty(gates), workspace.new_empty(gates), torch.empty_like(grad)
        return *found, *(each.sum(0) if biased else None for each in found[:2])

    # ---- norms -------------------------------------------------------------------------------------------------
    def _group_norm(self, default: Handler, x: Any, weight: Any, bias: Any, *sizes: Any) -> Any:
        """A factor and a summand for each channel, in 32 bits."""
        result = default(x, weight, bias, *sizes)
        images, channels, pixels = sizes[:3]
        if pixels > 1 and (weight is not None or bias is not None):
            held = buffers(images * channels * 4, images * channels * 4)
            del held
        return result

    def _group_norm_backward(
        self, default: Handler, grad: Any, x: Any, mean: Any, rstd: Any, weight: Any, *rest: Any
    ) -> Any:
        """Two sums for each channel, in 32 bits; for the images two numbers a group and a factor a channel."""
        result = default(grad, x, mean, rstd, weight, *rest)
        images, channels, pixels, groups, wanted = rest[:5]
        by_channel, by_group = images * channels * 4, images * groups * 4
        if pixels > 1:
            sums = buffers(by_channel, by_channel)
            if wanted[0]:
                factors = buffers(by_group, by_group, by_channel * (weight is not None))
                del factors[1], factors[0], factors
            del sums
        return result

    def _batch_norm(self, default: Handler, x: Any, weight: Any, bias: Any, mean: Any, var: Any, *rest: Any) -> Any:
        result = default(x, weight, bias, mean, var, *rest)
        if rest[0]:  # training
            self._channels_last_sums(x, 4)
        return result

    def _batch_norm_backward(self, default: Handler, grad: Any, x: Any, *rest: Any) -> Any:
        result = default(grad, x, *rest)
        self._channels_last_sums(x, 2)
        return result

    def _channels_last_sums(self, x: Any, numbers: int) -> None:
        """Staging of blocks that share a channel, as ``flexible_launch_configs`` in ``Normalization.cuh`` has it."""
        if x.dim() != 4 or x.is_contiguous() or not x.is_contiguous(memory_format=torch.channels_last):
            return
        channels, rows = x.shape[1], x.numel() // x.shape[1]
        across = min(_last_power(channels), 32)
        down = min(_last_power(-(-rows // 16)), 512 // across)
        if across * down != 512:
            across = min(_last_power(channels), 512 // down)
        sharing = min(-(-rows // (down * 16)), 128)
        if sharing >= 8:
            held = buffers(numbers * channels * sharing * 4, 4 * -(-channels // across))
            del held

    # ---- bitsandbytes --------------------------------------------------------------------------------------------
    def _bitsandbytes(self) -> dict[str, Handler]:
        product = self._int8_product
        return {
            "bitsandbytes::gemm_4bit": self._gemm_4bit,
            "bitsandbytes::quantize_4bit": lambda _, weight, block, kind, storage: self._quantized(
                weight, block, ((weight.numel() + 1) // (storage.itemsize * 2), 1), storage
            ),
            "bitsandbytes::quantize_blockwise": lambda _, values, code, block: self._quantized(
                values, block, values.shape, torch.uint8
            ),
            "bitsandbytes::int8_vectorwise_quant": self._int8_quant,
            "bitsandbytes::int8_scaled_mm": product,
            "bitsandbytes::int8_mixed_scaled_mm": lambda default, a, *args, **kwargs: (
                product(default, *args, dtype=a.dtype, **kwargs),
                None,
            ),
        }

    @staticmethod
    def _quantized(values: Any, block: int, shape: Any, storage: Any) -> tuple[Any, Any]:
        """The second result, the scales, is asked for first."""
        values = values.contiguous()
        scales = values.new_empty((-(-values.numel() // block),), dtype=torch.float32)
        return values.new_empty(shape, dtype=storage), scales

    def _gemm_4bit(self, default: Handler, x: Any, weight: Any, shape: Any, *args: Any, **kwargs: Any) -> Any:
        """The fused kernel, or dequantise (two scale vectors under double quantisation) and multiply."""
        outputs, inputs = shape
        self.products.add((outputs, inputs))
        if fused_4bit_product(self.device, self.device.product_rows or x.numel() // inputs, outputs, inputs):
            return default(x, weight, shape, *args, **kwargs)
        blocks = 4 * -(-outputs * inputs // BLOCK)
        names = [argument.name for argument in torch.ops.bitsandbytes.gemm_4bit.default._schema.arguments]
        named = dict(zip(names, (x, weight, shape, *args), strict=False)) | kwargs
        scales = [blocks, blocks] if named.get("absmax_8bit") is not None else []
        held = buffers(*scales, outputs * inputs * x.element_size())
        result = default(x, weight, shape, *args, **kwargs)
        self.helper.memtrace_product(int(named.get("bias") is not None))
        del held
        return result

    def _int8_quant(self, default: Handler, x: Any, threshold: float = 0.0) -> Any:
        """No outlier columns: which there are depends on values. Finding them needs magnitudes and a mask."""
        result = default(x, 0.0)
        if not threshold:
            return result
        self.assumed.note("outliers", "8-bit products split off no columns with large values")
        buffers(x.numel() * x.element_size(), x.numel())
        return result[0], result[1], x.new_empty((0,), dtype=torch.int64)

    def _int8_product(
        self, default: Handler, quantized: Any, weight: Any, *_: Any, dtype: Any = None, **__: Any
    ) -> Any:
        """The int32 product lives until it is scaled to 16 bits."""
        rows = quantized.numel() // quantized.shape[-1]
        held = buffers(rows * weight.shape[0] * 4)
        out = quantized.new_empty((*quantized.shape[:-1], weight.shape[0]), dtype=dtype or torch.float16)
        del held
        return out


def _shapes_from_cpp() -> Any:
    """Have the code that CUDA's kernels run tell shapes: PyTorch puts Python in front of it, a hundred times slower."""
    from torch._meta_registrations import _meta_lib_dont_use_me_use_register_meta as replaced

    names = [key.split("/")[1] for key in replaced._op_impls]
    replaced._destroy()
    library = torch.library.Library("aten", "IMPL", "Meta")
    for name in names:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            kernel = operator.py_kernels[torch._C.DispatchKey.Meta]
            library.impl(operator, _CORRECTED[name](kernel) if name in _CORRECTED else kernel)
    return library


def _without_sums(shapes: Handler) -> Handler:
    """cuDNN's attention has no log-sum-exp unless a gradient is wanted."""

    def run(query: Any, key: Any, value: Any, bias: Any, wanted: bool, *args: Any, **kwargs: Any) -> Any:
        out, sums, *rest = shapes(query, key, value, bias, wanted, *args, **kwargs)
        return out, sums if wanted else sums.new_empty((0,)), *rest

    return run


def _without_seeds(shapes: Handler) -> Handler:
    """The random-number state of efficient attention lies on the host."""

    def run(*args: Any, **kwargs: Any) -> Any:
        out, sums, *states = shapes(*args, **kwargs)
        return out, sums, *(state.new_empty((0,)) for state in states)

    return run


#: Operators whose own shapes are not those of CUDA's kernels.
_CORRECTED = {
    "_scaled_dot_product_cudnn_attention": _without_sums,
    "_scaled_dot_product_efficient_attention": _without_seeds,
}


def _last_power(number: int) -> int:
    return 1 << (max(1, number).bit_length() - 1)


_RECURRENT = ("aten::_cudnn_rnn", "aten::_cudnn_rnn_backward", "aten::_cudnn_rnn_flatten_weight")
#: Operators with a kernel of their own in ``device.cpp``.
_EXPLICIT = frozenset(
    (
        "empty.memory_format", "empty_strided", "as_strided", "view", "_reshape_alias", "unfold", "copy_", "equal",
        "set_.source_Storage_storage_offset", "set_.source_Storage", "set_.source_Tensor", "set_", "record_stream",
        "_local_scalar_dense", "_fused_sdp_choice", "_assert_async", "_assert_async.msg",
    )
)  # fmt: skip
