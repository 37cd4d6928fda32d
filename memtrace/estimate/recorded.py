"""The setup that a recording carries in its extra key ``memtrace``, and the estimate beside that recording."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from memtrace.errors import MemtraceError, UsageError
from memtrace.estimate.against import Against, compare
from memtrace.estimate.estimate import estimate
from memtrace.estimate.options import ALL_LINEAR, OPTIMIZER_NAMES, RunOptions
from memtrace.estimate.presets import GpuPreset, gpu_names, gpu_preset
from memtrace.estimate.shapes import ModelShape, shape_from_config
from memtrace.frozen import dataclass

if TYPE_CHECKING:
    from memtrace.analysis import Analysis
    from memtrace.answers.report import Report

_RUN_KEYS = {  # of the run that memtrace built, as recorded → option
    "seq_len": "sequence",  # these five by the recorder, the others by who built the run
    "batch": "batch",
    "accumulate": "accumulation",
    "attn": "attention",
    "optim": "optimizer",
} | {
    name: name
    for name in (
        "keep_logits", "loss", "autocast", "prepare_kbit", "adapter_dtype", "chunk_tokens", "reentrant",
        "checkpointing", "dropout", "rank", "quant",
    )
}  # fmt: skip

# What a model that the estimate doesn't cover raises, or a configuration that is not as memtrace writes it.
NOT_COVERED = (MemtraceError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError)


@dataclass(frozen=True, slots=True)
class Setup:
    """Model and options of a recording; ``notes`` say what had to be inferred."""

    shape: ModelShape
    options: RunOptions
    notes: tuple[str, ...]


def against_own_estimate(analysis: Analysis, at_peak: Report) -> tuple[Against, Setup] | None:
    """The estimate of the setup that the recording carries, against the recording. None where it carries none.

    Also None for a model that the estimate doesn't cover, and for a run that was itself only predicted.
    """
    snapshot = analysis.timeline.snapshot
    if snapshot.memtrace.get("predicted") and not snapshot.config.get("dry_run"):
        return None
    try:
        setup = setup_of(analysis)
        if setup is None:
            return None
        found = estimate(setup.shape, setup.options, recorded_gpu(snapshot.memtrace))
    except NOT_COVERED:
        return None
    return compare(found, at_peak), setup


def setup_of(analysis: Analysis) -> Setup | None:
    """The setup in the recording's configuration. Raises UsageError for a model or option that isn't covered."""
    config = analysis.timeline.snapshot.config
    if isinstance(config.get("options"), Mapping):
        return _of_prediction(config)
    models = [entry for entry in config.get("models") or [] if isinstance(entry, Mapping)]
    adapted = [entry for entry in models if entry.get("peft") and isinstance(entry.get("config"), Mapping)]
    if not adapted:
        return None
    return _of_objects(analysis, adapted[0], config)


def _of_prediction(config: Mapping[str, Any]) -> Setup:
    """Written by ``memtrace estimate --trace`` and ``memtrace dryrun --trace``."""
    known = {entry.name for entry in fields(RunOptions)}
    options = {key: value for key, value in config["options"].items() if key in known}
    options["targets"] = tuple(options.get("targets") or (ALL_LINEAR,))
    model = _mapping(config.get("model"))
    if "family" in model:  # an estimate's: the numbers themselves
        shape = ModelShape(**{entry.name: model[entry.name] for entry in fields(ModelShape) if entry.name in model})
    else:
        shape = shape_from_config(model, "recorded")
    return Setup(shape, RunOptions(**options), ())


def _of_objects(analysis: Analysis, model: Mapping[str, Any], config: Mapping[str, Any]) -> Setup | None:
    """Written by the recorder: what the model, adapter and optimizer objects told, and the run if memtrace built it."""
    shape, values = told_by_objects(model, config)
    if "attention" not in values:
        stacks = analysis.timeline.snapshot.stacks
        eager = any(frame.name == "eager_attention_forward" for frame in stacks.frames)
        values["attention"] = "eager" if eager else "sdpa"
    run = _mapping(config.get("run"))
    notes: list[str] = []
    values |= _widths(analysis, shape, int(values["rank"]))
    values["autocast"] = analysis.timeline.snapshot.uses_autocast
    values |= {option: run[key] for key, option in _RUN_KEYS.items() if key in run}
    if values.get("loss") == "own":
        raise UsageError("the program made its loss outside the model: describe it with --model … --loss")
    if "sequence" not in values:
        tokens = max(recorded_tokens(analysis, shape, 4 if values["prepare_kbit"] else 2), default=None)
        if tokens is None:
            return None
        values["sequence"] = tokens
        notes.append(f"batch and length aren't recorded: {tokens:,} tokens by the embedding's output, as one sequence")
    return Setup(shape, RunOptions(**values), tuple(notes))


def told_by_objects(model: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[ModelShape, dict[str, Any]]:
    """Shape and options that a model with adapters (as the recorder describes it) and the optimizers tell. Raises
    UsageError for a model that isn't covered."""
    settings = _mapping(model["config"])
    shape = shape_from_config(settings, str(settings.get("_name_or_path") or "recorded"))
    adapter = _mapping(next(iter(model["peft"].values())))
    if adapter.get("use_dora"):
        raise UsageError("DoRA, which needs more than plain LoRA, is not covered")
    quantization = _mapping(settings.get("quantization_config"))
    values: dict[str, Any] = {
        "rank": adapter.get("r", 16),
        "dropout": adapter.get("lora_dropout", 0.0),
        "targets": _targets(adapter.get("target_modules"), shape),
        "checkpointing": bool(model.get("gradient_checkpointing")),
        "quant": _quant(quantization),
        "embeddings_require_grad": bool(model.get("gradient_checkpointing")),
    }
    attention = settings.get("_attn_implementation") or settings.get("attn_implementation")
    if attention in ("sdpa", "eager"):
        values["attention"] = attention
    for optimizer in config.get("optimizers") or []:
        name = OPTIMIZER_NAMES.get(str(_mapping(optimizer).get("class")))
        if name is not None:
            fused = bool(_mapping(_mapping(optimizer).get("defaults")).get("fused"))
            values["optimizer"] = "adamw_torch_fused" if name == "adamw_torch" and fused else name
    return shape, values


