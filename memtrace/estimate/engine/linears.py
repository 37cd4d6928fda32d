"""Linear layers: the base model's (bitsandbytes 4-bit, 8-bit, or plain 16-bit weights) and PEFT's LoRA around them.

Mirrors ``bitsandbytes/nn/modules.py`` (``Linear4bit.forward``), ``autograd/_functions.py`` (``MatMul4Bit``) and
``backends/cuda/ops.py`` (``gemm_4bit``) of bitsandbytes 0.50; ``peft/tuners/lora/bnb.py`` and ``layer.py``, PEFT 0.21.
"""

from __future__ import annotations

from dataclasses import dataclass

from memtrace.attribution.categories import Purpose
from memtrace.estimate.engine.autograd import Grads, Storage, Tensor
from memtrace.estimate.engine.kernels import KernelDevice, fused_4bit_product
from memtrace.estimate.engine.ops import Ops

COMPUTE_BYTES = 2  # bnb_4bit_compute_dtype bfloat16 (float16 on older cards)
BLOCK = 64  # NF4 block size
ABSMAX_BLOCK = 256  # block size of the second quantisation


@dataclass(slots=True)
class BaseLinear:
    """One frozen linear layer. ``weight`` holds the packed or plain storage, ``constants`` the quantisation state."""

    inputs: int
    outputs: int
    weight: Tensor
    constants: list[Tensor]
    bias: Tensor | None
    scheme: str  # "nf4-dq", "nf4", "int8", "none"

    @property
    def elements(self) -> int:
        """Elements of the weight matrix."""
        return self.inputs * self.outputs


def base_linear(ops: Ops, layer: BaseLinear, device: KernelDevice, x: Tensor) -> Tensor:
    """The base layer's forward."""
    if layer.scheme == "none":
        return _plain(ops, layer, x)
    if layer.scheme == "int8":
        return _int8(ops, layer, x)
    return _linear4bit(ops, layer, device, x)


def _linear4bit(ops: Ops, layer: BaseLinear, device: KernelDevice, x: Tensor) -> Tensor:
    """``Linear4bit.forward``: cast to the compute type, multiply, cast back."""
    input_width = x.width
    x = ops.to(x, COMPUTE_BYTES)
    bias = layer.bias
    if bias is not None and bias.width != x.width:
        # "bias.data = bias.data.to(x.dtype)": the first forward recasts it for good.
        bias = layer.bias = ops.new(bias.elements, x.width, "bias_cast", Purpose.UNQUANTIZED)
    return ops.to(_matmul_4bit(ops, layer, device, x), input_width)


