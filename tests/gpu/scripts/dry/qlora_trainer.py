"""QLoRA with Trainer: paged 8-bit AdamW, bf16, checkpointing, evaluation, adapters saved."""

import sys
import tempfile

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_pretrained(
    sys.argv[1],
    device_map="auto",
    dtype=torch.bfloat16,
    quantization_config=BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    ),
)
model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=True)
model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
rows = [{"input_ids": (ids := torch.randint(0, model.config.vocab_size, (512,))), "labels": ids} for _ in range(32)]
folder = tempfile.mkdtemp()
args = TrainingArguments(
    folder,
    max_steps=4,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    optim="paged_adamw_8bit",
    bf16=True,
    eval_strategy="steps",
    eval_steps=2,
    save_strategy="no",
    logging_steps=1,
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model, args, train_dataset=rows, eval_dataset=rows[:8])
trainer.train()
trainer.save_model(folder)
