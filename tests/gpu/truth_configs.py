"""The configurations that ``record_truth.py`` records; the architectures are published ones with fewer layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LLAMA2_7B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 8,
    "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip
MISTRAL_7B: dict[str, Any] = {
    "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 32768,
    "sliding_window": None,
}  # fmt: skip
QWEN2_7B: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 8,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}  # fmt: skip
TINYLLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8,
    "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048,
}  # fmt: skip
ARCHITECTURES = {"llama2-7b": LLAMA2_7B, "mistral-7b": MISTRAL_7B, "qwen2-7b": QWEN2_7B, "tinyllama": TINYLLAMA}


@dataclass(frozen=True)
class Recording:
    """One run: the architecture, the step's options, and how it is recorded.

    ``cap_of`` names another recording whose peak reserved bytes, times ``cap_factor``, are this one's limit.
    """

    arch: str
    step: dict[str, Any] = field(default_factory=dict)
    late: bool = False
    stacks: str = "python"
    cap_of: str | None = None
    cap_factor: float = 0.97


_PLAIN = {"prepare_kbit": False}
RECORDINGS: dict[str, Recording] = {
    "qwen2-7b_baseline": Recording("qwen2-7b", {"batch": 2}),
    "mistral-7b_no-checkpointing": Recording(
        "mistral-7b", {"checkpointing": False, "optim": "adamw_torch", "rank": 64, "seq_len": 1536}
    ),
    "mistral-7b_reentrant": Recording("mistral-7b", {"reentrant": True, "optim": "adamw_8bit"}),
    "llama2-7b_eager": Recording("llama2-7b", {"attn": "eager", "batch": 2}),
    "llama2-7b_eager-no-checkpointing": Recording(
        "llama2-7b", {"attn": "eager", "checkpointing": False, "seq_len": 768, **_PLAIN, "optim": "adamw_torch"}
    ),
    "llama2-7b_autocast": Recording("llama2-7b", {"autocast": True, **_PLAIN, "optim": "adamw_torch"}),
    "mistral-7b_autocast-no-checkpointing": Recording(
        "mistral-7b", {"autocast": True, **_PLAIN, "checkpointing": False, "dropout": 0.0}
    ),
    "llama2-7b_qv-only": Recording(
        "llama2-7b", {"targets": ("q_proj", "v_proj"), "checkpointing": False, **_PLAIN, "optim": "adamw_torch"}
    ),
    "qwen2-7b_late-cpp": Recording("qwen2-7b", {"accumulate": 2, "optim": "adamw_torch"}, late=True, stacks="all"),
    "llama2-7b_lora-bf16-base": Recording(
        "llama2-7b", {"quant": "none", **_PLAIN, "adapter_dtype": "bf16", "optim": "adamw_torch_fused"}
    ),
    "tinyllama_full": Recording("tinyllama", {"quant": "none", "lora": False, "optim": "adamw_torch", "batch": 2}),
    "tinyllama_full-late": Recording(
        "tinyllama", {"quant": "none", "lora": False, "optim": "adamw_8bit", "checkpointing": False}, late=True
    ),
    "llama2-7b_int8": Recording("llama2-7b", {"quant": "int8"}),
    "mistral-7b_accumulation-evaluation": Recording(
        "mistral-7b", {"accumulate": 2, "eval_batches": 2, **_PLAIN, "batch": 2}
    ),
    "tinyllama_hf-trainer": Recording("tinyllama", {"trainer": "hf", "autocast": True, "batch": 2, "accumulate": 2}),
    "tinyllama_trl": Recording("tinyllama", {"trainer": "trl", "autocast": True, "batch": 2, "steps": 3}),
    "qwen2-7b_oom-backward": Recording("qwen2-7b", {"batch": 2}, cap_of="qwen2-7b_baseline", cap_factor=0.93),
    "mistral-7b_oom-late-cpp": Recording(
        "mistral-7b",
        {"checkpointing": False, "optim": "adamw_torch", "rank": 64, "seq_len": 1536},
        late=True,
        stacks="all",
        cap_of="mistral-7b_no-checkpointing",
        cap_factor=0.9,
    ),
}

TINY: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256,
}  # fmt: skip


def shrunk(recording: Recording) -> Recording:
    """The same run small enough for a CPU, to test the script."""
    step = recording.step | {"seq_len": 64, "rank": 4}
    step["optim"] = "adamw_torch" if "paged" in step.get("optim", "paged") else step["optim"]
    return Recording("tiny", step, recording.late, recording.stacks, recording.cap_of, recording.cap_factor)
