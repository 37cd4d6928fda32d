"""How the model is trained: everything besides the architecture that decides the memory of a step."""

from __future__ import annotations

from memtrace.errors import UsageError
from memtrace.estimate.shapes import ModelShape
from memtrace.frozen import dataclass
from memtrace.units import format_count

OPTIMIZERS = (
    "adamw_torch", "adamw_torch_fused", "adamw_bnb", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit", "sgd",
)  # fmt: skip
# What trainers (by option) and libraries (by class) call them.
OPTIMIZER_NAMES = {
    **{name: name for name in OPTIMIZERS}, "adamw_bnb_8bit": "adamw_8bit", "paged_adamw": "paged_adamw_32bit",
    "AdamW": "adamw_torch", "AdamW8bit": "adamw_8bit", "AdamW32bit": "adamw_bnb", "PagedAdamW8bit": "paged_adamw_8bit",
    "PagedAdamW32bit": "paged_adamw_32bit", "PagedAdamW": "paged_adamw_32bit", "SGD": "sgd",
}  # fmt: skip
ATTENTION = ("sdpa", "eager", "flash")
LOSSES = ("full", "chunked", "fused")
QUANT = ("nf4", "nf4-dq", "int8", "none")
ALL_LINEAR = "all-linear"
# Field -> flag of the command line.
FLAGS = {
    "sequence": "--seq-len", "batch": "--batch", "accumulation": "--accumulation", "rank": "--rank",
    "targets": "--targets", "dropout": "--dropout", "optimizer": "--optim", "attention": "--attn",
    "checkpointing": "--checkpointing", "reentrant": "--reentrant", "prepare_kbit": "--prepare-kbit",
    "autocast": "--autocast", "adapter_dtype": "--adapter-dtype", "keep_logits": "--keep-logits", "loss": "--loss",
    "chunk_tokens": "--chunk-tokens", "quant": "--quant", "embeddings_require_grad": "--embedding-grad",
}  # fmt: skip
# What no real run reaches: beyond it a number is a slip, and working on it would take for ever.
_MOST_TOKENS = 100_000_000  # of a micro-batch
_MOST_CHUNKS = 2_048  # of the chunked loss, each of which is stepped through
_MOST_MICRO_BATCHES = 1_000_000


@dataclass(frozen=True, slots=True)
class RunOptions:
    """One training setup. ``sequence`` and ``batch`` are of one micro-batch; ``rank`` 0 means no adapters.

    ``prepare_kbit``: ``prepare_model_for_kbit_training`` (fp32 embedding, norms, head and hidden states).
    ``embeddings_require_grad``: the embedding output needs a gradient, so the first layer saves what the others do.
    Whatever enables checkpointing switches that on (``prepare_model_for_kbit_training`` by default), and switching
    checkpointing off later leaves it on.
    ``hold_loss``: the loop keeps the loss tensor (and with it the graph's leaves) until after ``zero_grad``;
    Transformers' Trainer drops it after backward.
    ``chunk_tokens``: tokens a chunk of the chunked loss. ``accumulation``: micro-batches a step.
    ``masked``: batches bring a mask with them, as a collator that pads makes it. ``padded``: their rows are of
    different length, so that attention needs it.
    ``clips``: the norm of the gradients is taken before each step, as the Trainer does with ``max_grad_norm``.
    ``evaluates``: after the last step a batch goes through the model without gradients.
    """

    sequence: int
    batch: int = 1
    rank: int = 16
    targets: tuple[str, ...] = (ALL_LINEAR,)
    dropout: float = 0.05
    optimizer: str = "adamw_torch"
    attention: str = "sdpa"
    checkpointing: bool = True
    reentrant: bool = False
    prepare_kbit: bool = True
    autocast: bool = False
    adapter_dtype: str = "fp32"
    keep_logits: bool = False
    loss: str = "full"
    quant: str = "nf4-dq"
    embeddings_require_grad: bool = True
    hold_loss: bool = False
    accumulation: int = 1
    chunk_tokens: int = 1024
    masked: bool = False
    padded: bool = False
    clips: bool = False
    evaluates: bool = False

    def __post_init__(self) -> None:
        for value, allowed, what in (
            (self.optimizer, OPTIMIZERS, "optimizer"),
            (self.attention, ATTENTION, "attention"),
            (self.loss, LOSSES, "loss"),
            (self.quant, QUANT, "quantisation"),
            (self.adapter_dtype, ("fp32", "bf16"), "adapter type"),
        ):
            if value not in allowed:
                raise UsageError(f"unknown {what} {value!r} (one of: {', '.join(allowed)})")
        for number, what in (
            (self.sequence, "sequence length"),
            (self.batch, "batch"),
            (self.rank, "rank"),
            (self.accumulation, "accumulation"),
            (self.chunk_tokens, "chunk"),
        ):
            if number <= 0:
                raise UsageError(f"{what} must be positive, not {number}")
        if not 0.0 <= self.dropout < 1.0:
            raise UsageError(f"dropout must be in [0, 1), not {self.dropout}")
        if self.sequence < 2:
            raise UsageError("sequence length must be at least 2")
        chunks = -(-self.tokens // self.chunk_tokens) if self.loss == "chunked" else 0
        for number, most, what in (
            (self.tokens, _MOST_TOKENS, f"tokens a micro-batch ({self.sequence} × {self.batch})"),
            (self.accumulation, _MOST_MICRO_BATCHES, "micro-batches a step (accumulation)"),
            (chunks, _MOST_CHUNKS, "chunks of the loss"),
        ):
            if number > most:
                raise UsageError(f"{format_count(number)} {what} is out of range: at most {format_count(most)}")

    def flags(self, before: RunOptions) -> str:
        """What to put on the command line to get from ``before`` to these options."""
        words = []
        for name, flag in FLAGS.items():
            value = getattr(self, name)
            if value == getattr(before, name):
                continue
            if isinstance(value, bool):
                off = "--drop-logits" if name == "keep_logits" else f"--no-{flag[2:]}"
                words.append(flag if value else off)
            else:
                words.append(f"{flag} {','.join(value) if isinstance(value, tuple) else value}")
        return " ".join(words)

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch."""
        return self.sequence * self.batch

    @property
    def hidden_bytes(self) -> int:
        """Bytes of a hidden-state element: 4 after ``prepare_model_for_kbit_training``, else 2."""
        return 4 if self.prepare_kbit else 2

    def adapted(self, shape: ModelShape) -> tuple[str, ...]:
        """The adapted linear layers of one decoder layer, in module order. Raises UsageError for an unknown target, and
        for a rank above the widest layer's, where an adapter could be no larger than the weight."""
        widest = max(max(inputs, outputs) for _, inputs, outputs, _ in shape.linears)
        if self.rank > widest:
            raise UsageError(f"rank {self.rank} is out of range: no layer of {shape.name} is wider than {widest}")
        names = [name for name, _, _, _ in shape.linears]
        if ALL_LINEAR in self.targets:
            return tuple(names)
        short = {name.rsplit(".", 1)[-1]: name for name in names}
        unknown = [target for target in self.targets if target not in short]
        if unknown:
            raise UsageError(f"{shape.name} has no layer {unknown[0]!r} (layers: {', '.join(short)})")
        return tuple(name for name in names if name.rsplit(".", 1)[-1] in self.targets)
