"""One change, as the program that the user writes arguments for spells it.

Names of arguments were checked against transformers 5.24, PEFT 0.21, TRL 1.16 and bitsandbytes 0.50.
"""

from __future__ import annotations

_SPELLINGS: dict[str, dict[str, str]] = {
    "checkpointing": {
        "plain": "model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False}) and "
        "model.enable_input_require_grads()",
        "transformers": "gradient_checkpointing=True in TrainingArguments",
        "trl": "gradient_checkpointing=True in SFTConfig (its default)",
        "axolotl": "gradient_checkpointing: true",
        "llamafactory": "disable_gradient_checkpointing: false",
    },
    "bf16": {
        "plain": "torch.autocast('cuda', torch.bfloat16) around the forward pass",
        "transformers": "bf16=True in TrainingArguments",
        "trl": "bf16=True in SFTConfig",
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
    "optim_8bit": {
        "plain": "bitsandbytes.optim.AdamW8bit (tensors under 4,096 elements stay in 32 bits)",
        "transformers": 'optim="adamw_8bit" (bitsandbytes; tensors under 4,096 elements stay in 32 bits)',
        "axolotl": "optimizer: adamw_bnb_8bit (tensors under 4,096 elements stay in 32 bits)",
    },
    "optim_paged": {
        "plain": "bitsandbytes.optim.PagedAdamW8bit: states in pageable memory outside the allocator",
        "transformers": 'optim="paged_adamw_8bit": states in pageable memory outside the allocator',
        "axolotl": "optimizer: paged_adamw_8bit: states in pageable memory outside the allocator",
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
        "trl": "truncate to the usual: max_length in SFTConfig near the median, or drop longer samples",
        "axolotl": "truncate to the usual: sequence_len near the median, or drop longer samples",
        "llamafactory": "truncate to the usual: cutoff_len near the median, or drop longer samples",
    },
}
_LIKE = {"trl": "transformers", "llamafactory": "transformers"}


def spelled(key: str, trainer: str) -> str:
    """The change ``key`` for a trainer; what it does not spell itself is what its base or plain PyTorch does."""
    table = _SPELLINGS[key]
    return table.get(trainer) or table.get(_LIKE.get(trainer, "plain")) or table["plain"]