def _matmul_4bit(ops: Ops, layer: BaseLinear, device: KernelDevice, x: Tensor) -> Tensor:
    """``MatMul4Bit``: nothing saved; backward dequantises the weight."""
    node = ops.node(x)
    out = _gemm_4bit(ops, layer, device, x)
    if node is not None:
        elements, weight, nested = x.elements, layer.elements, layer.scheme == "nf4-dq"

        def backward(_grad: Tensor, _saved: list[Storage]) -> Grads:
            absmax = ops.new(-(-weight // BLOCK), 4, "dequantize_blockwise", Purpose.DEQUANT) if nested else None
            dequantized = ops.new(weight, COMPUTE_BYTES, "dequantize_4bit", Purpose.DEQUANT)
            del absmax
            out = ops.new(elements, COMPUTE_BYTES, "matmul_4bit_backward")
            ops.workspace()
            del dequantized
            return (out,)

        ops.attach(out, node, backward)
    return out


def _gemm_4bit(ops: Ops, layer: BaseLinear, device: KernelDevice, x: Tensor) -> Tensor:
    """``gemm_4bit``: the fused kernel, or dequantise and multiply."""
    rows = x.elements // layer.inputs
    if fused_4bit_product(device, device.product_rows or rows, layer.outputs, layer.inputs):
        return ops.new(rows * layer.outputs, COMPUTE_BYTES, "gemm_4bit")
    absmax_dq = absmax = None
    if layer.scheme == "nf4-dq":
        absmax_dq = ops.new(-(-layer.elements // BLOCK), 4, "dequantize_absmax", Purpose.DEQUANT)
        absmax = ops.new(-(-layer.elements // BLOCK), 4, "dequantize_absmax", Purpose.DEQUANT)
    dequantized = ops.new(layer.elements, COMPUTE_BYTES, "dequantize_4bit", Purpose.DEQUANT)
    out = ops.new(rows * layer.outputs, COMPUTE_BYTES, "mm")
    ops.workspace("cublaslt" if layer.bias is not None else "cublas")
    del absmax, absmax_dq, dequantized
    return out


def _plain(ops: Ops, layer: BaseLinear, x: Tensor) -> Tensor:
    """A frozen 16-bit (or upcast) ``nn.Linear``."""
    out = ops.linear(layer.weight, x, layer.outputs)
    if layer.bias is not None:
        ops.workspace("cublaslt")
    return out


def _int8(ops: Ops, layer: BaseLinear, x: Tensor) -> Tensor:
    """``MatMul8bitLt``: rows of the input are quantised, the int32 product is scaled to 16 bits, then cast back.

    The function keeps its input as a plain attribute, not through ``save_for_backward``: checkpointing does not
    drop it, and it lives until the graph does. Outlier columns (data dependent) are taken as none.
    Source only (``autograd/_functions.py``, ``backends/cuda/ops.py``), not measured.
    """
    rows = x.elements // layer.inputs
    node = ops.node(x)
    half = ops.to(Tensor(x.storage, x.elements, x.width), COMPUTE_BYTES)
    row_scales = ops.new(rows, 4, "int8_vectorwise_quant")
    quantized = ops.new(x.elements, 1, "int8_vectorwise_quant")
    magnitudes = ops.new(x.elements, COMPUTE_BYTES, "abs")
    outliers = ops.new(x.elements, 1, "ge")
    del magnitudes, outliers, half
    product = ops.new(rows * layer.outputs, 4, "int8_linear_matmul")
    scaled = ops.new(rows * layer.outputs, COMPUTE_BYTES, "int8_mm_dequant")
    del product
    out = ops.to(scaled, x.width)
    del scaled, row_scales, quantized
    if node is not None:
        elements, width, weight = x.elements, x.width, layer.elements
        node.kept = x.storage

        def backward(_grad: Tensor, _saved: list[Storage]) -> Grads:
            dequantized = ops.new(weight, width, "int8_dequant", Purpose.DEQUANT)
            out = ops.new(elements, width, "matmul_8bit_backward")
            ops.workspace()
            del dequantized
            return (out,)

        ops.attach(out, node, backward)
    return out


@dataclass(slots=True)
class LoraLinear:
    """A base layer with its adapter (``a`` and ``b`` are None where the layer is not adapted)."""

    name: str
    base: BaseLinear
    a: Tensor | None = None
    b: Tensor | None = None


def lora_linear(ops: Ops, layer: LoraLinear, device: KernelDevice, dropout: bool, x: Tensor) -> Tensor:
    """The layer's forward: base product, then ``result + lora_B(lora_A(dropout(x))) * scaling``."""
    tape = ops.tape
    outer, tape.site = tape.site, layer.name
    result = base_linear(ops, layer.base, device, x)
    if layer.a is not None and layer.b is not None:
        if layer.base.scheme.startswith("nf4"):
            result = ops.clone(result)  # "for 4bit, we need to defensively clone here"
        expected_width = result.width
        tape.site = f"{layer.name}.lora"
        if layer.base.scheme == "none":  # peft/tuners/lora/layer.py casts under autocast too, and the sum last
            x = ops.to(x, layer.a.width)
            adapter = (layer.a, layer.b, layer.base.outputs)
            result = ops.add(result, ops.scale(_adapter(ops, *adapter, dropout, x), "mul_scaling"), "add_adapter")
            result = ops.to(result, expected_width)  # by now the branch and the first result are gone
        else:  # bnb.py
            x = x if ops.autocast else ops.to(x, layer.a.width)
            output = ops.scale(_adapter(ops, layer.a, layer.b, layer.base.outputs, dropout, x), "mul_scaling")
            output = output if ops.autocast else ops.to(output, expected_width)
            result = ops.add(result, output, "add_adapter")
            del output
        del x
    tape.site = outer
    return result


def _adapter(ops: Ops, a: Tensor, b: Tensor, outputs: int, dropout: bool, x: Tensor) -> Tensor:
    """``lora_B(lora_A(dropout(x)))``."""
    rank = b.elements // outputs
    return ops.linear(b, ops.linear(a, ops.dropout(x) if dropout else x, rank), outputs)
