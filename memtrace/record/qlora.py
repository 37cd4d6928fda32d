"""A QLoRA (or plain LoRA, 8-bit, full fine-tuning) model and its training steps, built from one configuration.

The model is real: a checkpoint folder with random weights of the architecture is written first where none is given,
then loaded with ``from_pretrained`` as a user would, so that a recording holds the true load phase.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memtrace.errors import NoAnswerError, UsageError
from memtrace.estimate.options import RunOptions
from memtrace.record import backend as backend_module
from memtrace.record import phases
from memtrace.record.api import record
from memtrace.record.losses import CHUNK_TOKENS, loss_and_output

Mark = Callable[[str], None]

QUANTS = ("nf4-dq", "nf4", "int8", "none")
_PHASE_OF = {"zero_grad": phases.BETWEEN, "end": phases.BETWEEN, "eval": phases.EVALUATION}  # the loop's marks


@dataclass(frozen=True, slots=True)
class StepConfig:
    """Everything that decides the memory of a run. Lengths are tokens; ``packed`` rows hold two documents each."""

    seq_len: int = 1024
    batch: int = 1
    steps: int = 2
    accumulate: int = 1
    eval_batches: int = 0
    quant: str = "nf4-dq"
    lora: bool = True
    rank: int = 16
    targets: tuple[str, ...] = ("all-linear",)
    dropout: float = 0.05
    adapter_dtype: str = "fp32"
    optim: str = "paged_adamw_8bit"
    attn: str = "sdpa"
    checkpointing: bool = True
    reentrant: bool = False
    prepare_kbit: bool = True
    autocast: bool = False
    keep_logits: bool = False
    loss: str = "full"
    chunk_tokens: int = CHUNK_TOKENS
    packed: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.quant not in QUANTS:
            raise UsageError(f"unknown quantisation {self.quant!r}; known: {', '.join(QUANTS)}")


def load_base(folder: Path | str, cfg: StepConfig, device: str) -> Any:
    """``from_pretrained`` in the configuration's quantisation."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    attention = "flash_attention_2" if cfg.attn == "flash" else cfg.attn
    options: dict[str, Any] = {"attn_implementation": attention, "device_map": {"": device}, "dtype": torch.bfloat16}
    if cfg.quant.startswith("nf4"):
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=cfg.quant == "nf4-dq",
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    elif cfg.quant == "int8":
        options["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def add_adapters(model: Any, cfg: StepConfig) -> Any:
    """Prepare the base for training, switch checkpointing on, and wrap it with LoRA adapters where asked."""
    import torch
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    how = {"use_reentrant": cfg.reentrant}
    if cfg.prepare_kbit and cfg.lora:
        model = prepare_model_for_kbit_training(
            model, use_gradient_checkpointing=cfg.checkpointing, gradient_checkpointing_kwargs=how
        )
    elif cfg.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
        if cfg.lora:
            model.enable_input_require_grads()
    model.config.use_cache = False
    if not cfg.lora:
        return model
    targets: Any = cfg.targets[0] if cfg.targets == ("all-linear",) else list(cfg.targets)
    lora = LoraConfig(
        r=cfg.rank, lora_alpha=2 * cfg.rank, target_modules=targets, lora_dropout=cfg.dropout, task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, lora, autocast_adapter_dtype=cfg.adapter_dtype == "fp32")
    if cfg.adapter_dtype == "bf16":
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
    return model


def make_optimizer(model: Any, cfg: StepConfig) -> Any:
    """The optimizer under its Transformers name (``adamw_torch``, ``paged_adamw_8bit``, …)."""
    import torch

    trainable = [p for p in model.parameters() if p.requires_grad]
    if cfg.optim in ("adamw_torch", "adamw_torch_fused"):
        return torch.optim.AdamW(trainable, lr=1e-4, fused=cfg.optim.endswith("fused") or None)
    if cfg.optim == "sgd":
        return torch.optim.SGD(trainable, lr=1e-4)
    import bitsandbytes as bnb

    known = {
        "adamw_8bit": bnb.optim.AdamW8bit,
        "adamw_bnb": bnb.optim.AdamW32bit,
        "paged_adamw_8bit": bnb.optim.PagedAdamW8bit,
        "paged_adamw_32bit": bnb.optim.PagedAdamW32bit,
    }
    if cfg.optim not in known:
        names = ", ".join(["adamw_torch", "adamw_torch_fused", "sgd", *known])
        raise UsageError(f"unknown optimizer {cfg.optim!r}; known: {names}")
    return known[cfg.optim](trainable, lr=1e-4)


def vocabulary(model: Any) -> int:
    """Rows of the head."""
    return int(model.config.get_text_config().vocab_size)


def _batch(cfg: StepConfig, vocab: int, device: str, generator: Any) -> Any:
    import torch

    return torch.randint(0, vocab, (cfg.batch, cfg.seq_len), generator=generator).to(device)


def run_loop(
    model: Any,
    optimizer: Any,
    cfg: StepConfig,
    device: str,
    mark: Mark,
    step: Callable[[], None] = lambda: None,
    reference: Any = None,
) -> None:
    """A hand-written training loop: forward, backward, optimizer, zero_grad; then evaluation where asked.

    ``reference`` is a frozen second model whose loss on every batch enters the loss.
    """
    import torch

    generator = torch.Generator().manual_seed(cfg.seed)
    vocab = vocabulary(model)
    model.train()
    for _ in range(cfg.steps):
        for _ in range(cfg.accumulate):
            ids = _batch(cfg, vocab, device, generator)
            extra = _positions(cfg, device)
            mark("forward")
            with _autocast(cfg, device):
                loss, out = loss_and_output(model, ids, cfg.loss, cfg.chunk_tokens, **extra)
                if reference is not None:
                    with torch.no_grad():
                        baseline = reference(input_ids=ids, labels=ids, **extra).loss
                    loss = loss - baseline
                loss = loss / cfg.accumulate
            kept = out if cfg.keep_logits else None
            del out
            mark("backward")
            loss.backward()
            del loss, kept
        mark("optimizer")
        optimizer.step()
        mark("zero_grad")
        optimizer.zero_grad(set_to_none=True)
        step()
    if cfg.eval_batches:
        _evaluate(model, cfg, vocab, device, generator, mark)
    mark("end")


def _evaluate(model: Any, cfg: StepConfig, vocab: int, device: str, generator: Any, mark: Mark) -> None:
    """Forward passes without gradients that keep their logits, as trainers do to compute metrics."""
    import torch

    mark("eval")
    model.eval()
    logits = []
    with torch.no_grad(), _autocast(cfg, device):
        for _ in range(cfg.eval_batches):
            ids = _batch(cfg, vocab, device, generator)
            logits.append(model(input_ids=ids, labels=ids, **_positions(cfg, device)).logits)
    backend_module.get().synchronize()
    del logits
    model.train()


def _positions(cfg: StepConfig, device: str) -> dict[str, Any]:
    """Two documents a row: positions begin again in the middle."""
    import torch

    if not cfg.packed:
        return {}
    half = cfg.seq_len // 2
    row = torch.cat([torch.arange(half), torch.arange(cfg.seq_len - half)])
    return {"position_ids": row.repeat(cfg.batch, 1).to(device)}


def _autocast(cfg: StepConfig, device: str) -> Any:
    import torch

    if not cfg.autocast:
        return contextlib.nullcontext()
    return torch.autocast(device_type=torch.device(device).type, dtype=torch.bfloat16)


def step_config(options: RunOptions, steps: int, eval_batches: int = 0, packed: bool = False) -> StepConfig:
    """The options as the builder of real runs takes them."""
    return StepConfig(
        packed=packed,
        seq_len=options.sequence,
        batch=options.batch,
        steps=steps,
        accumulate=options.accumulation,
        eval_batches=eval_batches,
        quant=options.quant,
        rank=options.rank,
        targets=options.targets,
        dropout=options.dropout,
        adapter_dtype=options.adapter_dtype,
        optim=options.optimizer,
        attn=options.attention,
        checkpointing=options.checkpointing,
        reentrant=options.reentrant,
        prepare_kbit=options.prepare_kbit,
        autocast=options.autocast,
        keep_logits=options.keep_logits,
        loss=options.loss,
        chunk_tokens=options.chunk_tokens,
    )


def record_run(
    model: str, cfg: StepConfig, path: Path, late: bool = False, cap_bytes: int | None = None, **options: Any
) -> Path:
    """Load ``model`` (a folder or hub id), train it, and write the snapshot; returns the file.

    ``late`` begins to record when the model is loaded, ``cap_bytes`` limits reserved memory as a smaller card would;
    ``options`` are those of :func:`memtrace.record`. An out-of-memory error ends the run, not memtrace: its state is
    what the file then holds. Raises NoAnswerError where no file could be written.
    """
    import torch

    torch.manual_seed(cfg.seed)
    backend = backend_module.get()
    device = "cpu" if backend.device_type == "cpu" else f"cuda:{backend.current_device()}"
    if cap_bytes is not None:
        backend.limit(cap_bytes)
    net = _build(model, cfg, device) if late else None
    with contextlib.suppress(torch.OutOfMemoryError), record(path, required=True, **options) as recording:
        assert recording.recorder is not None
        log = recording.recorder.log
        recording.count_steps_by_hand()
        net = net if net is not None else _build(model, cfg, device)
        optimizer = make_optimizer(net, cfg)
        log.enter(phases.BETWEEN)
        run_loop(net, optimizer, cfg, device, lambda name: log.enter(_PHASE_OF.get(name, name)), recording.step)
    if recording.file is None:
        raise NoAnswerError(f"nothing was recorded to {path}")
    return recording.file


def _build(model: str, cfg: StepConfig, device: str) -> Any:
    import torch

    base = load_base(model, cfg, device)
    torch.manual_seed(cfg.seed + 1)
    return add_adapters(base, cfg)
