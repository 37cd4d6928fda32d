"""Configurations of axolotl, LLaMA-Factory and torchtune (YAML or JSON) as options of an estimate.

A table says for each trainer which key sets what; ``_UNCOVERED`` has keys that change memory in a way that is not
predicted, which are told, and so is every other key that has a value and is not known to be harmless. Sources: the
trainers' example configurations of 2025; their defaults were not checked against their code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from memtrace.errors import MissingDependencyError, SnapshotError, UsageError
from memtrace.estimate.options import ALL_LINEAR, OPTIMIZER_NAMES
from memtrace.estimate.presets import letters, model_names
from memtrace.frozen import dataclass
from memtrace.snapshot.bounds import refuse_expansion
from memtrace.snapshot.container import read_at_most

_ATTENTION = {"fa2": "flash", "flash_attention_2": "flash", "sdpa": "sdpa", "eager": "eager", "disabled": "eager"}
_MODULES = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # torchtune's names
_NO_SHAPE = re.compile(r"meta|instruct|chat|hf|it|base|[248]+k|q?lora|v\d.*|")  # words of a name that tell no size
_ALSO = {"llama38b": "llama318b", "llama370b": "llama3170b", "tinyllama": "tinyllama11b"}  # of the same shape
_HARMLESS = re.compile(
    r"(wandb|mlflow|comet|swanlab|ray|hub|dataset|test_dataset|val_set|eval|save|logging|log|lr|adam|warmup|tokenizer"
    r"|early_stopping|special_tokens|output|preprocessing|dataloader|metric|profiler|checkpointer|cosine|push|report)_.*"
    r"|.*(learning_rate|weight_decay|_dir|_path|epochs|max_steps|lora_alpha|_workers)"
    r"|datasets?|tokenizer|checkpointer|seed|strict|debug|shuffle|template|do_train|stage|finetuning_type|adapter|tf32"
    r"|group_by_length|metric_logger|lr_scheduler|profiler|device|epochs|max_samples|overwrite_.*|plot_loss|ddp_timeout"
    r"|train_on_inputs|logging_steps|saves_per_epoch|evals_per_epoch|val_size|model_type|trust_remote_code|chat_template"
    r"|resume_from_checkpoint|local_rank|num_epochs|special_tokens|max_steps_per_epoch|low_cpu_ram|lora_fan_in_fan_out"
    r"|quantization_method|load_in_[48]bit|lora_on_cpu|log_.*|per_device_eval_batch_size|double_quantization|peft_use_rslora"
)
_STORED = re.compile(r"(?<![a-z])(?:gptq|awq|aqlm|exl2|gguf|eetq|hqq)(?![a-z])", re.IGNORECASE)  # in a model's name
_SPLIT = re.compile(r"fsdp|deepspeed|dp_shard|custom_sharded|(tensor|context|sequence|pipeline)_parallel")


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """What a configuration says: ``model`` as ``--model`` takes it, values by field of RunOptions, and notes on what it
    does not say or what is not predicted."""

    trainer: str
    model: str | None
    values: Mapping[str, Any]
    notes: tuple[str, ...]


def read_config_file(path: Path) -> TrainerConfig:
    """Raises SnapshotError for a file that can't be read, UsageError for one of no trainer or of a run that is not a
    LoRA or QLoRA fine-tuning, MissingDependencyError for YAML without PyYAML."""
    keys = _keys(path)
    if isinstance(keys.get("model"), dict):
        trainer, read = "torchtune", _torchtune
    elif "model_name_or_path" in keys:
        trainer, read = "LLaMA-Factory", _llama_factory
    elif "base_model" in keys:
        trainer, read = "axolotl", _axolotl
    else:
        raise UsageError(f"{path}: not a configuration of axolotl, LLaMA-Factory or torchtune")
    asked = _Reading(path, keys)
    read(asked)
    stored = _STORED.search(asked.model or "")
    asked.refuse_unless(
        stored is None and not asked.get("gptq"), f"weights stored as {stored[0] if stored else 'gptq'}"
    )
    asked.values["embeddings_require_grad"] = asked.values["checkpointing"]
    if trainer == "torchtune":
        asked.notes.append("torchtune has model code of its own; what is predicted is that of Transformers")
    asked.notes += asked.left()
    model = asked.model
    if model is not None and model not in model_names() and not Path(model).exists():
        preset = _preset_of(model)
        told = f"to have the shape of the preset {preset}" if preset else "for unknown: --model says which shape it has"
        asked.notes.append(f"{model} is taken {told}")
        model = preset
    return TrainerConfig(trainer, model, asked.values, tuple(asked.notes))


def _keys(path: Path) -> dict[str, Any]:
    content = read_at_most(path, 1 << 20, "configuration")
    try:
        import yaml  # JSON is YAML, too
    except ImportError:
        raise MissingDependencyError.of_extra(f"{path}: YAML files need PyYAML", "config") from None
    try:
        keys = yaml.safe_load(content)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SnapshotError(f"{path}: {str(error).splitlines()[0]}") from None
    if not isinstance(keys, dict):
        raise UsageError(f"{path}: not a configuration of axolotl, LLaMA-Factory or torchtune")
    refuse_expansion(keys, str(path))  # an alias of aliases of aliases
    return {str(key): value for key, value in keys.items()}


class _Reading:
    """A configuration while it is read: which keys were looked at, what they gave."""

    def __init__(self, path: Path, keys: dict[str, Any]) -> None:
        self.path, self.keys = path, keys
        self.values: dict[str, Any] = {}
        self.notes: list[str] = []
        self.model: str | None = None
        self._seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """A value, dots lead into parts; ``default`` where it is missing or null."""
        self._seen |= {key, key.partition(".")[0]}
        found: Any = self.keys
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return default if found is None else found

    def take(self, table: Mapping[str, tuple[str, Any, Callable[[Any], Any]]]) -> None:
        """Fields by a table: field → (key, the trainer's default, what becomes of the value)."""
        for field, (key, default, convert) in table.items():
            value = self.get(key, default)
            try:
                if value is not None:
                    self.values[field] = convert(value)
            except (TypeError, ValueError, KeyError, OverflowError):
                raise UsageError(f"{self.path}: {key}: {str(value)[:60]!r} is not covered by the estimate") from None

    def left(self) -> list[str]:
        """Keys with a value that were not read and are not known to be harmless."""
        model = self.keys.get("model")  # torchtune's
        parts = {f"model.{key}": value for key, value in model.items()} if isinstance(model, Mapping) else {}
        unread = [
            key
            for key, value in (self.keys | parts).items()
            if key not in self._seen and value not in (None, False, "", [])
        ]
        told = [key for key in unread if not _HARMLESS.fullmatch(key)]
        notes = [f"not read, and may change memory: {', '.join(told)}"[:600]] if told else []
        if split := [key for key in told if _SPLIT.match(key)]:
            notes.append(f"{', '.join(split)}: what is predicted is one GPU that holds all of the model"[:600])
        return notes

    def refuse_unless(self, holds: bool, what: str) -> None:
        """Raise UsageError for another kind of training."""
        if not holds:
            raise UsageError(f"{self.path}: {what}; the estimate covers LoRA and QLoRA fine-tuning")


def _targets(value: Any) -> tuple[str, ...]:
    names = [part.strip() for part in value.split(",")] if isinstance(value, str) else [str(name) for name in value]
    return (ALL_LINEAR,) if names in (["all"], [ALL_LINEAR]) else tuple(_MODULES.get(name, name) for name in names)


def _optimizer(value: Any) -> str:
    return OPTIMIZER_NAMES[str(value).rpartition(".")[2]]


def _axolotl(reading: _Reading) -> None:
    get = reading.get
    reading.refuse_unless(get("adapter") in ("lora", "qlora"), f"adapter: {get('adapter')}")
    reading.refuse_unless(not get("rl"), f"rl: {get('rl')}")
    reading.refuse_unless(not get("lora_modules_to_save"), "lora_modules_to_save: modules trained whole")
    reading.model = str(get("base_model"))
    reading.take({
        "sequence": ("sequence_len", 512, int), "batch": ("micro_batch_size", 1, int),
        "accumulation": ("gradient_accumulation_steps", 1, int), "rank": ("lora_r", 8, int),
        "dropout": ("lora_dropout", 0.0, float), "optimizer": ("optimizer", "adamw_torch", _optimizer),
        "targets": ("lora_target_modules", "all", _targets),
        "reentrant": ("gradient_checkpointing_kwargs.use_reentrant", True, bool),
        "clips": ("max_grad_norm", 1.0, bool),
    })  # fmt: skip
    if get("lora_target_linear"):
        reading.values["targets"] = (ALL_LINEAR,)
    reading.values["checkpointing"] = bool(get("gradient_checkpointing", False))
    if get("gradient_checkpointing") == "offload":
        reading.notes.append("gradient_checkpointing: offload keeps layer inputs on the host, which is not predicted")
    kind = get("attn_implementation") or ("flash_attention_2" if get("flash_attention") else None)
    kind = kind or ("eager" if get("eager_attention") else "sdpa")
    get("sdp_attention")
    reading.values |= {
        "attention": _ATTENTION.get(str(kind), "sdpa"),
        "quant": "nf4-dq" if get("load_in_4bit") else "int8" if get("load_in_8bit") else "none",
        "autocast": bool(get("bf16") or get("fp16")),
        "prepare_kbit": bool(get("load_in_4bit") or get("load_in_8bit")),
    }
    if get("liger_fused_linear_cross_entropy") or get("cut_cross_entropy"):
        reading.values["loss"] = "chunked"
        reading.notes.append("a loss in tiles is taken as --loss chunked")
    if get("sample_packing"):
        reading.notes.append("sample_packing: every row is taken as one sequence of sequence_len tokens")
    get("pad_to_sequence_len")


def _llama_factory(reading: _Reading) -> None:
    get = reading.get
    kind, stage = get("finetuning_type", "lora"), get("stage", "sft")
    reading.refuse_unless(kind == "lora" and stage in ("sft", "pt"), f"finetuning_type: {kind}, stage: {stage}")
    reading.refuse_unless(bool(get("do_train")), "do_train is not set, nothing is trained")
    reading.refuse_unless(not get("additional_target"), "additional_target: modules trained whole")
    reading.model = str(get("model_name_or_path"))
    bits, double = get("quantization_bit"), get("double_quantization", True)
    reading.take({
        "sequence": ("cutoff_len", 2048, int), "batch": ("per_device_train_batch_size", 8, int),
        "accumulation": ("gradient_accumulation_steps", 1, int), "rank": ("lora_rank", 8, int),
        "dropout": ("lora_dropout", 0.0, float), "optimizer": ("optim", "adamw_torch", _optimizer),
        "targets": ("lora_target", "all", _targets), "reentrant": ("use_reentrant_gc", True, bool),
        "quant": ("quantization_bit", 0, lambda n: {0: "none", 8: "int8", 4: "nf4-dq" if double else "nf4"}[int(n)]),
        "attention": ("flash_attn", "sdpa", lambda name: "sdpa" if name == "auto" else _ATTENTION[name]),
        "clips": ("max_grad_norm", 1.0, bool),
    })  # fmt: skip
    reading.refuse_unless(get("quantization_method", "bitsandbytes") in ("bitsandbytes", "bnb") or not bits,
                          f"quantization_method: {get('quantization_method')}")  # fmt: skip
    reading.values["checkpointing"] = not get("disable_gradient_checkpointing", False)
    pure = bool(get("pure_bf16"))
    reading.values |= {
        "autocast": bool(get("bf16") or get("fp16")) and not pure,
        "adapter_dtype": "bf16" if pure else "fp32",
        "prepare_kbit": False,  # its own preparation leaves the hidden states in 16 bits
    }
    if get("enable_liger_kernel"):
        reading.values["loss"] = "chunked"
        reading.notes.append("a loss in tiles is taken as --loss chunked")


def _torchtune(reading: _Reading) -> None:
    get = reading.get
    builder = str(get("model._component_", "")).rpartition(".")[2]
    reading.refuse_unless("lora_" in builder, f"model: {builder or 'no component'}")
    reading.model = builder
    modules = get("model.lora_attn_modules", [])
    reading.refuse_unless(isinstance(modules, list), "model.lora_attn_modules is no list")
    if get("model.apply_lora_to_mlp"):
        modules = [*modules, "gate_proj", "up_proj", "down_proj"]
    if get("model.apply_lora_to_output"):
        reading.notes.append("apply_lora_to_output is not predicted")
    chunked = "Chunked" in str(get("loss._component_", "")) or "LinearCrossEntropy" in str(get("loss._component_", ""))
    reading.take({
        "sequence": ("tokenizer.max_seq_len", None, int), "batch": ("batch_size", 1, int),
        "accumulation": ("gradient_accumulation_steps", 1, int), "rank": ("model.lora_rank", 8, int),
        "dropout": ("model.lora_dropout", 0.0, float),
        "optimizer": ("optimizer._component_", "torch.optim.AdamW", _optimizer), "clips": ("clip_grad_norm", 0, bool),
    })  # fmt: skip
    if get("optimizer.fused") and reading.values["optimizer"] == "adamw_torch":
        reading.values["optimizer"] = "adamw_torch_fused"
    reading.values["checkpointing"] = bool(get("enable_activation_checkpointing"))
    if get("enable_activation_offloading"):
        reading.notes.append("enable_activation_offloading is not predicted")
    half = get("dtype", "bf16") == "bf16"
    reading.values |= {
        "targets": _targets(modules),
        "loss": "chunked" if chunked else "full",
        "quant": "nf4-dq" if builder.startswith("qlora_") or get("model.quantize_base") else "none",
        "prepare_kbit": not half,
        "adapter_dtype": "bf16" if half else "fp32",
    }
    if get("dataset.packed"):
        reading.notes.append("dataset.packed: every row is taken as one sequence of max_seq_len tokens")
    if get("compile"):
        reading.notes.append("compile: True is not predicted")


def _preset_of(name: str) -> str | None:
    """``qlora_llama3_1_8b``, ``meta-llama/Llama-3.1-8B-Instruct`` → ``llama3.1-8b``; None where no preset is meant."""
    words = re.split(r"[-_]", name.rpartition("/")[2].lower())
    plain = letters("".join(word for word in words if not _NO_SHAPE.fullmatch(word)))
    plain = _ALSO.get(plain, plain)
    return next((preset for preset in model_names() if letters(preset) == plain), None)
