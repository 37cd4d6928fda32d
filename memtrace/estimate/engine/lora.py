"""PEFT's LoRA layer around a base linear layer (mirrors ``peft/tuners/lora/bnb.py`` and ``layer.py``, PEFT 0.21)."""

from __future__ import annotations

from dataclasses import dataclass

from memtrace.estimate.engine.engine import Tensor
from memtrace.estimate.engine.kernels import Device
from memtrace.estimate.engine.ops import Ops
from memtrace.estimate.engine.quantized import BaseLinear, base_linear


@dataclass(slots=True)
class LoraLinear:
    """A base layer with its adapter (``a`` and ``b`` are None where the layer is not adapted)."""

    name: str
    base: BaseLinear
    a: Tensor | None = None
    b: Tensor | None = None


def lora_linear(ops: Ops, layer: LoraLinear, device: Device, dropout: bool, x: Tensor) -> Tensor:
    """The layer's forward: base product, then ``result + lora_B(lora_A(dropout(x))) * scaling``."""
    tape = ops.tape
    outer, tape.site = tape.site, layer.name
    result = base_linear(ops, layer.base, device, x)
    if layer.a is not None and layer.b is not None:
        if layer.base.scheme.startswith("nf4"):
            result = ops.clone(result)  # "for 4bit, we need to defensively clone here"
        converts = not ops.autocast
        expected_width = result.width
        tape.site = f"{layer.name}.lora"
        if converts:
            x = ops.to(x, layer.a.width)
        output = ops.scale(_adapter(ops, layer.a, layer.b, layer.base.outputs, dropout, x), "mul_scaling")
        if converts:
            output = ops.to(output, expected_width)
        result = ops.add(result, output, "add_adapter")
        del output, x
    tape.site = outer
    return result


def _adapter(ops: Ops, a: Tensor, b: Tensor, outputs: int, dropout: bool, x: Tensor) -> Tensor:
    """``lora_B(lora_A(dropout(x)))``."""
    rank = b.elements // outputs
    return ops.linear(b, ops.linear(a, ops.dropout(x) if dropout else x, rank), outputs)
