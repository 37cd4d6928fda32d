"""The decoder: layers, norms, MLP, rotary tables (mirrors ``modeling_llama.py`` and its relatives, Transformers 5.17).

Local names and their order follow the module code: they decide when a tensor dies.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from memtrace.estimate.engine.attention import Geometry, apply_rotary, eager, sdpa, with_mask
from memtrace.estimate.engine.autograd import Tensor
from memtrace.estimate.engine.kernels import KernelDevice, attention_kernel
from memtrace.estimate.engine.linears import LoraLinear, lora_linear
from memtrace.estimate.engine.ops import Ops
from memtrace.estimate.options import RunOptions
from memtrace.estimate.shapes import ModelShape


@dataclass(slots=True)
class Layer:
    """Weights of one decoder layer, by name."""

    linears: dict[str, LoraLinear] = field(default_factory=dict)
    norms: dict[str, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Weights:
    """All weights of the model; ``parameters`` are the trainable ones in module order."""

    embedding: Tensor
    head: Tensor
    final_norm: Tensor
    layers: list[Layer]
    buffers: list[Tensor]
    parameters: list[Tensor] = field(default_factory=list)


@dataclass(slots=True)
class Context:
    """What every layer gets besides the hidden states: rotary tables and the masks there are."""

    cos: Tensor
    sin: Tensor
    position_ids: Tensor
    masks: list[Tensor]


class Decoder:
    """Runs the decoder on byte counts."""

    def __init__(
        self, ops: Ops, shape: ModelShape, options: RunOptions, device: KernelDevice, weights: Weights
    ) -> None:
        self.ops = ops
        self.shape = shape
        self.options = options
        self.device = device
        self.weights = weights
        self.training = True
        self.geometry = Geometry(
            device,
            options.batch,
            options.sequence,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.attention_softcap,
        )
        width = 2 if options.autocast else options.hidden_bytes
        self.kernel = attention_kernel(device, options.attention, width, shape.heads != shape.kv_heads, shape.head_dim)

        window = shape.sliding_window
        self.windowed = window is not None and options.sequence >= window and self.kernel != "flash"
        if options.padded or (self.windowed and shape.family != "gemma2"):  # in every layer
            self.kernel = with_mask(self.kernel, self.geometry.groups)

    # ---- pieces -----------------------------------------------------------------------------------------------
    def norm(self, weight: Tensor, hidden_states: Tensor, site: str) -> Tensor:
        """RMSNorm."""
        ops, tape = self.ops, self.ops.tape
        outer, tape.site = tape.site, site
        out = self._gemma_norm(weight, hidden_states) if self.shape.is_gemma else None
        if out is None:
            input_width = hidden_states.width
            hidden_states = ops.to(hidden_states, 4)
            variance = ops.mean(ops.power(hidden_states), hidden_states.elements // weight.elements)
            hidden_states = ops.mul(hidden_states, ops.rsqrt(ops.add_number(variance)))
            out = ops.mul(weight, ops.to(hidden_states, input_width))
        tape.site = outer
        return out

    def _gemma_norm(self, weight: Tensor, x: Tensor) -> Tensor:
        ops = self.ops
        output = self._unit(ops.to(x, 4), x.elements // weight.elements)
        output = ops.mul(output, ops.add_number(ops.to(weight, 4)))
        return ops.to(output, x.width)

    def _unit(self, x: Tensor, rows: int) -> Tensor:
        ops = self.ops
        return ops.mul(x, ops.rsqrt(ops.add_number(ops.mean(ops.power(x), rows))))

    def linear(self, layer: Layer, name: str, x: Tensor) -> Tensor:
        """A (possibly adapted) linear layer of ``layer``."""
        return lora_linear(self.ops, layer.linears[name], self.device, self.training and self.options.dropout > 0, x)

    def attention(self, layer: Layer, hidden_states: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """``LlamaAttention.forward``."""
        ops, shape = self.ops, self.shape
        ops.tape.site = "self_attn"
        if shape.fused_projections:
            query_states, key_states, value_states = self._split_qkv(layer, hidden_states)
        else:
            query_states = self._heads(layer, "self_attn.q_proj", "self_attn.q_norm", hidden_states)
            key_states = self._heads(layer, "self_attn.k_proj", "self_attn.k_norm", hidden_states)
            value_states = self._heads(layer, "self_attn.v_proj", "", hidden_states)
        query_states, key_states = apply_rotary(
            ops,
            query_states,
            key_states,
            context.cos,
            context.sin,
            shape.rotary_share if shape.fused_projections else None,
        )
        attn_weights: Tensor | None = None
        if self.kernel == "eager":
            attn_output, attn_weights = eager(ops, self.geometry, query_states, key_states, value_states)
        else:
            masked = self.options.padded or (self.windowed and (shape.family != "gemma2" or ops.tape.layer % 2 == 0))
            attn_output = sdpa(ops, self.kernel, self.geometry, query_states, key_states, value_states, masked)
        attn_output = self.linear(layer, "self_attn.o_proj", attn_output)
        ops.tape.site = ""
        return attn_output, attn_weights

    def _heads(self, layer: Layer, name: str, norm: str, hidden_states: Tensor) -> Tensor:
        if norm in layer.norms:
            return self.ops.heads(self.norm(layer.norms[norm], self.linear(layer, name, hidden_states), norm))
        return self.ops.heads(self.linear(layer, name, hidden_states))

    def _split_qkv(self, layer: Layer, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ops, shape = self.ops, self.shape
        qkv = self.linear(layer, "self_attn.qkv_proj", hidden_states)
        of = shape.query + 2 * shape.kv
        query_states = ops.slice_columns(qkv, shape.query, of)
        key_states = ops.slice_columns(qkv, shape.kv, of)
        value_states = ops.slice_columns(qkv, shape.kv, of)
        return ops.heads(query_states), ops.heads(key_states), ops.heads(value_states)

    def mlp(self, layer: Layer, x: Tensor) -> Tensor:
        """``LlamaMLP.forward``."""
        ops = self.ops
        ops.tape.site = "mlp"
        activation = "gelu" if self.shape.is_gemma else "silu"
        if self.shape.fused_projections:
            up_states = self.linear(layer, "mlp.gate_up_proj", x)
            gate, up_states = ops.split(up_states, [up_states.elements // 2] * 2)
            up_states = ops.mul(up_states, ops.activation(gate, activation))
            return self.linear(layer, "mlp.down_proj", up_states)
        return self.linear(
            layer,
            "mlp.down_proj",
            ops.mul(
                ops.activation(self.linear(layer, "mlp.gate_proj", x), activation),
                self.linear(layer, "mlp.up_proj", x),
            ),
        )

    def layer(self, index: int, hidden_states: Tensor, context: Context) -> Tensor:
        """``LlamaDecoderLayer.forward``."""
        ops, weights, norms = self.ops, self.weights.layers[index], self.weights.layers[index].norms
        ops.tape.layer = index
        sandwich = self.shape.sandwich_norms
        residual = hidden_states
        hidden_states = self.norm(norms["input_layernorm"], hidden_states, "input_layernorm")
        hidden_states, _ = self.attention(weights, hidden_states, context)
        if sandwich:
            hidden_states = self.norm(norms["post_attention_layernorm"], hidden_states, "post_attention_layernorm")
        hidden_states = ops.add(residual, hidden_states, "attention_residual")
        residual = hidden_states
        name = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
        hidden_states = self.norm(norms[name], hidden_states, name)
        hidden_states = self.mlp(weights, hidden_states)
        ops.tape.site = ""
        if sandwich:
            hidden_states = self.norm(norms["post_feedforward_layernorm"], hidden_states, "post_feedforward_layernorm")
        return ops.add(residual, hidden_states, "mlp_residual")

    # ---- the model --------------------------------------------------------------------------------------------
    def forward(self) -> Tensor:
        """``LlamaModel.forward``: the last hidden state."""
        ops, options, shape = self.ops, self.options, self.shape
        tape = ops.tape
        tape.layer, tape.site = -1, "embed_tokens"
        inputs_embeds = ops.new(options.tokens * shape.hidden, options.hidden_bytes, "embedding")
        if shape.is_gemma:
            inputs_embeds = ops.scale(inputs_embeds, "scale_embedding")
        inputs_embeds.requires_grad = options.embeddings_require_grad
        tape.site = ""
        context = self._context()
        hidden_states = inputs_embeds
        for index in range(shape.layers):
            hidden_states = self._run_layer(index, hidden_states, context)
        tape.layer = -1
        return self.norm(self.weights.final_norm, hidden_states, "norm")

    def _run_layer(self, index: int, hidden_states: Tensor, context: Context) -> Tensor:
        if not (self.options.checkpointing and self.training):
            return self.layer(index, hidden_states, context)
        checkpoint = self.ops.checkpoint_reentrant if self.options.reentrant else self.ops.checkpoint
        return checkpoint(lambda x: self.layer(index, x, context), hidden_states)

    def _context(self) -> Context:
        """Position ids, the packed-sequence test, the mask, and the rotary tables."""
        ops, options, shape = self.ops, self.options, self.shape
        sequence, batch, width = options.sequence, options.batch, options.hidden_bytes
        position_ids = ops.add_number(ops.new(sequence, 8, "arange"))
        kinds, given = 2 if shape.family == "gemma2" else 1, options.masked or options.padded
        masks: list[Tensor] = []
        if not given:
            self._packed_test()
        if self.kernel == "eager":
            for _ in range(kinds):
                allowed = self._given_mask() if given else [ops.new(sequence * sequence, 1, "causal_mask")]
                zero = ops.new(1, width, "scalar_tensor")
                masks.append(ops.new(batch * sequence * sequence, width, "mask"))
                del zero, allowed
        elif given:
            masks = [mask for _ in range(kinds) for mask in self._given_mask()]
        elif self.windowed:
            masks.append(ops.new(sequence * sequence, 1, "sliding_mask"))
        tape = ops.tape
        tape.site = "rotary_emb"
        cos, sin = self._rotary(round(shape.head_dim * shape.rotary_share), width)
        tape.site = ""
        return Context(cos, sin, position_ids, masks)

    def _given_mask(self) -> list[Tensor]:
        """``create_causal_mask`` given a mask: one byte for each pair of tokens of a row, none where all count."""
        ops, sequence, batch = self.ops, self.options.sequence, self.options.batch
        counted = ops.new(batch * sequence, 1, "to")
        if self.kernel != "eager":  # whether all count is asked twice
            for _ in range(2):
                total = ops.new(1, 8, "sum")
                same = ops.new(1, 1, "eq")
                del total, same
            if not self.options.padded:
                return []
        rows, heads = ops.new(batch, 8, "arange"), ops.new(1, 8, "arange")
        queries, keys = (ops.add_number(ops.new(sequence, 8, "arange")) for _ in range(2))
        one = ops.new(1, 1, "new_ones")
        causal = ops.new(sequence * sequence, 1, "le")
        causal = ops.new(sequence * sequence, 1, "bitwise_and")
        of_rows = ops.new(batch * sequence, 1, "index")
        mask = ops.new(batch * sequence * sequence, 1, "bitwise_and")
        del counted, rows, heads, queries, keys, one, causal, of_rows
        return [mask]

    def _packed_test(self) -> None:
        """``find_packed_sequence_indices``."""
        ops, sequence, batch = self.ops, self.options.sequence, self.options.batch
        first = ops.new(batch, 8, "sub")
        padded = ops.new(batch * (sequence + 1), 8, "cat")
        difference = ops.new(batch * sequence, 8, "diff")
        del padded
        changed = ops.new(batch * sequence, 1, "ne")
        mask = ops.new(batch * sequence, 8, "cumsum")
        integers = ops.new(batch * sequence, 8, "cumsum")
        if batch == 1:
            ops.new(1279, 1, "cumsum")
        del integers, changed
        zero = ops.new(batch, 1, "eq")
        all_zero = ops.new(1, 1, "all")
        del zero, all_zero, first, difference, mask

    def _rotary(self, dim: int, width: int) -> tuple[Tensor, Tensor]:
        """``LlamaRotaryEmbedding.forward``: cos and sin of [1, s, d]; its product is the first to use cuBLAS."""
        ops, sequence = self.ops, self.options.sequence
        positions = ops.new(sequence, 4, "to")
        freqs = ops.new(sequence * (dim // 2), 4, "bmm")
        ops.workspace()
        emb = ops.new(sequence * dim, 4, "cat")
        cos = ops.scale(ops.new(sequence * dim, 4, "cos"))
        sin = ops.scale(ops.new(sequence * dim, 4, "sin"))
        result = ops.to(cos, width), ops.to(sin, width)
        del positions, freqs, emb
        return result
