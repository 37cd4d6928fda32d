"""The numbers of a decoder that decide its memory, read from a Hugging Face ``config.json`` or a preset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from memtrace.errors import UsageError

#: Families whose module code the engine mirrors, by ``model_type``.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3")
_ALIASES = {"ministral": "mistral"}
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
    def scaled_embedding(self) -> bool:
        """Embedding output multiplied by a constant (Gemma)."""
        return self.family in ("gemma", "gemma2")

    @property
    def norm_style(self) -> str:
        """``llama``: cast, then multiply by the weight; ``gemma``: multiply in fp32 by 1 + weight, then cast."""
        return "gemma" if self.family in ("gemma", "gemma2") else "llama"

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


def shape_from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape in a ``config.json``. Raises UsageError for what the engine does not cover, saying which part."""
    family = str(config.get("model_type", ""))
    family = _ALIASES.get(family, family)
    if any(isinstance(config.get(key), int) and int(config[key]) > 1 for key in _MOE_KEYS):
        raise UsageError(f"{name}: a mixture of experts is not covered by the estimate; measure it with a recording")
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UsageError(
            f"{name}: model_type {family or 'missing'!r} is not covered by the estimate (covered: {known})"
        )
    heads = _positive(config, "num_attention_heads", name)
    hidden = _positive(config, "hidden_size", name)
    head_dim = config.get("head_dim")
    if not isinstance(head_dim, int) or head_dim <= 0:
        head_dim = hidden // heads
    kv_heads = config.get("num_key_value_heads")
    if not isinstance(kv_heads, int) or kv_heads <= 0:
        kv_heads = heads
    if heads % kv_heads:
        raise UsageError(f"{name}: {heads} attention heads do not divide into {kv_heads} key/value heads")
    bias = family == "qwen2" or bool(config.get("attention_bias", False))
    window = config.get("sliding_window")
    if family.startswith("qwen") and not config.get("use_sliding_window", False):
        window = None
    return ModelShape(
        name=name,
        family=family,
        hidden=hidden,
        ffn=_positive(config, "intermediate_size", name),
        layers=_positive(config, "num_hidden_layers", name),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=_positive(config, "vocab_size", name),
        tied_embeddings=bool(config.get("tie_word_embeddings", family in ("gemma", "gemma2"))),
        attention_bias=bias,
        output_bias=bool(config.get("attention_bias", False)) and family != "qwen2",
        mlp_bias=bool(config.get("mlp_bias", False)),
        sliding_window=window if isinstance(window, int) and window > 0 else None,
        attention_softcap=family == "gemma2" and config.get("attn_logit_softcapping", 50.0) is not None,
        logit_softcap=family == "gemma2" and config.get("final_logit_softcapping", 30.0) is not None,
        rotary_share=float(config.get("partial_rotary_factor") or 1.0) if family == "phi3" else 1.0,
    )


def _positive(config: Mapping[str, Any], key: str, name: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise UsageError(f"{name}: config has no usable {key!r}")
    return value


def read_config(path: Path) -> ModelShape:
    """The shape in the file ``path`` (a ``config.json``). Raises UsageError if it can't be read."""
    try:
        config = orjson.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not a readable config.json ({error})") from None
    if not isinstance(config, dict):
        raise UsageError(f"{path}: not a model configuration")
    if isinstance(config.get("text_config"), dict):
        raise UsageError(f"{path}: a multimodal model is not covered by the estimate")
    return shape_from_config(config, str(config.get("_name_or_path") or path.parent.name or path.stem))
