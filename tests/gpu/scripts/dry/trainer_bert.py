"""Transformers' Trainer on a BERT classifier from its config, with evaluation, metrics and checkpoints each epoch."""

import tempfile

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Texts(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        made = np.random.default_rng(seed)
        self.rows = [made.integers(5, 8000, made.integers(20, 128)).tolist() for _ in range(count)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": i % 3}


def collate(rows):
    most = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (most - len(row["input_ids"])) for row in rows])
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def metrics(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


config = BertConfig(
    vocab_size=8000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024, num_labels=3
)
args = TrainingArguments(
    tempfile.mkdtemp(),
    num_train_epochs=2,
    per_device_train_batch_size=16,
    per_device_eval_batch_size=32,
    eval_strategy="epoch",
    save_strategy="epoch",
    load_best_model_at_end=True,
    metric_for_best_model="accuracy",
    logging_steps=2,
    bf16=True,
    report_to=[],
    disable_tqdm=True,
    seed=0,
)
trainer = Trainer(
    BertForSequenceClassification(config),
    args,
    data_collator=collate,
    train_dataset=Texts(96, 0),
    eval_dataset=Texts(64, 1),
    compute_metrics=metrics,
)
trainer.train()
print(trainer.evaluate()["eval_loss"])
