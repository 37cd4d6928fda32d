"""The configurations that ``record_truth.py`` records; the architectures are published ones with fewer layers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 2, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 32768,
    "tie_word_embeddings": False, "norm_topk_prob": True,
}  # fmt: skip
# 8-bit products split off columns with values above 6, which random weights make many of and trained ones few.
LLAMA_INT8 = LLAMA2_7B | {"initializer_range": 0.005, "num_hidden_layers": 3}
ARCHITECTURES = {
    "llama2-7b": LLAMA2_7B, "mistral-7b": MISTRAL_7B, "qwen2-7b": QWEN2_7B, "tinyllama": TINYLLAMA,
    "llama-3-layers": LLAMA2_7B | {"num_hidden_layers": 3}, "llama-4-layers": LLAMA2_7B | {"num_hidden_layers": 4},
    "llama-int8": LLAMA_INT8, "qwen2-2-layers": QWEN2_7B | {"num_hidden_layers": 2}, "qwen3-moe": QWEN3_MOE,
    "mistral-4-layers": MISTRAL_7B | {"num_hidden_layers": 4},
    "tinyllama-4-layers": TINYLLAMA | {"num_hidden_layers": 4},
}  # fmt: skip


@dataclass(frozen=True)
class TruthRun:
    """One run: program, architecture ("": the program builds its own), options, and how it is recorded.

    ``step`` are ``StepConfig``'s, ``options`` the program's. Of these, ``oom`` makes the last batch four times as large
    under a limit of ``cap_factor`` times the peak so far; ``dump`` says when an error is dumped: ``oom`` in the
    observer, ``except`` after unwinding, ``end`` by a program that went on; ``trains`` is false for inference.
    """

    program: str
    arch: str = ""
    step: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    late: bool = False
    stacks: str = "python"
    ranks: int = 1


def _plain(arch: str, step: dict[str, Any] | None = None, **rest: Any) -> TruthRun:
    return TruthRun("plain", arch, step or {}, **rest)


_HALF = {"prepare_kbit": False}
_BF16 = {"quant": "none", "prepare_kbit": False}
_NOT_HELD = {"checkpointing": False}


def _both(
    name: str, program: str, arch: str, step: dict[str, Any], ranks: int = 1, **options: Any
) -> dict[str, TruthRun]:
    """A kind of run, recorded late to its end, and from its beginning until it runs out of memory."""
    return {
        f"{name}_late": TruthRun(program, arch, step, options, late=True, ranks=ranks),
        f"{name}_oom": TruthRun(program, arch, step, options | {"oom": True}, ranks=ranks),
    }


RUNS: dict[str, TruthRun] = {
    "qwen2-7b_baseline": _plain("qwen2-7b", {"batch": 2}),
    "mistral-7b_no-checkpointing": _plain(
        "mistral-7b", {"checkpointing": False, "optim": "adamw_torch", "rank": 64, "seq_len": 1536}
    ),
    "mistral-7b_reentrant": _plain("mistral-7b", {"reentrant": True, "optim": "adamw_8bit"}),
    "llama2-7b_eager": _plain("llama2-7b", {"attn": "eager", "batch": 2}),
    "llama2-7b_eager-no-checkpointing": _plain(
        "llama2-7b", {"attn": "eager", "checkpointing": False, "seq_len": 768, **_HALF, "optim": "adamw_torch"}
    ),
    "llama2-7b_autocast": _plain("llama2-7b", {"autocast": True, **_HALF, "optim": "adamw_torch"}),
    "mistral-7b_autocast-no-checkpointing": _plain(
        "mistral-7b", {"autocast": True, **_HALF, "checkpointing": False, "dropout": 0.0}
    ),
    "llama2-7b_qv-only": _plain(
        "llama2-7b", {"targets": ("q_proj", "v_proj"), "checkpointing": False, **_HALF, "optim": "adamw_torch"}
    ),
    "qwen2-7b_late-cpp": _plain("qwen2-7b", {"accumulate": 2, "optim": "adamw_torch"}, late=True, stacks="all"),
    "llama2-7b_lora-bf16-base": _plain(
        "llama2-7b", {"quant": "none", **_HALF, "adapter_dtype": "bf16", "optim": "adamw_torch_fused"}
    ),
    "tinyllama_full": _plain("tinyllama", {"quant": "none", "lora": False, "optim": "adamw_torch", "batch": 2}),
    "tinyllama_full-late": _plain(
        "tinyllama", {"quant": "none", "lora": False, "optim": "adamw_8bit", "checkpointing": False}, late=True
    ),
    "llama2-7b_int8": _plain("llama2-7b", {"quant": "int8"}),
    "mistral-7b_accumulation-evaluation": _plain(
        "mistral-7b", {"accumulate": 2, "eval_batches": 2, **_HALF, "batch": 2}
    ),
    "tinyllama_hf-trainer": TruthRun(
        "trainer", "tinyllama", {"autocast": True, "batch": 2, "accumulate": 2}, {"trainer": "hf"}
    ),
    "tinyllama_trl": TruthRun("trainer", "tinyllama", {"autocast": True, "batch": 2, "steps": 3}, {"trainer": "trl"}),
    "qwen2-7b_oom-backward": _plain("qwen2-7b", {"batch": 2}, options={"cap_gib": 9.927}),
    "mistral-7b_oom-late-cpp": _plain(
        "mistral-7b",
        {"checkpointing": False, "optim": "adamw_torch", "rank": 64, "seq_len": 1536},
        options={"cap_gib": 10.028},
        late=True,
        stacks="all",
    ),
    # Field: what other people run.
    **_both("accelerate-hooks", "adapters", "llama-3-layers", {"quant": "nf4-dq"} | _NOT_HELD, hooks=True, batch=1),
    **_both("offload-to-host", "offload", "mistral-4-layers", {}, where="cpu", trains=False),
    **_both("offload-to-disk", "offload", "tinyllama-4-layers", {}, where="disk", trains=False),
    **_both("lightning", "lightning", "", {}),
    "own-adamw_late": TruthRun("own_adamw", "tinyllama-4-layers", options={"replaced": True}, late=True),
    "own-adamw_oom": TruthRun("own_adamw", "tinyllama-4-layers", options={"oom": True}),
    **_both("muon", "muon", "", {}),
    **_both("adafactor", "adafactor", "tinyllama-4-layers", {}),
    **_both("diffusion", "diffusion", "", {}),
    "dumped-in-except_late": TruthRun(
        "adapters", "llama-3-layers", _BF16 | _NOT_HELD, {"oom": True, "dump": "except"}, late=True
    ),
    "dumped-in-except_oom": TruthRun(
        "adapters", "mistral-4-layers", _BF16, {"oom": True, "dump": "except", "length": 1024}
    ),
    "caught_late": TruthRun("caught", "llama-3-layers", _BF16 | _NOT_HELD, {"oom": True, "dump": "end"}, late=True),
    "caught_oom": TruthRun("caught", "llama-3-layers", _HALF | _NOT_HELD, {"oom": True, "dump": "end"}),
    **_both(
        "trainer-evaluate",
        "trainer",
        "tinyllama-4-layers",
        _BF16 | {"autocast": True, "batch": 2, "steps": 3, "eval_batches": 2, "optim": "adamw_torch"},
        trainer="hf",
    ),
    **_both("generate-dynamic", "generation", "mistral-4-layers", {}, cache="dynamic", trains=False),
    **_both("generate-static", "generation", "mistral-4-layers", {}, cache="static", trains=False),
    **_both(
        "qwen3-moe",
        "adapters",
        "qwen3-moe",
        _BF16 | _NOT_HELD,
        lora={"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        batch=1,
    ),
    **_both("dora", "adapters", "llama-3-layers", _BF16 | _NOT_HELD, lora={"use_dora": True}, batch=1),
    **_both(
        "lora-on-embeddings",
        "adapters",
        "llama-3-layers",
        _BF16,
        lora={"target_modules": ["embed_tokens", "q_proj", "v_proj"]},
    ),
    **_both("int8", "adapters", "llama-int8", {"quant": "int8"}),
    **_both("convnet", "convnet", "", {}),
    **_both("adversarial", "adversarial", "", {}),
    **_both("closure", "closure", "", {}),
    **_both("rollout", "rollout", "tinyllama-4-layers", _BF16 | _NOT_HELD),
    "interrupted_late": TruthRun("interrupted", "llama-3-layers", _BF16 | _NOT_HELD, {"dump": "finally"}, late=True),
    "interrupted": TruthRun("interrupted", "tinyllama-4-layers", _HALF | _NOT_HELD, {"dump": "finally"}),
    # With memtrace's own labels, which must never make the answer worse.
    "own-labels_generate": TruthRun(
        "generation", "tinyllama-4-layers", options={"recorder": True, "cache": "dynamic", "trains": False}
    ),
    "own-labels_own-adamw": TruthRun("own_adamw", "tinyllama-4-layers", options={"recorder": True, "oom": True}),
    "own-labels_dora": TruthRun(
        "adapters", "llama-3-layers", _BF16 | _NOT_HELD, {"recorder": True, "oom": True, "lora": {"use_dora": True}}
    ),
    "own-labels_adversarial": TruthRun("adversarial", "", options={"recorder": True}),
    "own-labels_caught": TruthRun(
        "caught", "llama-3-layers", _BF16 | _NOT_HELD, {"recorder": True, "oom": True, "dump": "end"}
    ),
}

# Stacks: sharded, split over ranks, compiled, with kernels and loops of other libraries.
STACK_RUNS: dict[str, TruthRun] = {
    **_both("fsdp2", "fsdp2", "tinyllama-4-layers", {}, ranks=2),
    **_both("fsdp2-four", "fsdp2", "tinyllama-4-layers", {}, ranks=4),
    **_both("fsdp2-qlora", "fsdp2", "llama-3-layers", {}, ranks=2, lora=True),
    **_both("fsdp2-offload", "fsdp2", "tinyllama-4-layers", {}, group=True, offload=True),
    **_both("fsdp2-qlora-offload", "fsdp2", "llama-3-layers", {}, ranks=2, lora=True, offload=True),
    **_both("fsdp1", "fsdp1", "tinyllama-4-layers", {}, ranks=2),
    **_both("ddp", "ddp", "tinyllama-4-layers", {}, ranks=2),
    **_both("zero-states", "ddp", "tinyllama-4-layers", {}, ranks=2, zero=True),
    **_both("deepspeed-2", "deepspeed", "tinyllama-4-layers", {}, ranks=2, zero=2),
    **_both("deepspeed-3", "deepspeed", "tinyllama-4-layers", {}, ranks=2, zero=3),
    **_both("deepspeed-3-offload", "deepspeed", "tinyllama-4-layers", {}, ranks=2, zero=3, offload=True),
    **_both("pipeline", "pipeline", "tinyllama-4-layers", {}, ranks=2),
    **_both("pipeline-four", "pipeline", "tinyllama-4-layers", {}, ranks=4),
    **_both("expert-parallel", "expert_parallel", "qwen3-moe", {}, ranks=2),
    **_both("tensor-parallel", "tensor_parallel", "tinyllama-4-layers", {}, ranks=2),
    **_both("compiled", "compiled", "tinyllama-4-layers", {}, compiled=True),
    **_both("compiled-graphs", "compiled", "tinyllama-4-layers", {}, compiled=True, mode="reduce-overhead"),
    **_both("compiled-loss", "compiled", "tinyllama-4-layers", {}, compiled=True, optimizer="sgd", length=2048),
    **_both("sdpa-flash", "kernels", "llama-3-layers", _BF16 | _NOT_HELD, sdpa="FLASH_ATTENTION"),
    **_both("sdpa-cudnn", "kernels", "llama-3-layers", _BF16 | _NOT_HELD, sdpa="CUDNN_ATTENTION"),
    **_both("liger", "kernels", "llama-3-layers", _BF16, liger=True),
    **_both("vision-language", "vision", "", {}),
    **_both("dpo", "preferences", "tinyllama-4-layers", _BF16 | _NOT_HELD, trainer="dpo"),
    **_both("grpo", "preferences", "tinyllama-4-layers", _BF16 | _NOT_HELD, trainer="grpo"),
}
# Other optimizers, models and loops.
MORE_RUNS: dict[str, TruthRun] = {
    **_both("sam", "sam", "", {}),
    **_both("flat", "flat", "", {}),
    **_both("lookahead", "lookahead", "", {}),
    **_both("shampoo", "shampoo", "", {}),
    **_both("half-precision", "half_precision", "", {}),
    **_both("distillation", "distillation", "", {}),
    **_both("averaged-vision", "averaged_vision", "", {}),
    **_both("translation", "translation", "", {}),
    **_both("contrast", "contrast", "", {}),
    **_both("recurrent", "recurrent", "", {}),
    **_both("penalty", "penalty", "", {}),
    **_both("prompts", "prompts", "tinyllama-4-layers", {}),
    **_both("features", "features", "", {}, trains=False),
    **_both("graph", "graph", "", {}),
}
# Models without attention or layers, gradients of gradients, several models at once.
RARE_RUNS: dict[str, TruthRun] = {
    **_both("scan", "scan", "", {}),
    **_both("speech", "speech", "", {}),
    **_both("detection", "detection", "", {}),
    **_both("meta", "meta", "", {}),
    **_both("lbfgs", "lbfgs", "", {}),
    **_both("recommender", "recommender", "", {}),
    **_both("words-only", "words_only", "", {}),
    **_both("self-taught", "self_taught", "", {}),
    **_both("policy", "policy", "", {}),
    **_both("field", "field", "", {}),
    **_both("replay", "replay", "", {}),
    **_both("queue", "queue", "", {}),
    **_both("private", "private", "", {}),
    **_both("functional-style", "functional_style", "", {}),
    **_both("curved", "curved", "", {}),
    **_both("two-losses", "two_losses", "", {}),
    **_both("pieces", "pieces", "", {}),
    **_both("boxes", "boxes", "", {}),
    **_both("molecules", "molecules", "", {}),
}
# Models that grow, that are trained without backward passes, or whose backward passes are programs of their own.
NEW_RUNS: dict[str, TruthRun] = {
    **_both("splats", "splats", "", {}),
    **_both("zeroth", "zeroth", "", {}, trains=False),
    **_both("sparse-codes", "sparse_codes", "", {}),
    **_both("parametrised", "parametrised", "", {}),
    **_both("ode", "ode", "", {}),
    **_both("projected", "projected", "", {}),
}
RUNS |= STACK_RUNS | MORE_RUNS | RARE_RUNS | NEW_RUNS

TINY: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256,
}  # fmt: skip


def small_architecture(arch: str) -> dict[str, Any]:
    """The same family, small enough for a CPU."""
    keys = {k: v for k, v in ARCHITECTURES[arch].items() if k != "head_dim"}
    keys |= {key: TINY[key] for key in TINY if key != "model_type"}
    return (
        keys | {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
        if "num_experts" in keys
        else keys
    )


def shrunk(run: TruthRun) -> TruthRun:
    """The same run small enough for a CPU, to test the script."""
    step = run.step | {"seq_len": 64, "rank": 4}
    step["optim"] = "adamw_torch" if "paged" in step.get("optim", "paged") else step["optim"]
    return replace(run, step=step, options={k: v for k, v in run.options.items() if k != "cap_gib"})
