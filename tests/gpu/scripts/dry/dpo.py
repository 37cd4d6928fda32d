"""TRL's DPOTrainer on a folder with a tokenizer made on the spot: preference pairs, LoRA, no reference model."""

import sys
import tempfile

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

words = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "<pad>", *(f"w{i}" for i in range(500))])}
inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
)


def text(seed, count):
    return " ".join(f"w{(seed * 31 + i * 7) % 500}" for i in range(count))


rows = Dataset.from_list(
    [
        {"prompt": text(i, 40), "chosen": text(i + 1, 60 + i % 20), "rejected": text(i + 2, 30 + i % 40)}
        for i in range(24)
    ]
)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="bfloat16")
with tempfile.TemporaryDirectory() as folder:
    arguments = DPOConfig(
        output_dir=folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=1,
        max_length=128, bf16=True, report_to="none", save_strategy="no", logging_steps=1,
    )  # fmt: skip
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
    trainer = DPOTrainer(
        model=model, args=arguments, train_dataset=rows, processing_class=tokenizer, peft_config=adapters
    )
    trainer.train()
