"""The symbols of the closed formulas, from a model's shape and the training options."""

from __future__ import annotations

from dataclasses import dataclass

from memtrace.estimate.engine.kernels import Device, attention_kernel
from memtrace.estimate.options import RunOptions
from memtrace.estimate.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class Symbols:
    """h hidden, f FFN width, L layers, a query heads, k kv heads, d head dimension, q = a·d, kv = k·d, V vocabulary,
    r rank, b batch, s sequence, t = b·s, e bytes of a hidden-state element, l bytes of an adapter element.

    ``dropout`` (P): LoRA dropout is on. ``casts`` (C): PEFT casts the adapter input, because l ≠ e. ``adapted``: names
    of the adapted layers. ``kernel``: what runs the attention.
    """

    shape: ModelShape
    options: RunOptions
    device: Device
    h: int
    f: int
    L: int
    a: int
    k: int
    d: int
    q: int
    kv: int
    V: int
    r: int
    b: int
    s: int
    t: int
    e: int
    l: int  # noqa: E741 - the reference's letter
    dropout: bool
    casts: bool
    adapted: frozenset[str]
    kernel: str

    @property
    def shared(self) -> bool:
        """Adapters with the same input share one saved copy: neither dropout nor a cast makes their own."""
        return not self.dropout and not self.casts

    def own(self, width: int) -> int:
        """Bytes per token that one adapter keeps of its own input of ``width`` elements."""
        if self.dropout:
            return (self.l + 1) * width
        return self.l * width if self.casts else 0

    def has(self, *names: str) -> int:
        """How many of these layers are adapted."""
        return sum(name in self.adapted for name in names)

    @property
    def layer_parameters(self) -> int:
        """N₁: adapter parameters of one layer, r·(inputs + outputs) of every adapted matrix."""
        return sum(self.r * (i + o) for name, i, o, _ in self.shape.linears if name in self.adapted)

    @property
    def adapter_parameters(self) -> int:
        """N: adapter parameters of the model."""
        return self.L * self.layer_parameters

    @property
    def adapter_sizes(self) -> tuple[int, ...]:
        """Elements of every adapter matrix of one layer."""
        return tuple(
            self.r * n for name, i, o, _ in self.shape.linears if name in self.adapted for n in (i, o)
        )  # fmt: skip

    @property
    def closed(self) -> bool:
        """Whether the formulas of activations cover this setup (llama-like layers, 4-bit or plain, no autocast)."""
        plain = self.shape.family in ("llama", "mistral", "qwen2") and self.options.quant != "int8"
        window = self.shape.sliding_window
        return plain and not self.options.autocast and not (window is not None and self.s >= window)


def symbols(shape: ModelShape, options: RunOptions, device: Device) -> Symbols:
    """All symbols of one setup."""
    e, width = options.hidden_bytes, options.adapter_bytes
    shared_heads = shape.heads != shape.kv_heads
    kernel = attention_kernel(
        device, options.attention, 2 if options.autocast else e, shared_heads, shape.head_dim
    )  # fmt: skip
    return Symbols(
        shape, options, device,
        h=shape.hidden, f=shape.ffn, L=shape.layers, a=shape.heads, k=shape.kv_heads, d=shape.head_dim,
        q=shape.query, kv=shape.kv, V=shape.vocabulary, r=options.rank,
        b=options.batch, s=options.sequence, t=options.tokens, e=e, l=width,
        dropout=options.dropout > 0,
        casts=width != e and not options.autocast,
        adapted=frozenset(options.adapted(shape)),
        kernel=kernel,
    )  # fmt: skip
