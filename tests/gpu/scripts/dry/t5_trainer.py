"""T5 summariser with Seq2SeqTrainer: dynamic padding, evaluation that generates, best model kept."""

import tempfile

import numpy as np
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

config = T5Config(
    vocab_size=8000, d_model=256, d_kv=32, d_ff=1024, num_layers=4, num_heads=8, decoder_start_token_id=0,
    pad_token_id=0, eos_token_id=1,
)  # fmt: skip
model = T5ForConditionalGeneration(config)
random = np.random.default_rng(0)


def rows(count):
    return [
        {"input_ids": random.integers(3, 8000, 60 + 11 * (i % 7)), "labels": random.integers(3, 8000, 12 + i % 9)}
        for i in range(count)
    ]


def collate(batch):
    def padded(key, value):
        width = max(len(row[key]) for row in batch)
        return torch.tensor(
            np.array([np.pad(row[key], (0, width - len(row[key])), constant_values=value) for row in batch])
        )

    inputs = padded("input_ids", 0)
    return {"input_ids": inputs, "attention_mask": (inputs != 0).long(), "labels": padded("labels", -100)}


def metrics(prediction):
    generated = prediction[0]
    return {"lengths": float(np.mean([np.count_nonzero(row) for row in generated]))}


with tempfile.TemporaryDirectory() as folder:
    arguments = Seq2SeqTrainingArguments(
        output_dir=folder, per_device_train_batch_size=16, per_device_eval_batch_size=16, num_train_epochs=2,
        eval_strategy="epoch", save_strategy="epoch", predict_with_generate=True, generation_max_length=12,
        bf16=True, learning_rate=3e-4, logging_steps=2, report_to="none",
        load_best_model_at_end=True, metric_for_best_model="eval_loss", save_total_limit=1,
    )  # fmt: skip
    trainer = Seq2SeqTrainer(
        model=model, args=arguments, train_dataset=rows(80), eval_dataset=rows(32), data_collator=collate,
        compute_metrics=metrics,
    )  # fmt: skip
    trainer.train()
    print(trainer.evaluate())
