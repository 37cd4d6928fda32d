"""An ordinary TRL script that knows nothing of memtrace; see ``train_loop.py`` for ``--tighten`` and ``--truth``."""

from __future__ import annotations

import argparse
import tempfile

import torch
from common import CUDA, storages, tighten, write_truth
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--truth")
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--tighten", type=int, default=-1)
parser.add_argument("--length", type=int, default=1024)
args = parser.parse_args()


class Tighten(TrainerCallback):
    """Shrinks the memory limit half-way through one step, when the first half's gradients are there."""

    def on_substep_end(self, _args: object, state: object, _control: object, **_: object) -> None:
        if state.global_step == args.tighten:  # type: ignore[attr-defined]
            tighten()


words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
model = AutoModelForCausalLM.from_pretrained(
    args.model,
    quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16),
    dtype=torch.bfloat16,
    device_map={"": 0 if CUDA else "cpu"},
)
rows = torch.randint(3, model.config.vocab_size, (args.steps * 4, args.length)).tolist()
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=args.steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        bf16=CUDA,
        use_cpu=not CUDA,
        optim="paged_adamw_8bit" if CUDA else "adamw_torch",
        max_length=args.length,
        dataset_kwargs={"skip_prepare_dataset": True},
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    ),
    train_dataset=Dataset.from_list([{"input_ids": row} for row in rows]),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    callbacks=[Tighten()],
)
try:
    trainer.train()
except torch.OutOfMemoryError:
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    write_truth(args.truth, storages(trainer.model, [optimizer]))
    raise
