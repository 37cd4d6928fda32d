"""Optimizer states and temporaries.

Mirrors ``torch/optim/adam.py`` 2.11 and ``bitsandbytes/optim/optimizer.py`` 0.50.
"""

from __future__ import annotations

from memtrace.attribution.categories import Purpose
from memtrace.estimate.engine.autograd import Tensor
from memtrace.estimate.engine.ops import Ops

PAGED_ELEMENTS = 100_000  # paged optimizers put the states of larger matrices in managed memory
MIN_8BIT_ELEMENTS = 4096  # smaller tensors keep fp32 states
ABSMAX_BLOCK = 256
NORM_CHUNK = 65_536


class Optimizer:
    """States of one optimizer over the trainable parameters, created by its first step."""

    def __init__(self, ops: Ops, name: str, parameters: list[Tensor]) -> None:
        self.ops = ops
        self.name = name
        self.parameters = parameters
        self.states: list[Tensor] = []
        self.managed_bytes = 0  # states outside the allocator (paged optimizers)
        self._has_maps = False
        self._initialised = False

    def step(self) -> None:
        """One step: states first (in the first step), then what the update needs."""
        first = not self._initialised
        self._initialised = True
        self.ops.tape.default_label, previous = Purpose.OPTIMIZER, self.ops.tape.default_label
        for parameter in self.parameters:
            if first:
                self._init_state(parameter)
        if self.name == "adamw_torch":
            # "torch._foreach_sqrt": one temporary as large as each parameter, all at once.
            roots = [self.ops.new(p.elements, p.width, "_foreach_sqrt") for p in self.parameters]
            del roots
        self.ops.tape.default_label = previous

    def clip(self) -> None:
        """``clip_grad_norm_``: partial sums of ``_foreach_norm``, a norm each gradient, and the numbers made of them.

        PyTorch ``ForeachReduceOp.cu``: chunks of 65,536 elements, as many of each tensor as the largest has.
        """
        ops, count = self.ops, len(self.parameters)
        chunks = max(-(-parameter.elements // NORM_CHUNK) for parameter in self.parameters)
        ops.tape.default_label, previous = Purpose.OPTIMIZER, ops.tape.default_label
        partial = ops.new(count * chunks, 4, "_foreach_norm")
        norms = [ops.new(1, parameter.width, "_foreach_norm") for parameter in self.parameters]
        del partial
        stacked = ops.new(count, 4, "stack")
        total = ops.new(1, 4, "linalg_vector_norm")
        del stacked, norms
        coefficient = ops.new(1, 4, "div")
        clamped = ops.new(1, 4, "clamp")
        del total, coefficient, clamped
        ops.tape.default_label = previous

    def zero_grad(self) -> None:
        """``zero_grad(set_to_none=True)``."""
        for parameter in self.parameters:
            parameter.grad = None

    def _init_state(self, parameter: Tensor) -> None:
        elements, width = parameter.elements, parameter.width
        if self.name == "sgd":
            return
        if self.name == "adamw_torch_fused":
            self._state(1, 4)
        if self.name.startswith("adamw_torch"):
            self._state(elements, width)
            self._state(elements, width)
        elif self.name.endswith("8bit") and elements >= MIN_8BIT_ELEMENTS:
            self._init_8bit(elements)
        else:
            self._buffer(elements, 4)
            self._buffer(elements, 4)

    def _init_8bit(self, elements: int) -> None:
        if not self._has_maps:
            self._has_maps = True
            self._state(256, 4)
            self._state(256, 4)
        self._buffer(elements, 1)
        self._buffer(elements, 1)
        blocks = -(-elements // ABSMAX_BLOCK)
        self._state(blocks, 4)
        self._state(blocks, 4)

    def _buffer(self, elements: int, width: int) -> None:
        """``get_state_buffer``: managed memory for large tensors of a paged optimizer."""
        if self.name.startswith("paged") and elements >= PAGED_ELEMENTS:
            self.managed_bytes += elements * width
        else:
            self._state(elements, width)

    def _state(self, elements: int, width: int) -> None:
        self.states.append(self.ops.new(elements, width, "state", Purpose.OPTIMIZER_STATE))
