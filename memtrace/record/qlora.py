"""A QLoRA (or plain LoRA, 8-bit, full fine-tuning) model and its training steps, built from one configuration.

The model is real: a checkpoint folder with random weights of the architecture is written first where none is given,
then loaded with ``from_pretrained`` as a user would, so that a recording holds the true load phase.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from memtrace.errors import MissingDependencyError, NoAnswerError
from memtrace.estimate.options import RunOptions
from memtrace.record import backend as backend_module
from memtrace.record import phases
from memtrace.record.api import record

Mark = Callable[[str], None]

CHUNK_TOKENS = 1024
_TILE_COLUMNS = 32768  # TRL's own constant
_IGNORED = -100
_PHASE_OF = {"zero_grad": phases.BETWEEN, "end": phases.BETWEEN, "eval": phases.EVALUATION}  # the loop's marks


@dataclass(frozen=True, slots=True)
class StepConfig:
    """Everything that decides the memory of a run. Lengths are tokens; ``packed`` rows hold two documents each.

    ``masked`` batches bring their mask, in which the first row of ``padded`` ones is one token shorter; ``clips``: the
    gradients' norm is taken before each step.
    """

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
    masked: bool = False
    padded: bool = False
    clips: bool = False
    seed: int = 0


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

    kind = {
        "adamw_8bit": bnb.optim.AdamW8bit,
        "adamw_bnb": bnb.optim.AdamW32bit,
        "paged_adamw_8bit": bnb.optim.PagedAdamW8bit,
        "paged_adamw_32bit": bnb.optim.PagedAdamW32bit,
    }[cfg.optim]
    return kind(trainable, lr=1e-4)


def vocabulary(model: Any) -> int:
    """Rows of the head."""
    return int(model.config.get_text_config().vocab_size)


def _batch(cfg: StepConfig, vocab: int, device: str, generator: Any) -> Any:
    import torch

    return torch.randint(0, vocab, (cfg.batch, cfg.seq_len), generator=generator).to(device)


def loss_and_output(model: Any, ids: Any, how: str, chunk_tokens: int = CHUNK_TOKENS, **inputs: Any) -> tuple[Any, Any]:
    """(mean loss over the tokens, the model's output with its logits or ``None``) of one micro-batch."""
    if how == "full":
        output = model(input_ids=ids, labels=ids, **inputs)
        return output.loss, output
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    hidden = causal.base_model(input_ids=ids, use_cache=False, **inputs).last_hidden_state
    head = causal.get_output_embeddings()
    if how == "chunked":
        return _chunked(hidden, head, ids, chunk_tokens), None
    return _fused(hidden, head, ids, getattr(causal.config, "final_logit_softcapping", None)), None


def _chunked(hidden: Any, head: Any, ids: Any, chunk_tokens: int) -> Any:
    """The logits of ``chunk_tokens`` tokens at a time, made again in the backward pass."""
    import torch
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint

    def chunk_loss(states: Any, labels: Any) -> Any:
        return functional.cross_entropy(head(states).float(), labels, ignore_index=_IGNORED, reduction="sum")

    labels = functional.pad(ids, (0, 1), value=_IGNORED)[:, 1:].reshape(-1)
    states = hidden.reshape(-1, hidden.shape[-1])
    total = None
    for part, target in zip(torch.split(states, chunk_tokens), torch.split(labels, chunk_tokens), strict=True):
        loss = checkpoint(chunk_loss, part, target, use_reentrant=False)
        total = loss if total is None else total + loss
    return total / (ids.numel() - ids.shape[0])


def _fused(hidden: Any, head: Any, ids: Any, softcap: float | None) -> Any:
    """What TRL's trainer does: scored tokens alone, folded tile by tile into their log-probabilities."""
    try:
        from trl.kernels import ChunkedLogProbFunction
    except ImportError as error:
        raise MissingDependencyError(f"--loss fused needs trl 1.0 or newer ({error})") from None
    states, labels = hidden[:, :-1], ids[:, 1:]
    mask = labels != _IGNORED
    scored = ChunkedLogProbFunction.apply(
        states[mask], head.weight, head.bias, labels[mask], 1.0, _TILE_COLUMNS, softcap, 1.0, ()
    )
    log_probabilities = scored[0].new_zeros(mask.shape).masked_scatter(mask, scored[0])
    return -log_probabilities.sum() / mask.sum().clamp(min=1)


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
    autocast = torch.autocast(torch.device(device).type, torch.bfloat16, enabled=cfg.autocast)
    model.train()
    for _ in range(cfg.steps):
        for _ in range(cfg.accumulate):
            ids = _batch(cfg, vocab, device, generator)
            extra = _extra(cfg, device)
            mark("forward")
            with autocast:
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
        if cfg.clips:
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        mark("zero_grad")
        optimizer.zero_grad(set_to_none=True)
        step()
    if cfg.eval_batches:
        _evaluate(model, cfg, vocab, device, generator, mark, autocast)
    mark("end")


def _evaluate(model: Any, cfg: StepConfig, vocab: int, device: str, generator: Any, mark: Mark, autocast: Any) -> None:
    """Forward passes without gradients that keep their logits, as trainers do to compute metrics."""
    import torch

    mark("eval")
    model.eval()
    logits = []
    with torch.no_grad(), autocast:
        for _ in range(cfg.eval_batches):
            ids = _batch(cfg, vocab, device, generator)
            extra = _extra(cfg, device)
            output = loss_and_output(model, ids, cfg.loss, cfg.chunk_tokens, **extra)[1]
            logits.append(output.logits if output is not None else None)
    backend_module.get().synchronize()
    del logits, output
    model.train()


def _extra(cfg: StepConfig, device: str) -> dict[str, Any]:
    """A mask; positions that begin again in the middle of a row, where it holds two documents."""
    import torch

    found: dict[str, Any] = {}
    if cfg.masked or cfg.padded:
        mask = torch.ones((cfg.batch, cfg.seq_len), dtype=torch.int64)
        mask[0, -1] = not cfg.padded
        found["attention_mask"] = mask.to(device)
    if cfg.packed:
        half = cfg.seq_len // 2
        row = torch.cat([torch.arange(half), torch.arange(cfg.seq_len - half)])
        found["position_ids"] = row.repeat(cfg.batch, 1).to(device)
    return found


def step_config(options: RunOptions, steps: int, eval_batches: int = 0, packed: bool = False) -> StepConfig:
    """The options as the builder of real runs takes them."""
    shared: dict[str, Any] = {
        item.name: getattr(options, item.name) for item in fields(StepConfig) if hasattr(options, item.name)
    }
    of_run: dict[str, Any] = {"seq_len": options.sequence, "optim": options.optimizer, "attn": options.attention}
    return StepConfig(
        **shared, **of_run, steps=steps, eval_batches=eval_batches, packed=packed, accumulate=options.accumulation
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
    recording = record(path, required=True, **options)
    try:
        with recording:
            assert recording.recorder is not None
            log = recording.recorder.log
            recording.count_steps_by_hand()
            log.run |= {"loss": cfg.loss, "chunk_tokens": cfg.chunk_tokens}
            net = net if net is not None else _build(model, cfg, device)
            optimizer = make_optimizer(net, cfg)
            log.enter(phases.BETWEEN)
            run_loop(net, optimizer, cfg, device, lambda name: log.enter(_PHASE_OF.get(name, name)), recording.step)
    except Exception as error:
        # Out of a pass on autograd's thread the refusal can come as a SystemError that says nothing of memory.
        refused = recording.recorder is not None and recording.recorder.ooms.last is not None
        if not refused and not isinstance(error, torch.OutOfMemoryError):
            raise
    if recording.file is None:
        raise NoAnswerError(f"nothing was recorded to {path}")
    return recording.file


def _build(model: str, cfg: StepConfig, device: str) -> Any:
    import torch

    base = load_base(model, cfg, device)
    torch.manual_seed(cfg.seed + 1)
    return add_adapters(base, cfg)
