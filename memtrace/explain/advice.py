"""Changes to recommend: how each is put, with what it would save and what that rests on before it is tried.

Names of arguments were checked against transformers 5.24, PEFT 0.21, TRL 1.16 and bitsandbytes 0.50.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memtrace.explain.answer import Advice, Basis
from memtrace.explain.case import Case
from memtrace.explain.proof import Proposal
from memtrace.explain.setting import RunSetting
from memtrace.snapshot.model import Bool
from memtrace.units import format_bytes as size

LARGE_BLOCKS = "max_split_size_mb:128"
_TORCHAO = (
    'torchao.optim.AdamW8bit (Trainer: optim="adamw_torch_8bit"; tensors under 4,096 elements stay in 32 bits): '
    "bitsandbytes' optimizers refuse the DTensors of FSDP2 and tensor parallelism"
)
_FOUR_BITS = (
    "from_pretrained(…, quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', "
    "bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16"
)

Change = Callable[[Case], Proposal]
"""A change for a case, worked out where a finding comes of it."""

# One change, as the program that the user writes arguments for spells it.
_SPELLINGS: dict[str, dict[str, str]] = {
    "checkpointing": {
        "plain": "model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False}) and "
        "model.enable_input_require_grads()",
        "transformers": "gradient_checkpointing=True in TrainingArguments",
        "trl": "gradient_checkpointing=True in the trainer's config (TRL's default)",
        "axolotl": "gradient_checkpointing: true",
        "llamafactory": "disable_gradient_checkpointing: false",
    },
    "bf16": {
        "plain": "torch.autocast('cuda', torch.bfloat16) around the forward pass",
        "transformers": "bf16=True in TrainingArguments",
        "trl": "bf16=True in the trainer's config",
        "axolotl": "bf16: true",
        "llamafactory": "bf16: true",
        "lightning": "Trainer(precision='bf16-mixed')",
        "deepspeed": '"bf16": {"enabled": true} in the DeepSpeed config',
        "accelerate": "Accelerator(mixed_precision='bf16')",
    },
    "loss_in_tiles": {
        "plain": "compute the loss in tiles: LigerFusedLinearCrossEntropyLoss of the package liger-kernel",
        "transformers": "compute the loss in tiles: use_liger_kernel=True in TrainingArguments (package liger-kernel)",
        "trl": "compute the loss in tiles: SFTTrainer of TRL 1.16 does, or use_liger_kernel=True (liger-kernel)",
        "axolotl": "compute the loss in tiles: LigerPlugin with liger_fused_linear_cross_entropy: true",
        "llamafactory": "compute the loss in tiles: enable_liger_kernel: true",
    },
    "four_bits": {
        "plain": f"{_FOUR_BITS}))",
        "sharded": f"{_FOUR_BITS}, bnb_4bit_quant_storage=torch.bfloat16)): sharding takes no weights stored as bytes",
    },
    "optim_8bit": {
        "plain": "bitsandbytes.optim.AdamW8bit (tensors under 4,096 elements stay in 32 bits)",
        "transformers": 'optim="adamw_8bit" (bitsandbytes; tensors under 4,096 elements stay in 32 bits)',
        "axolotl": "optimizer: adamw_bnb_8bit (tensors under 4,096 elements stay in 32 bits)",
        "dtensor": _TORCHAO,
    },
    "optim_paged": {
        "plain": "bitsandbytes.optim.PagedAdamW8bit: states in pageable memory outside the allocator",
        "transformers": 'optim="paged_adamw_8bit": states in pageable memory outside the allocator',
        "axolotl": "optimizer: paged_adamw_8bit: states in pageable memory outside the allocator",
        "deepspeed": '"offload_optimizer": {"device": "cpu"} in "zero_optimization" of the DeepSpeed config: states '
        "on the host",
        "dtensor": _TORCHAO,
    },
    "eval_outputs": {
        "plain": "keep only what the metrics need of each batch's outputs, moved to the CPU",
        "transformers": "prediction_loss_only=True in TrainingArguments, eval_accumulation_steps=1, or a "
        "preprocess_logits_for_metrics that keeps only what the metrics need",
    },
    "eval_batch": {
        "plain": "half the batch in the evaluation, under torch.no_grad()",
        "transformers": "half the per_device_eval_batch_size",
        "axolotl": "half the eval_batch_size",
    },
    "eval_batch_as_training": {
        "plain": "evaluate in batches as large as training's",
        "transformers": "per_device_eval_batch_size as small as per_device_train_batch_size",
        "axolotl": "eval_batch_size as small as micro_batch_size",
    },
    "length": {
        "plain": "truncate to the usual length when tokenizing, or drop longer samples",
        "trl": "truncate to the usual: max_length in the trainer's config near the median, or drop longer samples",
        "axolotl": "truncate to the usual: sequence_len near the median, or drop longer samples",
        "llamafactory": "truncate to the usual: cutoff_len near the median, or drop longer samples",
    },
}
_LIKE = {"trl": "transformers", "llamafactory": "transformers"}


def rule(change: str) -> Advice:
    """Advice without a number: on recording, or on what lies outside the run."""
    return Advice(change, None, Basis.RULE)


def formula(
    change: str, rows: Bool, share: float = 1.0, less_bytes: int = 0, with_asked: bool = False, **options: Any
) -> Change:
    """A change after which ``rows`` are ``share`` smaller, less what the change itself costs. ``with_asked``: and so is
    the refused request, which is one more of them.

    ``change`` may be a key of the table above; ``options`` are those of ``memtrace estimate``.
    """

    def worked_out(case: Case) -> Proposal:
        asked = case.refusal.asked_bytes if with_asked and case.refusal is not None else 0
        saves = max(0, case.saving(rows, share) + round(asked * share) - less_bytes)
        terms = f"{(rows & case.live).sum()} tensors of {size(case.live_total(rows))}"
        terms += f" × {share:.3g}" if share < 1 else ""
        terms += f" + the refused {size(asked)}" if asked else ""
        terms += f" - {size(less_bytes)}" if less_bytes else ""
        terms += " at the refusal" if case.is_oom else " at the peak"
        asks = max(less_bytes, round(asked * (1 - share)), 1) if asked else None
        return Proposal(words(case, change), saves, Basis.FORMULA, terms, rows, share, asks, options=options)

    return worked_out


def words(case: Case, change: str) -> str:
    """A change as the run's trainer spells it, see :func:`spelled`."""
    return spelled(change, case.setting)