def _targets(recorded: Any, shape: ModelShape) -> tuple[str, ...]:
    if isinstance(recorded, str):
        return (recorded,)
    names = tuple(str(name).rsplit(".", 1)[-1] for name in recorded or (ALL_LINEAR,))
    every = {name.rsplit(".", 1)[-1] for name, *_ in shape.linears}
    return (ALL_LINEAR,) if set(names) == every else names


def _quant(config: Mapping[str, Any]) -> str:
    if config.get("load_in_8bit"):
        return "int8"
    if config.get("load_in_4bit"):
        return "nf4-dq" if config.get("bnb_4bit_use_double_quant") else "nf4"
    return "none"


def _widths(analysis: Analysis, shape: ModelShape, rank: int) -> dict[str, Any]:
    """Precision of the embedding and of the adapters, by the labels that the recorder wrote."""
    named = [(str(entry.get("name", "")), entry.get("bytes")) for entry in analysis.timeline.snapshot.labels]
    embedding = {size for name, size in named if name.endswith("embed_tokens.weight")}
    queries = {size for name, size in named if ".q_proj.lora_A." in name and name.endswith(".weight")}
    return {
        "prepare_kbit": 4 * shape.vocabulary * shape.hidden in embedding,
        "adapter_dtype": "bf16" if 2 * rank * shape.hidden in queries else "fp32",
    }


def recorded_tokens(analysis: Analysis, shape: ModelShape, width: int) -> list[int]:
    """Tokens of every micro-batch in order, by the output of the embedding look-up, of ``width`` bytes an element."""
    timeline = analysis.timeline
    table = timeline.allocations
    row_bytes = shape.hidden * width
    found = []
    candidates = np.flatnonzero((table.requested_bytes % row_bytes == 0) & (table.requested_bytes > 0))
    for row in candidates.tolist():
        frames = timeline.snapshot.stacks.stack(int(table.stack[row]))
        if any(f.name == "from_pretrained" for f in frames):
            continue  # the table itself
        if any(f.name == "embedding" and f.filename.endswith("nn/functional.py") for f in frames[:3]):
            found.append((int(table.alloc_event[row]), int(table.requested_bytes[row]) // row_bytes))
    return [tokens for _, tokens in sorted(found)]


def recorded_gpu(extra: Mapping[str, Any]) -> GpuPreset | None:
    """The preset of the recording's GPU; else kernels of the first preset of its generation, with its own memory."""
    name = str(extra.get("gpu") or "").lower().replace(" ", "").replace("-", "")
    for known in sorted(gpu_names(), key=len, reverse=True):
        if known.split("-")[0] in name:
            preset = gpu_preset(known)
            total = extra.get("device_total_bytes")
            return replace(preset, total_bytes=int(total)) if isinstance(total, int) else preset
    return None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
