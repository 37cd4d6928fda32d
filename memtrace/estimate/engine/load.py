"""Loading: ``from_pretrained`` with on-the-fly quantisation, ``prepare_model_for_kbit_training``, adapter creation.

Mirrors Transformers 5.17 (``caching_allocator_warmup``, ``convert_and_load_state_dict_in_model``: tensors in natural
order of their names, one at a time), bitsandbytes 0.50 (``quantize_4bit``) and PEFT 0.21 (adapters are moved in 16
bits, then cast to fp32).
"""

from __future__ import annotations

from memtrace.attribution.categories import Purpose
from memtrace.estimate.engine.autograd import Storage, Tensor
from memtrace.estimate.engine.decoder import Layer, Weights
from memtrace.estimate.engine.kernels import KernelDevice
from memtrace.estimate.engine.linears import ABSMAX_BLOCK, BLOCK, BaseLinear, LoraLinear
from memtrace.estimate.engine.ops import Ops
from memtrace.estimate.options import RunOptions
from memtrace.estimate.shapes import ModelShape

CHECKPOINT_BYTES = 2  # 16-bit checkpoints


class Loader:
    """Builds the weights on the tape."""

    def __init__(self, ops: Ops, shape: ModelShape, options: RunOptions, device: KernelDevice) -> None:
        self.ops = ops
        self.shape = shape
        self.options = options
        self.device = device
        self._map: Tensor | None = None  # the 8-bit map, one a process

    def load(self) -> Weights:
        """``from_pretrained``, then what the options ask for."""
        weights = self._from_pretrained()
        if self.options.prepare_kbit:
            self._prepare_kbit(weights)
        self._add_adapters(weights)
        return weights

    # ---- from_pretrained ----------------------------------------------------------------------------------------
    def _from_pretrained(self) -> Weights:
        ops, shape = self.ops, self.shape
        ops.tape.site = "from_pretrained"
        ops.new(self._warmup_bytes() // 2, 2, "caching_allocator_warmup")
        table = shape.vocabulary * shape.hidden
        head = None if shape.tied_embeddings else self._plain(table, "lm_head")
        embedding = self._plain(table, "embed_tokens")
        layers = [self._load_layer(index) for index in range(shape.layers)]
        ops.tape.layer = -1
        final_norm = self._plain(shape.hidden, "norm")
        ops.tape.site = "rotary_emb"
        rotary = round(shape.head_dim * shape.rotary_share)
        buffers = [ops.new(rotary // 2, 4, "buffer", Purpose.BUFFER), ops.new(rotary // 2, 4, "buffer", Purpose.BUFFER)]
        if shape.is_gemma:
            buffers.append(ops.new(1, CHECKPOINT_BYTES, "buffer", Purpose.BUFFER))
        if self._map is not None:
            buffers.append(self._map)
        return Weights(embedding, head or embedding, final_norm, layers, buffers)

    def _warmup_bytes(self) -> int:
        """``get_total_byte_count``: every tensor at the size it will have on the device."""
        shape = self.shape
        per_element = {"nf4": 1, "nf4-dq": 1, "int8": 2, "none": 4}[self.options.quant]  # half bytes
        plain = shape.parameters - shape.linear_parameters
        return plain * CHECKPOINT_BYTES + shape.linear_parameters * per_element // 2

    def _plain(self, elements: int, site: str) -> Tensor:
        self.ops.tape.site = site
        return self.ops.new(elements, CHECKPOINT_BYTES, "materialize", Purpose.UNQUANTIZED)

    def _load_layer(self, index: int) -> Layer:
        """The layer's tensors, sorted by name as the loader does."""
        ops, shape = self.ops, self.shape
        ops.tape.layer = index
        linears = {name: (inputs, outputs, bias) for name, inputs, outputs, bias in shape.linears}
        norms = dict(shape.norms)
        layer, loaded = Layer(), dict[str, LoraLinear]()
        for name in sorted([*linears, *norms]):
            ops.tape.site = name
            if name in norms:
                layer.norms[name] = self._plain(norms[name], name)
                continue
            inputs, outputs, has_bias = linears[name]
            bias = ops.new(outputs, CHECKPOINT_BYTES, "materialize", Purpose.UNQUANTIZED) if has_bias else None
            loaded[name] = LoraLinear(name, self._linear(inputs, outputs, bias))
        layer.linears |= {name: loaded[name] for name in linears}  # module order
        return layer

    def _linear(self, inputs: int, outputs: int, bias: Tensor | None) -> BaseLinear:
        ops, scheme, elements = self.ops, self.options.quant, inputs * outputs
        if scheme == "none":
            weight = ops.new(elements, CHECKPOINT_BYTES, "materialize_weight", Purpose.UNQUANTIZED)
            return BaseLinear(inputs, outputs, weight, [], bias, scheme)
        source = ops.new(elements, CHECKPOINT_BYTES, "materialize")
        if scheme == "int8":
            constants = [ops.new(outputs, 4, "int8_vectorwise_quant", Purpose.QUANT_STATE)]
            weight = ops.new(elements, 1, "int8_vectorwise_quant", Purpose.QUANTIZED)
        else:
            weight, constants = self._quantize_4bit(elements)
        del source
        return BaseLinear(inputs, outputs, weight, constants, bias, scheme)

    def _quantize_4bit(self, elements: int) -> tuple[Tensor, list[Tensor]]:
        """``quantize_4bit``: scales of 64 elements, the packed weight, and for double quantisation 8-bit scales."""
        ops, nested = self.ops, self.options.quant == "nf4-dq"
        blocks = -(-elements // BLOCK)
        absmax = ops.new(blocks, 4, "quantize_4bit", Purpose.LOADING if nested else Purpose.QUANT_STATE)
        packed = ops.new(-(-elements // 2), 1, "quantize_4bit", Purpose.QUANTIZED)
        code = ops.new(16, 4, "get_4bit_type", Purpose.QUANT_STATE)
        magnitude = ops.new(16, 4, "abs")
        largest = ops.new(1, 4, "max")
        del magnitude, largest
        if not nested:
            return packed, [absmax, code]
        offset = ops.new(1, 4, "mean", Purpose.QUANT_STATE)
        self._split_reduction(blocks)
        centred = ops.new(blocks, 4, "sub")
        if self._map is None:
            self._map = ops.new(256, 4, "create_dynamic_map", Purpose.LOADING)
        scales = ops.new(-(-blocks // ABSMAX_BLOCK), 4, "quantize_blockwise", Purpose.QUANT_STATE)
        absmax_8bit = ops.new(blocks, 1, "quantize_blockwise", Purpose.QUANT_STATE)
        code_8bit = ops.new(256, 4, "quantize_blockwise", Purpose.QUANT_STATE)
        del centred, absmax
        return packed, [code, offset, scales, absmax_8bit, code_8bit]

    def _split_reduction(self, elements: int) -> None:
        """A mean over many elements is split over thread blocks that meet in a staging buffer and a semaphore.

        PyTorch ``aten/src/ATen/native/cuda/Reduce.cuh``: 512 threads, split when a thread has 256 or more values.
        """
        per_thread = -(-elements // 512)
        if per_thread < 256:
            return
        blocks = max(min(4 * self.device.multiprocessors, -(-per_thread // 16)), -(-per_thread // 256))
        staging = self.ops.new(blocks, 4, "reduce_staging")
        semaphore = self.ops.new(1, 4, "reduce_semaphore")
        del semaphore, staging

    # ---- prepare_model_for_kbit_training -------------------------------------------------------------------------
    def _prepare_kbit(self, weights: Weights) -> None:
        """Every 16-bit parameter to fp32, one after the other in module order; then ``empty_cache``."""
        tied = weights.head is weights.embedding
        self._upcast(weights.embedding, "embed_tokens")
        for index, layer in enumerate(weights.layers):
            self.ops.tape.layer = index
            self._upcast_layer(layer)
        self.ops.tape.layer = -1
        self._upcast(weights.final_norm, "norm")
        if not tied:
            self._upcast(weights.head, "lm_head")
        self.ops.tape.empty_cache()

    def _upcast_layer(self, layer: Layer) -> None:
        """Module by module: attention, MLP, then the layer's own norms; in each the linear layers before the norms."""
        for module in ("self_attn", "mlp", ""):
            for name in (*(name for name, *_ in self.shape.linears), *(name for name, _ in self.shape.norms)):
                if name.rpartition(".")[0] != module:
                    continue
                if name in layer.norms:
                    self._upcast(layer.norms[name], name)
                    continue
                base = layer.linears[name].base
                if base.scheme == "none":
                    self._upcast(base.weight, name, "materialize_weight")
                if base.bias is not None:
                    self._upcast(base.bias, name)

    def _upcast(self, tensor: Tensor, site: str, op: str = "prepare_kbit") -> None:
        self.ops.tape.site = site
        replacement = self.ops.new(tensor.elements, 4, op, Purpose.UNQUANTIZED)
        tensor.storage, tensor.width = replacement.storage, 4

    # ---- adapters -----------------------------------------------------------------------------------------------
    def _add_adapters(self, weights: Weights) -> None:
        options = self.options
        adapted = options.adapted(self.shape)
        for index, layer in enumerate(weights.layers):
            self.ops.tape.layer = index
            for name in adapted:
                linear = layer.linears[name]
                self.ops.tape.site = f"{name}.lora"
                linear.a = self._adapter(options.rank * linear.base.inputs)
                linear.b = self._adapter(options.rank * linear.base.outputs)
                weights.parameters += [linear.a, linear.b]
        self.ops.tape.layer = -1
        if options.adapter_dtype == "fp32":
            for parameter in weights.parameters:
                replacement: Storage = self.ops.new(parameter.elements, 4, "cast_adapter", Purpose.PARAMS).storage
                parameter.storage, parameter.width = replacement, 4
        else:
            indices = [parameter.storage.index for parameter in weights.parameters]
            self.ops.tape.relabel(indices, Purpose.LOADING, Purpose.PARAMS)

    def _adapter(self, elements: int) -> Tensor:
        tensor = self.ops.new(elements, 2, "move_adapter")
        tensor.requires_grad = True
        return tensor
