"""Transformers' Trainer on GPT-2 from its config: accumulation, checkpointing, Adafactor, fp32."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

rows = [{"input_ids": (ids := torch.randint(0, 10000, (256,))), "labels": ids} for _ in range(64)]
model = GPT2LMHeadModel(GPT2Config(vocab_size=10000, n_embd=384, n_layer=6, n_head=6, n_positions=256))
args = TrainingArguments(
    tempfile.mkdtemp(),
    max_steps=4,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    optim="adafactor",
    gradient_checkpointing=True,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    max_grad_norm=1.0,
)
Trainer(model, args, train_dataset=rows).train()
