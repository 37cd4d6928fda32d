"""What CUDA's own kernels do to memory beyond their results: buffers, workspaces, and shapes that depend on values.

Handlers stand in front of the general kernel of ``device.cpp``; ``Kernels.default`` calls it.
Sources: bitsandbytes 0.50 ``backends/cuda/ops.py``; PyTorch 2.11 ``aten/src/ATen/native/cuda/SoftMax.cu``,
``transformers/cuda/attention_backward.cu``, ``cuda/CUDABlas.cpp``, ``cuda/Nonzero.cu``, ``cuda/Embedding.cu``; CUB 3.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from memtrace.estimate.dryrun.assumed import Assumptions
from memtrace.estimate.dryrun.convolutions import Convolutions
from memtrace.estimate.dryrun.machine import DryMemory
from memtrace.estimate.dryrun.recurrent import Recurrent
from memtrace.estimate.engine.kernels import (
    efficient_backward_workspace,
    fused_4bit_product,
    fused_backward_workspace,
)
from memtrace.estimate.engine.linears import BLOCK

Handler = Callable[..., Any]
_MATH, _FLASH, _EFFICIENT, _CUDNN = 0, 1, 2, 3  # at::SDPBackend


class Kernels:
    """Handlers of one process's operators, for the kernels of the card of ``memory``."""

    def __init__(self, helper: ctypes.CDLL, memory: DryMemory, assumed: Assumptions) -> None:
        self.helper, self.device, self.assumed = helper, memory.gpu.device, assumed
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
            self._own(sorted(own | fresh & self._packages().keys()), self._packages())

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

    def _buffers(self, *sizes_bytes: int) -> list[Any]:
        """A kernel's own buffers, alive as long as the list."""
        return [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes_bytes if size]

    def is_known(self, tensor: Any) -> bool:
        """Whether a tensor's values are known."""
        return not tensor.is_cuda or bool(self.helper.memtrace_known(tensor.untyped_storage()._cdata))

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
            "aten::nonzero": self._nonzero,
            "aten::masked_select": self._masked_select,
            "aten::index.Tensor": self._index,
            "aten::_unique2": self._unique,
            "aten::unique_consecutive": self._runs,
            "aten::unique_dim": self._unique_slices,
            "aten::cumsum": self._scan,
            "aten::cumprod": self._scan,
            "aten::repeat_interleave.Tensor": self._repeat_interleave,
            "aten::bincount": self._bincount,
            "aten::_grouped_mm": self._grouped_product,
            "aten::addmm.dtype_out": self._add_product,
            "aten::native_group_norm": self._group_norm,
            "aten::native_group_norm_backward": self._group_norm_backward,
            "aten::native_batch_norm": self._batch_norm,
            "aten::native_batch_norm_backward": self._batch_norm_backward,
            "aten::log_sigmoid_forward": lambda _default, x: (torch.empty_like(x), x.new_empty(0)),
            "aten::embedding_dense_backward": self._embedding_backward,
            "aten::_embedding_bag_backward": self._embedding_bag_backward,
            "aten::_use_miopen_ctc_loss": lambda *_: False,
            "aten::_use_miopen_ctc_loss.Tensor": lambda *_: False,
            "aten::_use_cudnn_ctc_loss": self._own_ctc,
            "aten::_use_cudnn_ctc_loss.Tensor": self._own_ctc,
            "aten::_ctc_loss": self._ctc,
            "aten::_ctc_loss.Tensor": self._ctc,
            "aten::_ctc_loss_backward": self._ctc_backward,
            "aten::_ctc_loss_backward.Tensor": self._ctc_backward,
            "aten::_index_put_impl_": self._index_put,
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
        copy = None if x.is_contiguous() else self._buffers(x.numel() * x.element_size())
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
        held = self._buffers(len(tensors) * most * 4 * (len({tensor.dtype for tensor in tensors}) == 1))
        found = default(tensors, *args, **kwargs)
        del held
        return found

    def _own_ctc(self, default: Handler, log_probs: Any, targets: Any, *_: Any) -> bool:
        if targets.dim() == 1 and targets.dtype == torch.int32:
            self.assumed.note("ctc", "a CTC loss takes PyTorch's own kernel, which holds more than cuDNN's")
        return False

    def _ctc(self, default: Handler, log_probs: Any, targets: Any, _inputs: Any, lengths: Any, *_: Any) -> Any:
        """The loss of each sequence, and paths through it: a place between any two of the longest target's letters."""
        steps, batch, _letters = log_probs.shape
        if isinstance(lengths, torch.Tensor) and self.is_known(lengths):
            lengths = lengths.tolist()
        if isinstance(lengths, torch.Tensor):
            self.assumed.note("ctc_lengths", "targets of a CTC loss are as long as they can be")
            longest = targets.shape[1] if targets.dim() == 2 else -(-targets.numel() // batch)
        else:
            longest = max(lengths, default=0)
        paths = log_probs.new_empty((batch, steps, 2 * longest + 1))
        self._buffers(*[8 * batch] * 3)
        return log_probs.new_empty((batch,)), paths

    def _ctc_backward(self, default: Handler, grad: Any, log_probs: Any, *rest: Any, **_: Any) -> Any:
        """A second set of paths, from the end."""
        paths = torch.empty_like(rest[4])
        found = torch.zeros_like(log_probs)
        del paths
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
        self._buffers(256)
        return result

    def _efficient_backward(self, default: Handler, grad: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        """An fp32 product, two vectors of one number a row, then the kernel's workspace of dQ tiles."""
        batch, heads, sequence, head_dim = query.shape
        copy = None if grad.transpose(1, 2).is_contiguous() else self._buffers(grad.numel() * grad.element_size())
        result = default(grad, query, *args, **kwargs)
        rows = batch * heads * sequence * 4
        product, sums, delta = self._buffers(query.numel() * 4, rows, rows)
        del sums, product
        workspace = self._buffers(efficient_backward_workspace(self.device, batch * heads, sequence, head_dim))
        del delta
        del workspace
        del copy
        return result

    def _fused_backward(self, default: Handler, grad: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        """An fp32 gradient of q and one number a row; with shared heads also dK and dV at the full head count."""
        result = default(grad, query, key, *args, **kwargs)
        rows, shared = query.numel() // query.shape[-1], key.shape[1] != query.shape[1]
        self._buffers(fused_backward_workspace(query.numel(), rows, query.element_size(), shared))
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
            held = self._buffers(images * channels * 4, images * channels * 4)
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
            sums = self._buffers(by_channel, by_channel)
            if wanted[0]:
                factors = self._buffers(by_group, by_group, by_channel * (weight is not None))
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
            held = self._buffers(numbers * channels * sharing * 4, 4 * -(-channels // across))
            del held

    # ---- embeddings --------------------------------------------------------------------------------------------
    def _embedding_backward(
        self, default: Handler, grad: Any, indices: Any, rows: int, padding: int, by_frequency: bool
    ) -> Any:
        """Few rows are added where they belong; many are sorted first."""
        grad = grad.contiguous()
        if indices.numel() <= 3072 and not by_frequency:
            return grad.new_zeros((rows, grad.shape[-1]))
        return self._sorted_sums(grad, indices, rows)

    def _embedding_bag_backward(self, default: Handler, grad: Any, indices: Any, *rest: Any) -> Any:
        """Sums and means as an embedding's; a maximum is added where it belongs."""
        *_, rows, _, mode, sparse = rest[:8]
        if mode == 2 or sparse:
            return default(grad, indices, *rest)
        return self._sorted_sums(grad.contiguous(), indices, rows)

    def _sorted_sums(self, grad: Any, indices: Any, rows: int) -> Any:
        """``EmbeddingBackwardKernel.cu``: indices sorted by CUB, then partial sums of ten rows each in 32 bits."""
        count, width, place = indices.numel(), grad.shape[-1], indices.element_size()
        held = self._sorted(count, place)
        found = grad.new_zeros((rows, width))
        segments = min(count, rows)
        held += self._buffers(count * place, 8)
        keys = self._buffers(count * place)
        self._buffers(_SCAN)
        del keys
        held += self._buffers(segments * place, segments * place)
        self._buffers(_SCAN)
        partial = count // 10 + segments
        held += self._buffers(8, partial * place)
        self._buffers(partial * 32 * -(-width // 32) * 4)
        while held:
            held.pop()
        return found

    def _sorted(self, count: int, place: int) -> list[Any]:
        """Indices and where they came from, sorted by CUB: one block of threads, or digit by digit."""
        held, sources = self._buffers(count * place, count * place), self._buffers(count * place)
        self._buffers(_digits(count, place, place))
        del sources
        return held

    # ---- shapes that depend on values ----------------------------------------------------------------------------
    def _taken(self, elements: int, mask: Any = None) -> int:
        """How many elements a mask takes. One that picks one of n kinds takes an even share of them."""
        even = 1.0 if mask is None else self.helper.memtrace_share(mask.untyped_storage()._cdata)
        if even < 1:
            self.assumed.note("even", "what chooses among kinds (experts, classes) takes them equally often")
            return max(1, round(elements * even))
        return min(elements, round(elements * self.assumed.value("share")))

    def _nonzero(self, default: Handler, x: Any) -> Any:
        """A count on the device, which blocks of threads sum up, then the places."""
        count = self._buffers(4)
        single = x.numel() <= 4096
        self._buffers(1 if single else _aligned(4 * 5 * 8 * self.device.multiprocessors) + 255)
        if self.is_known(x):
            found = default(x)
        else:
            found = x.new_empty((max(x.dim(), 1), self._taken(x.numel(), x)), dtype=torch.long).t()
        self._buffers(_SELECTION)
        del count
        return found

    def _masked_select(self, default: Handler, x: Any, mask: Any) -> Any:
        """As the device does it: an index."""
        wide, chosen = torch.broadcast_tensors(x, mask)
        return torch.ops.aten.index.Tensor(wide, [chosen])

    def _index(self, default: Handler, x: Any, indices: Any) -> Any:
        """Selection by masks goes through the positions of what is true, as on the device."""
        return default(x, _positions(x, indices))

    def _index_put(
        self, default: Handler, x: Any, indices: Any, values: Any, accumulate: bool = False, unsafe: bool = False
    ) -> Any:
        """Where values are added they are sorted by their place first (``index_put_with_sort_kernel``)."""
        if not accumulate and len(indices) == values.numel() == 1:
            return default(x, indices, values, accumulate, unsafe)  # fills
        indices = _positions(x, indices)
        result = default(x, indices, values, accumulate, unsafe)
        sizes = [i.numel() * 8 for i in indices if i is not None and i.numel()]
        if not accumulate or not sizes:
            return result
        size = max(sizes)
        linear: list[Any] = []
        for _ in sizes:
            wrapped = self._buffers(size)
            scaled = self._buffers(size)
            del wrapped
            linear = linear or scaled
            del scaled
        del indices
        self._sorted(size // 8, 8)
        return result

    def _unique(
        self, default: Handler, x: Any, _sorted: bool = True, inverse: bool = False, counts: bool = False
    ) -> Any:
        """``UniqueCub.cu``: a sorted copy, and where its elements came from if that is asked for."""
        if x.dtype == torch.bool or not x.numel():
            return default(x, _sorted, inverse, counts) if self.is_known(x) else _two_values(x, inverse, counts)
        sorted_copy = self._buffers(x.numel() * x.element_size())
        if inverse:
            places, sources = self._buffers(x.numel() * 8), self._buffers(x.numel() * 8)
            self._buffers(_digits(x.numel(), x.element_size(), 8))
            del places
        else:
            sources = []
            self._buffers(_digits(x.numel(), x.element_size()))
        found = self._distinct(lambda host: torch._unique2(host, True, inverse, counts), x, inverse, counts)
        del sources, sorted_copy
        return found

    def _runs(self, default: Handler, x: Any, inverse: bool = False, counts: bool = False, dim: Any = None) -> Any:
        """``unique_consecutive``, whose elements lie in order."""
        if dim is not None:
            return self._unique_slices(default, x, inverse, counts, dim)
        if not x.numel():
            return default(x, inverse, counts) if self.is_known(x) else _two_values(x, inverse, counts)
        return self._distinct(lambda host: torch.ops.aten.unique_consecutive(host, inverse, counts), x, inverse, counts)

    def _distinct(self, on_host: Handler, x: Any, inverse: bool, counts: bool) -> Any:
        """Results keep the storage that they had before it was known how many elements differ."""
        most = x.numel()
        places = x.new_zeros(x.shape if inverse else (0,), dtype=torch.long)
        if inverse:
            held = self._buffers(most * 8)
            self._buffers(_SCAN)
            del held
        found = x.new_zeros((most,))
        length = self._buffers(8)
        each = x.new_zeros((most if counts else 0,), dtype=torch.long)
        self._buffers(_SELECTION)
        del length
        if self.is_known(x):
            values, where, numbers = on_host(x.cpu())
            found.resize_(values.shape).copy_(values)
            if inverse:
                places.copy_(where)
            if counts:
                each.resize_(numbers.shape).copy_(numbers)
        else:
            number = self._taken(most)
            found.resize_(number)
            if counts:
                each.resize_(number)
        return found, places, each

    def _unique_slices(self, default: Handler, x: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_known(x):
            return default(x, *args, **kwargs)
        dim = next(value for value in (*reversed(args), kwargs.get("dim")) if isinstance(value, int))
        longs = {"dtype": torch.long}
        shape = list(x.shape)
        count = shape[dim] = self._taken(x.shape[dim])
        return x.new_empty(shape), x.new_empty((x.shape[dim],), **longs), x.new_empty((count,), **longs)

    def _scan(self, default: Handler, x: Any, dim: int, **kwargs: Any) -> Any:
        """A single row is scanned by CUB."""
        result = default(x, dim, **kwargs)
        if x.numel() > 1 and x.numel() == x.shape[dim]:
            self._buffers(_SCAN if result.element_size() == 8 else _SELECTION)
        return result

    def _repeat_interleave(self, default: Handler, repeats: Any, *, output_size: int | None = None) -> Any:
        if self.is_known(repeats) and output_size is None:
            return default(repeats)
        total = output_size
        if total is None:
            total = int(repeats.numel() * self.assumed.value("integer"))
        return repeats.new_empty((total,), dtype=torch.long)

    def _bincount(self, default: Handler, x: Any, weights: Any = None, minlength: int = 0) -> Any:
        if self.is_known(x):
            return default(x, weights, minlength)
        return x.new_empty((max(minlength, int(self.assumed.value("integer")) + 1),), dtype=torch.long)

    # ---- packages ------------------------------------------------------------------------------------------------
    def _packages(self) -> dict[str, Handler]:
        return {"torchvision::nms": self._suppressed}

    def _suppressed(self, default: Handler, boxes: Any, scores: Any, _overlap: float) -> Any:
        """``nms_kernel.cu``: boxes by their scores, which of them overlap, and as many as a mask takes."""
        if not len(boxes):
            return boxes.new_empty((0,), dtype=torch.long)
        order = scores.sort(0, descending=True)[1]
        held = [boxes.index_select(0, order), *self._buffers(len(boxes) * -(-len(boxes) // 64) * 8)]
        kept = boxes.new_empty((len(boxes),), dtype=torch.bool)
        found = order.masked_select(kept)
        del held
        return found

    # ---- bitsandbytes --------------------------------------------------------------------------------------------
    def _bitsandbytes(self) -> dict[str, Handler]:
        product = self._int8_product
        return {
            "bitsandbytes::gemm_4bit": self._gemm_4bit,
            "bitsandbytes::int8_vectorwise_quant": self._int8_quant,
            "bitsandbytes::int8_scaled_mm": product,
            "bitsandbytes::int8_mixed_scaled_mm": lambda default, a, *args, **kwargs: (
                product(default, *args, dtype=a.dtype, **kwargs),
                None,
            ),
        }

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
        held = self._buffers(*scales, outputs * inputs * x.element_size())
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
        self._buffers(x.numel() * x.element_size(), x.numel())
        return result[0], result[1], x.new_empty((0,), dtype=torch.int64)

    def _int8_product(
        self, default: Handler, quantized: Any, weight: Any, *_: Any, dtype: Any = None, **__: Any
    ) -> Any:
        """The int32 product lives until it is scaled to 16 bits."""
        rows = quantized.numel() // quantized.shape[-1]
        held = self._buffers(rows * weight.shape[0] * 4)
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


def _positions(x: Any, indices: Any) -> Any:
    if not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return indices
    positions: list[Any] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            positions += index.to(x.device).nonzero().unbind(1)
        else:
            positions.append(index)
    return positions


def _last_power(number: int) -> int:
    return 1 << (max(1, number).bit_length() - 1)


def _two_values(x: Any, inverse: bool, counts: bool) -> Any:
    """What ``unique`` has for booleans that nobody knows, both of them, or for an empty tensor."""
    count = min(x.numel(), 2)
    places, each = x.shape if inverse else (0,), (count if counts else 0,)
    return x.new_empty((count,)), x.new_empty(places, dtype=torch.long), x.new_empty(each, dtype=torch.long)


def _digits(count: int, *bytes_each: int) -> int:
    """Bytes that CUB takes to sort ``count`` elements digit by digit: copies and counts; few need none."""
    if count <= 2304:
        return 1
    return sum(_aligned(count * each) for each in bytes_each) + (16 << 10) + 1024 * -(-count // 4608) + 256 + 255


def _aligned(size: int) -> int:
    return -(-size // 256) * 256


_RECURRENT = ("aten::_cudnn_rnn", "aten::_cudnn_rnn_backward", "aten::_cudnn_rnn_flatten_weight")
#: Bytes that CUB takes for itself to select and to scan; for each 4,000 elements 8 or 16 more.
_SELECTION, _SCAN = 1023, 1279
#: Operators with a kernel of their own in ``device.cpp``.
_EXPLICIT = frozenset(
    (
        "empty.memory_format", "empty_strided", "as_strided", "view", "_reshape_alias", "unfold", "copy_", "equal",
        "set_.source_Storage_storage_offset", "set_.source_Storage", "set_.source_Tensor", "set_", "record_stream",
        "_local_scalar_dense", "_fused_sdp_choice", "_assert_async", "_assert_async.msg",
    )
)  # fmt: skip