def spelled(change: str, setting: RunSetting) -> str:
    """A change as the run's trainer spells it, or else its base, or plain PyTorch; as it is where no table has it."""
    table, trainer = _SPELLINGS.get(change, {"plain": change}), setting.trainer
    if setting.has_dtensors and "dtensor" in table:
        return table["dtensor"]
    if setting.shards_weights and "sharded" in table:
        return table["sharded"]
    return table.get(trainer) or table.get(_LIKE.get(trainer, "plain")) or table["plain"]


def against_pieces(setting: RunSetting) -> list[tuple[str, str]]:
    """(change, settings string): what keeps free memory in one piece, as back end, release and platform spell it."""
    found = []
    if setting.may_expand:
        change = f"{setting.variable}=expandable_segments:True in the environment before Python starts"
        found.append((f"{change} (not with vLLM's sleep mode)", "expandable_segments:True"))
    if setting.may_split:
        change = f"{setting.variable}={LARGE_BLOCKS} in the environment before Python starts"
        found.append((f"{change}: large blocks are kept whole for large requests", LARGE_BLOCKS))
    return found


def settings_to_try(case: Case) -> list[Proposal]:
    """Allocator settings, each to be replayed."""
    return [Proposal(change, None, Basis.REPLAY, conf=conf) for change, conf in against_pieces(case.setting)]
