"""TRL's SFTTrainer with LoRA on a bf16 model."""

import sys
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
torch.manual_seed(0)
rows = [{"input_ids": torch.randint(3, model.config.vocab_size, (n,)).tolist()} for n in (700, 300, 512, 640) * 8]
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        tempfile.mkdtemp(),
        max_steps=4,
        per_device_train_batch_size=4,
        bf16=True,
        gradient_checkpointing=True,
        max_length=512,
        dataset_kwargs={"skip_prepare_dataset": True},
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    ),
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
