"""The numbers of a decoder that decide its memory, read from a Hugging Face ``config.json`` or a preset."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from memtrace.errors import SnapshotError, UsageError
from memtrace.frozen import dataclass
from memtrace.snapshot.container import read_at_most

#: Families whose module code the engine mirrors, by ``model_type``.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3")
_ALIASES = {"ministral": "mistral"}
_NOT_STORED = ("", "bitsandbytes", "BITS_AND_BYTES")  # quantised while loading, as --quant says
# Beyond this a number is a slip. The largest published dense decoders have 126 layers, a hidden size of 20,480 and a
# vocabulary of 260,000.
LARGEST = {  # also of what other architectures call the same, and what they have besides
    key: most
    for most, keys in (
        (1_000, "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers"),
        (100_000, "num_attention_heads num_key_value_heads head_dim num_experts num_local_experts n_routed_experts"),
        (1_000_000, "hidden_size n_embd d_model embedding_size hidden_dim"),
        (10_000_000, "intermediate_size d_ff n_inner ffn_dim moe_intermediate_size"),
        (100_000_000, "vocab_size n_head num_heads max_position_embeddings n_positions"),
    )
    for key in keys.split()
}
_NEVER_NONE = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
_DEEPEST_CONFIG = 8
_LARGEST_CONFIG_BYTES = 16 << 20
_MOE_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder. Counts are elements; ``family`` is the ``model_type`` whose code is mirrored."""

    name: str
    family: str
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied_embeddings: bool
    attention_bias: bool = False  # on q, k and v
    output_bias: bool = False  # on o
    mlp_bias: bool = False
    sliding_window: int | None = None
    attention_softcap: bool = False
    logit_softcap: bool = False
    rotary_share: float = 1.0

    @property
    def query(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """Width of all key (or value) heads together."""
        return self.kv_heads * self.head_dim

    @property
    def qk_norm(self) -> bool:
        """RMSNorm on each query and key head (Qwen3)."""
        return self.family == "qwen3"

    @property
    def sandwich_norms(self) -> bool:
        """Norms after attention and MLP as well as before (Gemma 2)."""
        return self.family == "gemma2"

    @property
    def is_gemma(self) -> bool:
        """Gemma's code: the embedding's output is multiplied by a constant, norms multiply in fp32 by 1 + weight and
        cast then (others cast, then multiply), GELU."""
        return self.family in ("gemma", "gemma2")

    @property
    def fused_projections(self) -> bool:
        """One qkv and one gate_up matrix (Phi 3)."""
        return self.family == "phi3"

    @property
    def linears(self) -> tuple[tuple[str, int, int, bool], ...]:
        """Linear layers of one decoder layer in module order: name, inputs, outputs, has a bias."""
        h, f, q, kv = self.hidden, self.ffn, self.query, self.kv
        if self.fused_projections:
            return (
                ("self_attn.o_proj", q, h, False),
                ("self_attn.qkv_proj", h, q + 2 * kv, False),
                ("mlp.gate_up_proj", h, 2 * f, False),
                ("mlp.down_proj", f, h, False),
            )
        return (
            ("self_attn.q_proj", h, q, self.attention_bias),
            ("self_attn.k_proj", h, kv, self.attention_bias),
            ("self_attn.v_proj", h, kv, self.attention_bias),
            ("self_attn.o_proj", q, h, self.output_bias),
            ("mlp.gate_proj", h, f, self.mlp_bias),
            ("mlp.up_proj", h, f, self.mlp_bias),
            ("mlp.down_proj", f, h, self.mlp_bias),
        )

    @property
    def norms(self) -> tuple[tuple[str, int], ...]:
        """Norms of one decoder layer in module order: name, elements."""
        inner: tuple[tuple[str, int], ...] = ()
        if self.qk_norm:
            inner = (("self_attn.q_norm", self.head_dim), ("self_attn.k_norm", self.head_dim))
        names = ["input_layernorm", "post_attention_layernorm"]
        if self.sandwich_norms:
            names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        return inner + tuple((name, self.hidden) for name in names)

    @property
    def linear_parameters(self) -> int:
        """Elements of all linear weights of all layers."""
        return self.layers * sum(inputs * outputs for _, inputs, outputs, _ in self.linears)

    @property
    def parameters(self) -> int:
        """All parameters: linears, biases, norms, embedding and head."""
        biases = sum(outputs for _, _, outputs, bias in self.linears if bias)
        norms = sum(elements for _, elements in self.norms)
        tables = self.vocabulary * self.hidden * (1 if self.tied_embeddings else 2)
        return self.linear_parameters + self.layers * (biases + norms) + self.hidden + tables


def shape_from_config(config: Mapping[str, Any], name: str, where: str | None = None) -> ModelShape:
    """The shape in a ``config.json``. Raises UsageError for what the engine does not cover, saying which part.

    ``where`` is what an error names, the file say; by default ``name``.
    """
    where = where or name
    family = str(config.get("model_type", ""))
    family = _ALIASES.get(family, family)
    if any(isinstance(config.get(key), int) and int(config[key]) > 1 for key in _MOE_KEYS):
        raise UsageError(f"{where}: a mixture of experts is not covered by the estimate; measure it with a recording")
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UsageError(
            f"{where}: model_type {family or 'missing'!r} is not covered by the estimate (covered: {known})"
        )
    _check_storage(config, where)
    heads = _positive(config, "num_attention_heads", where)
    hidden = _positive(config, "hidden_size", where)
    head_dim = _positive(config, "head_dim", where, hidden // heads)
    kv_heads = _positive(config, "num_key_value_heads", where, heads)
    if head_dim == 0:
        raise UsageError(f"{where}: {heads} attention heads are more than 'hidden_size' {hidden} has room for")
    if heads % kv_heads:
        raise UsageError(f"{where}: {heads} attention heads do not divide into {kv_heads} key/value heads")
    attention_bias = _switch(config, "attention_bias", where)
    window = config.get("sliding_window")
    if family.startswith("qwen") and not _switch(config, "use_sliding_window", where):
        window = None
    return ModelShape(
        name=name,
        family=family,
        hidden=hidden,
        ffn=_positive(config, "intermediate_size", where),
        layers=_positive(config, "num_hidden_layers", where),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=_positive(config, "vocab_size", where),
        tied_embeddings=_switch(config, "tie_word_embeddings", where, family in ("gemma", "gemma2")),
        attention_bias=family == "qwen2" or attention_bias,
        output_bias=attention_bias and family != "qwen2",
        mlp_bias=_switch(config, "mlp_bias", where),
        sliding_window=window if isinstance(window, int) and window > 0 else None,
        attention_softcap=family == "gemma2" and config.get("attn_logit_softcapping", 50.0) is not None,
        logit_softcap=family == "gemma2" and config.get("final_logit_softcapping", 30.0) is not None,
        rotary_share=_rotary_share(config, where) if family == "phi3" else 1.0,
    )


def _positive(config: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    """A count; ``default`` where the key is missing or null."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        raise UsageError(
            f"{where}: no usable {key!r} in the config: {'None is no number' if key in config else 'missing'}"
        )
    refuse_absurd({key: value}, where)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise _no_count(where, key, value)
    return value


def _no_count(where: str, key: str, value: object) -> UsageError:
    return UsageError(f"{where}: no usable {key!r} in the config: {value!r:.60} is not a whole number above 0")


def refuse_absurd(config: Mapping[str, Any], where: str, depth: int = 0) -> None:
    """Raise UsageError for a count that is no number of things, or that no real model of any architecture reaches, also
    in the parts of a config. None, lists and 0 (experts) are left to the architecture, but for 0 of what all have."""
    for key, value in config.items():
        most = LARGEST.get(key)
        if most is not None and isinstance(value, (int, float)) and value > most:
            raise UsageError(f"{where}: {key!r} {value:,} is out of range: no real model has more than {most:,}")
        scalar = most is not None and isinstance(value, (bool, int, float, str))
        if scalar and (type(value) is not int or value < 0 or (value == 0 and key in _NEVER_NONE)):
            raise _no_count(where, key, value)
        if isinstance(value, dict) and depth < _DEEPEST_CONFIG:
            refuse_absurd(value, where, depth + 1)


def _switch(config: Mapping[str, Any], key: str, where: str, default: bool = False) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise UsageError(f"{where}: no usable {key!r} in the config: {value!r:.60} is neither true nor false")
    return value


def _rotary_share(config: Mapping[str, Any], where: str) -> float:
    value = config.get("partial_rotary_factor")
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise UsageError(f"{where}: no usable 'partial_rotary_factor' in the config: {value!r:.60} is not in (0, 1]")
    return float(value)


def _check_storage(config: Mapping[str, Any], where: str) -> None:
    """Weights that a checkpoint stores quantised are used as they are, whatever ``--quant`` says."""
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if method is not None and str(method).rpartition(".")[2] not in _NOT_STORED:
        raise UsageError(
            f"{where}: weights stored in {str(method)[:40]!r} format are not covered by the estimate, bitsandbytes is "
            "(without 'quantization_config' it estimates what --quant says)"
        )


def read_keys(path: Path) -> dict[str, Any]:
    """The keys of the ``config.json`` at ``path``. Raises SnapshotError if it can't be read or is none."""
    content = read_at_most(path, _LARGEST_CONFIG_BYTES, "config.json")
    try:
        config = orjson.loads(content.removeprefix(b"\xef\xbb\xbf"))
    except ValueError as error:
        raise SnapshotError(f"{path}: not JSON, so no config.json ({error})") from None
    if not isinstance(config, dict):
        raise SnapshotError(f"{path}: not a model configuration")
    return config
