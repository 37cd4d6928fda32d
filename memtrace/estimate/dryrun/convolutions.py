"""Convolutions as PyTorch runs them on cuDNN: copies in cuDNN's layout, results, and a workspace for each pass.

Source: PyTorch 2.11 ``aten/src/ATen/native/Convolution.cpp``, ``cudnn/ConvShared.cpp`` and ``cudnn/Conv_v8.cpp``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._prims_common import make_channels_last_strides_for, suggest_memory_format

from memtrace.estimate.dryrun.assumed import Assumptions
from memtrace.estimate.dryrun.cudnn import DATA_TYPES, Cudnn
from memtrace.estimate.dryrun.machine import DryMemory
from memtrace.estimate.dryrun.passes import Convolution

Handler = Callable[..., Any]
_BACKENDS = (torch._C._ConvBackend.Cudnn, torch._C._ConvBackend.CudnnTranspose)


class Convolutions:
    """The handlers of convolutions on the card of ``memory``."""

    def __init__(self, memory: DryMemory, assumed: Assumptions) -> None:
        self._memory, self._assumed = memory, assumed
        self._cudnn = Cudnn(replace(memory.gpu, total_bytes=memory.total_bytes))
        self._chosen: dict[Convolution, int] = {}  # bytes of the plan that ran

    def forward(self, default: Handler, x: Any, w: Any, bias: Any, *ways: Any) -> Any:
        """``aten::convolution``."""
        if torch._C._select_conv_backend(x, w, bias, *ways) not in _BACKENDS:
            return default(x, w, bias, *ways)
        x, layout = _prepared(x, w)
        y = _laid(default(x, w, bias, *ways), layout)
        w = w.contiguous(memory_format=layout)
        self._run("data" if ways[3] else "forward", layout, x, w, y, ways)
        return y

    def backward(self, default: Handler, grad: Any, x: Any, w: Any, sizes: Any, *rest: Any) -> Any:
        """``aten::convolution_backward``: the gradients of images, weights and bias, one after the other."""
        *ways, wanted = rest
        if torch._C._select_conv_backend(x, w, None, *ways, sizes) not in _BACKENDS:
            return default(grad, x, w, sizes, *rest)
        x, layout = _prepared(x, w, copy_x=wanted[1])
        is_transposed = ways[3]
        is_laid = suggest_memory_format(grad) is layout and not is_transposed
        laid = grad if is_laid else grad.contiguous(memory_format=layout)
        given = laid, x, w, sizes, *ways
        found = [None, None, None]
        if wanted[0]:
            found[0] = _laid(default(*given, [True, False, False])[0], layout)
            copies = [each.contiguous(memory_format=layout) for each in (w, laid)]  # a part of a tensor is no run
            self._run("forward" if is_transposed else "data", layout, x, w, laid, ways)
            del copies
        if wanted[1]:
            copy = laid.contiguous(memory_format=layout)
            found[1] = _laid(default(*given, [False, True, False])[1], layout)
            self._run("filter", layout, x, w, laid, ways)
            del copy
        del laid, given, x
        if wanted[2]:
            found[2] = grad.sum([dim for dim in range(grad.dim()) if dim != 1])
        return tuple(found)

    def _run(self, kind: str, layout: Any, x: Any, w: Any, y: Any, ways: Sequence[Any]) -> None:
        """Allocate what the pass needs for itself, as ``run_single_conv``."""
        stride, padding, dilation, is_transposed = ways[:4]
        images, results = (y, x) if is_transposed else (x, y)
        if str(x.dtype) not in DATA_TYPES or not results.numel():
            return
        asked = Convolution(
            kind, str(x.dtype), layout is not torch.contiguous_format, _sizes(images), _sizes(w), _sizes(results),
            _way(padding, 0), _way(stride, 1), _way(dilation, 1),
            torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic,
        )  # fmt: skip
        sizes = self._cudnn.workspaces_bytes(asked)
        if not sizes:
            said = "cuDNN's workspaces of convolutions are missing: it gave no answer"
            self._assumed.note("workspace", f"{said} (the package nvidia-cudnn-cu13 has it, and needs a compiler once)")
            return
        refused = self._memory.refused  # what is refused here and then done otherwise is no end of the program
        if torch.backends.cudnn.benchmark and asked not in self._chosen:
            said = "cudnn.benchmark takes what is measured to be fastest; taken is what cuDNN expects to be"
            self._assumed.note("benchmark", said)
            most = max((size for size in sizes if size <= self._memory.free_bytes), default=0)
            while most:
                with contextlib.suppress(torch.OutOfMemoryError):  # a limit below the card: half as much is tried
                    torch.empty(most, **_BYTES)
                    break
                most //= 2
            self._memory.refused = refused
            torch.cuda.empty_cache()
        for size in (self._chosen.get(asked, sizes[0]), *sizes):
            with contextlib.suppress(torch.OutOfMemoryError):  # then the next best plan is tried
                torch.empty(size, **_BYTES)
                self._chosen[asked], self._memory.refused = size, refused
                return
        raise RuntimeError("GET was unable to find an engine to execute this computation")


_BYTES: dict[str, Any] = {"dtype": torch.uint8, "device": "cuda"}


def _prepared(x: Any, w: Any, copy_x: bool = True) -> tuple[Any, Any]:
    """Images as cuDNN takes them, and the layout, as ``cudnn_conv_suggest_memory_format`` has it."""
    layouts = {suggest_memory_format(tensor) for tensor in (x, w)} if x.dtype != torch.float64 else set()
    layout = next(iter(layouts - {torch.contiguous_format}), torch.contiguous_format)
    return x.contiguous(memory_format=layout) if copy_x else x, layout


def _laid(made: Any, layout: Any) -> Any:
    """A result in its layout, which ``meta`` tensors do not have."""
    if layout is not torch.contiguous_format and not made.is_contiguous(memory_format=layout):
        made.set_(made.untyped_storage(), 0, made.shape, make_channels_last_strides_for(made.shape))
    return made


def _sizes(tensor: Any) -> tuple[int, ...]:
    """One-dimensional convolutions run as two-dimensional ones of height one."""
    sizes = tuple(tensor.shape)
    return (*sizes[:2], 1, sizes[2]) if len(sizes) == 3 else sizes


def _way(values: Sequence[int], fill: int) -> tuple[int, ...]:
    return (fill, *values) if len(values) == 1 else tuple(values)
