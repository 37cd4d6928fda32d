"""A run in a process that has trained before, as the first measurements were made: one setup after the other."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from memtrace.estimate.engine import step
from memtrace.estimate.engine.kernels import KernelDevice
from memtrace.estimate.engine.ops import Ops
from memtrace.estimate.options import RunOptions
from memtrace.estimate.shapes import ModelShape
from memtrace.estimate.stream import Stream


def simulate_warm_run(shape: ModelShape, options: RunOptions, device: KernelDevice) -> Stream:
    """The engine's run, with the workspaces of both threads there when the first step begins."""
    biased = options.quant != "int8" and any(bias for *_, bias in shape.linears)

    def optimizer(ops: Ops, *args: Any) -> Any:
        for ops.thread in ("backward", "forward"):
            ops.workspace()
            if biased:
                ops.workspace("cublaslt")
        return made(ops, *args)

    made = step.Optimizer
    with patch.object(step, "Optimizer", optimizer):
        return step.simulate_run(shape, options, device)
