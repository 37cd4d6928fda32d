"""cuDNN's recurrent layers (LSTM, GRU, RNN): results, what it keeps for the backward pass, workspaces, flat weights.

cuDNN tells the two buffers to a card alone, so they are what an H200 took under cuDNN 9.19: 278 layers
(``tests/gpu/check_recurrent.py``; packed, of both directions, in 16 and 32 bits). What is kept is exact in them, the
workspace as a rule; small layers (below some 128 units) may take several times as much, which the output says.
Source: PyTorch 2.11 ``aten/src/ATen/native/cudnn/RNN.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch

from memtrace.estimate.dryrun.assumed import Assumptions

_LSTM, _GRU = 2, 3  # cudnnRNNMode_t; 0 and 1 are plain layers
_LAYER_BYTES = 8 << 20  # of each layer and direction, whatever its size
_RANDOM_BYTES = 48 << 10  # of each multiprocessor, for dropout's random numbers


class Recurrent:
    """Handlers of one process's recurrent layers."""

    def __init__(self, assumed: Assumptions, multiprocessors: int) -> None:
        self._assumed, self._random_bytes = assumed, multiprocessors * _RANDOM_BYTES
        self._random: Any = None  # dropout's numbers, made once for the process

    def forward(
        self, _default: Callable[..., Any], x: Any, weights: Sequence[Any], stride: int, flat: Any, hidden: Any,
        cell: Any, mode: int, units: int, projected: int, layers: int, batch_first: bool, dropout: float, train: bool,
        both: bool, batches: Sequence[int], *_: Any,
    ) -> Any:  # fmt: skip
        """Output, last states, what is kept, and the weights in one piece (anew where they are not)."""
        if train and dropout and self._random is None:
            self._buffer(8)  # their seed
            self._random = self._buffer(self._random_bytes)
        x = x.transpose(0, 1) if batch_first and not batches else x
        x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], (projected or units) * (2 if both else 1)))
        last, memory = torch.empty_like(hidden), x.new_empty(0) if cell is None else torch.empty_like(cell)
        if flat is None or not flat.numel():
            flat = x.new_zeros(sum(weight.numel() for weight in weights))
        sizes = _Sizes(x, hidden, mode, units, layers, dropout if train else 0.0, both, batches, weights)
        self._assumed.note("recurrent", "buffers of recurrent layers are those that cuDNN 9.19 takes on an H200")
        workspace = self._buffer(sizes.workspace_bytes())
        kept = self._buffer(sizes.kept_bytes() if train else 0)
        del workspace
        return out.transpose(0, 1) if batch_first and not batches else out, last, memory, kept, flat

    def backward(
        self, _default: Callable[..., Any], x: Any, weights: Sequence[Any], stride: int, flat: Any, hidden: Any,
        cell: Any, output: Any, grad: Any, _last: Any, _memory: Any, mode: int, units: int, projected: int, layers: int,
        batch_first: bool, dropout: float, train: bool, both: bool, batches: Sequence[int], _state: Any, _kept: Any,
        wanted: Sequence[bool],
    ) -> Any:  # fmt: skip
        """The gradients of states that nobody used are zeros; those of the weights are parts of one piece."""
        zeros = [torch.zeros_like(hidden), None if cell is None else torch.zeros_like(cell)]
        turned = batch_first and not batches
        given = x.transpose(0, 1).contiguous() if turned else x.contiguous()
        grad = torch.zeros_like(output) if grad is None else grad
        dense = (grad.transpose(0, 1) if turned else grad).contiguous()
        found = torch.empty_like(given)
        states = torch.empty_like(hidden), None if cell is None else torch.empty_like(cell)
        sizes = _Sizes(given, hidden, mode, units, layers, dropout if train else 0.0, both, batches, weights)
        self._buffer(sizes.workspace_bytes())
        del dense, given
        parts: list[Any] = []
        if wanted[3]:
            given = x.transpose(0, 1).contiguous() if turned else x.contiguous()
            whole = torch.zeros_like(flat)
            self._buffer(sizes.workspace_bytes())
            parts = [*_parts(whole, weights)]
            del given
        while zeros:
            zeros.pop()
        return found.transpose(0, 1) if turned else found, *states, parts

    def flatten(self, _default: Callable[..., Any], weights: Sequence[Any], *_: Any) -> Any:
        """All weights of a layer in one piece, as ``flatten_parameters`` has them."""
        flat = weights[0].new_zeros(sum(weight.numel() for weight in weights))
        with torch.no_grad():
            for weight, part in zip(weights, _parts(flat, weights), strict=True):
                weight.set_(part)
        return flat

    @staticmethod
    def _buffer(size: int) -> Any:
        return torch.empty(size, dtype=torch.uint8, device="cuda")


class _Sizes:
    """Bytes of one call's buffers. ``rows`` are steps times sequences, fewer where sequences are packed."""

    def __init__(
        self, x: Any, hidden: Any, mode: int, units: int, layers: int, dropout: float, both: bool,
        batches: Sequence[int], weights: Sequence[Any],
    ) -> None:  # fmt: skip
        self.width, self.inputs, self.batch = x.element_size(), x.shape[-1], hidden.shape[1]
        self.rows, self.packed = prod(x.shape[:-1]), bool(batches)
        self.steps = len(batches) if self.packed else x.shape[0]
        self.mode, self.units, self.layers, self.ways, self.drops = mode, units, layers, 2 if both else 1, dropout > 0
        self.weights = sum(weight.numel() for weight in weights if weight.dim() == 2)

    def kept_bytes(self) -> int:
        """Gates and states of each layer, what goes from layer to layer, a bit for each number dropout looks at."""
        numbers = {_LSTM: 5, _GRU: 6}.get(self.mode, 1)
        row = self.rows * self.units * self.width
        gates = self.layers * self.ways * _aligned(numbers * row)
        between = (self.layers - 1) * _aligned(self.ways * row)
        bits = self.layers - 1 if self.drops else 0
        mask = bits * -(-self.steps * self.batch * self.units * self.ways**2 // 8)
        return gates + between + mask + 256

    def workspace_bytes(self) -> int:
        units, several = self.units, self.layers > 1
        both = self.ways == 2
        if self.mode == _LSTM:
            by_row = (12 if both else 4) * units if self.packed else (14 if both else 5) * units + self.inputs
            by_sequence = (16 if both else 6) if self.packed else (24 if both else 10)
        elif self.mode == _GRU:
            inputs = self.inputs * (1 + (both == several))
            by_row = (10 if both else 3) * units if self.packed else (12 if both else 4) * units + inputs
            by_sequence = (10 if both else 3) if self.packed else (14 if both else 5)
        else:
            by_row = (8 if both else 2) * units if self.packed else (12 if both else 5) * units
            by_sequence = 4 if both else 2
        if self.drops and several and not both:
            by_row += units
        sums = self.weights + self.rows * by_row + self.layers * self.batch * units * by_sequence
        lengths = 0 if self.packed else 8 * self.batch
        return _LAYER_BYTES * self.layers * self.ways + sums * self.width + lengths + 256


def _parts(flat: Any, weights: Sequence[Any]) -> Iterator[Any]:
    start = 0
    for weight in weights:
        yield flat[start : start + weight.numel()].view(weight.shape)
        start += weight.numel()


def _aligned(size: int) -> int:
    return -(-size // 128) * 128
