"""Kernels that select, sort and count: their buffers, and shapes that depend on values.

Sources: PyTorch 2.11 ``aten/src/ATen/native/cuda/Nonzero.cu``, ``Embedding.cu``, ``UniqueCub.cu``, ``LossCTC.cu``;
CUB 3; torchvision's ``nms_kernel.cu``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from memtrace.estimate.dryrun.assumed import Assumptions
from memtrace.estimate.engine.kernels import KernelDevice

Handler = Callable[..., Any]
#: Bytes that CUB takes for itself to select and to scan; for each 4,000 elements 8 or 16 more.
_SELECTION, _SCAN = 1023, 1279


def buffers(*sizes_bytes: int) -> list[Any]:
    """A kernel's own buffers, alive as long as the list."""
    return [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes_bytes if size]


class Selections:
    """Handlers of one process's operators whose results hang on values."""

    def __init__(self, helper: ctypes.CDLL, device: KernelDevice, assumed: Assumptions) -> None:
        self._helper, self._device, self._assumed = helper, device, assumed

    def handlers(self) -> dict[str, Handler]:
        """By the operator's name."""
        return {
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
        }

    def of_packages(self) -> dict[str, Handler]:
        """Kernels that packages bring, by name."""
        return {"torchvision::nms": self._suppressed}

    def _is_known(self, tensor: Any) -> bool:
        """Whether a tensor's values are known."""
        return not tensor.is_cuda or bool(self._helper.memtrace_known(tensor.untyped_storage()._cdata))

    def _own_ctc(self, default: Handler, log_probs: Any, targets: Any, *_: Any) -> bool:
        if targets.dim() == 1 and targets.dtype == torch.int32:
            self._assumed.note("ctc", "a CTC loss takes PyTorch's own kernel, which holds more than cuDNN's")
        return False

    def _ctc(self, default: Handler, log_probs: Any, targets: Any, _inputs: Any, lengths: Any, *_: Any) -> Any:
        """The loss of each sequence, and paths through it: a place between any two of the longest target's letters."""
        steps, batch, _letters = log_probs.shape
        if isinstance(lengths, torch.Tensor) and self._is_known(lengths):
            lengths = lengths.tolist()
        if isinstance(lengths, torch.Tensor):
            self._assumed.note("ctc_lengths", "targets of a CTC loss are as long as they can be")
            longest = targets.shape[1] if targets.dim() == 2 else -(-targets.numel() // batch)
        else:
            longest = max(lengths, default=0)
        paths = log_probs.new_empty((batch, steps, 2 * longest + 1))
        buffers(*[8 * batch] * 3)
        return log_probs.new_empty((batch,)), paths

    def _ctc_backward(self, default: Handler, grad: Any, log_probs: Any, *rest: Any, **_: Any) -> Any:
        """A second set of paths, from the end."""
        paths = torch.empty_like(rest[4])
        found = torch.zeros_like(log_probs)
        del paths
        return found

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
        held += buffers(count * place, 8)
        keys = buffers(count * place)
        buffers(_SCAN)
        del keys
        held += buffers(segments * place, segments * place)
        buffers(_SCAN)
        partial = count // 10 + segments
        held += buffers(8, partial * place)
        buffers(partial * 32 * -(-width // 32) * 4)
        while held:
            held.pop()
        return found

    def _sorted(self, count: int, place: int) -> list[Any]:
        """Indices and where they came from, sorted by CUB: one block of threads, or digit by digit."""
        held, sources = buffers(count * place, count * place), buffers(count * place)
        buffers(_digits(count, place, place))
        del sources
        return held

    # ---- shapes that depend on values ----------------------------------------------------------------------------
    def _taken(self, elements: int, mask: Any = None) -> int:
        """How many elements a mask takes. One that picks one of n kinds takes an even share of them."""
        storage = None if mask is None else mask.untyped_storage()._cdata
        even = 1.0 if storage is None else self._helper.memtrace_share(storage)
        chosen = -1 if storage is None else self._helper.memtrace_set(storage)
        if 0 <= chosen < elements:
            self._assumed.note("set", "of a mask that began as zeros what was set in it is true: the most")
            return chosen
        if even < 1:
            self._assumed.note("even", "what chooses among kinds (experts, classes) takes them equally often")
            return max(1, round(elements * even))
        return min(elements, round(elements * self._assumed.value("share")))

    def _nonzero(self, default: Handler, x: Any) -> Any:
        """A count on the device, which blocks of threads sum up, then the places."""
        count = buffers(4)
        single = x.numel() <= 4096
        buffers(1 if single else _aligned(4 * 5 * 8 * self._device.multiprocessors) + 255)
        if self._is_known(x):
            found = default(x)
        else:
            found = x.new_empty((max(x.dim(), 1), self._taken(x.numel(), x)), dtype=torch.long).t()
        buffers(_SELECTION)
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
            wrapped = buffers(size)
            scaled = buffers(size)
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
            return default(x, _sorted, inverse, counts) if self._is_known(x) else _two_values(x, inverse, counts)
        sorted_copy = buffers(x.numel() * x.element_size())
        if inverse:
            places, sources = buffers(x.numel() * 8), buffers(x.numel() * 8)
            buffers(_digits(x.numel(), x.element_size(), 8))
            del places
        else:
            sources = []
            buffers(_digits(x.numel(), x.element_size()))
        found = self._distinct(lambda host: torch._unique2(host, True, inverse, counts), x, inverse, counts)
        del sources, sorted_copy
        return found

    def _runs(self, default: Handler, x: Any, inverse: bool = False, counts: bool = False, dim: Any = None) -> Any:
        """``unique_consecutive``, whose elements lie in order."""
        if dim is not None:
            return self._unique_slices(default, x, inverse, counts, dim)
        if not x.numel():
            return default(x, inverse, counts) if self._is_known(x) else _two_values(x, inverse, counts)
        return self._distinct(lambda host: torch.ops.aten.unique_consecutive(host, inverse, counts), x, inverse, counts)

    def _distinct(self, on_host: Handler, x: Any, inverse: bool, counts: bool) -> Any:
        """Results keep the storage that they had before it was known how many elements differ."""
        most = x.numel()
        places = x.new_zeros(x.shape if inverse else (0,), dtype=torch.long)
        if inverse:
            held = buffers(most * 8)
            buffers(_SCAN)
            del held
        found = x.new_zeros((most,))
        length = buffers(8)
        each = x.new_zeros((most if counts else 0,), dtype=torch.long)
        buffers(_SELECTION)
        del length
        if self._is_known(x):
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
        if self._is_known(x):
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
            buffers(_SCAN if result.element_size() == 8 else _SELECTION)
        return result

    def _repeat_interleave(self, default: Handler, repeats: Any, *, output_size: int | None = None) -> Any:
        if self._is_known(repeats) and output_size is None:
            return default(repeats)
        total = output_size
        if total is None:
            total = int(repeats.numel() * self._assumed.value("integer"))
        return repeats.new_empty((total,), dtype=torch.long)

    def _bincount(self, default: Handler, x: Any, weights: Any = None, minlength: int = 0) -> Any:
        if self._is_known(x):
            return default(x, weights, minlength)
        return x.new_empty((max(minlength, int(self._assumed.value("integer")) + 1),), dtype=torch.long)

    def _suppressed(self, default: Handler, boxes: Any, scores: Any, _overlap: float) -> Any:
        """``nms_kernel.cu``: boxes by their scores, which of them overlap, and as many as a mask takes."""
        if not len(boxes):
            return boxes.new_empty((0,), dtype=torch.long)
        order = scores.sort(0, descending=True)[1]
        held = [boxes.index_select(0, order), *buffers(len(boxes) * -(-len(boxes) // 64) * 8)]
        kept = boxes.new_empty((len(boxes),), dtype=torch.bool)
        found = order.masked_select(kept)
        del held
        return found


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
