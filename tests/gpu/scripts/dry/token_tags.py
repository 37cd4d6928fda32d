"""Names in texts: token classification with the Trainer, batches by length, label smoothing, metrics, best checkpoint."""

import tempfile

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import Dataset
from transformers import (
    DataCollatorForTokenClassification,
    DistilBertConfig,
    DistilBertForTokenClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)


class Texts(Dataset):
    def __init__(self, count, seed):
        random = np.random.default_rng(seed)
        self.rows = []
        for length in random.integers(20, 180, count):
            ids, labels = random.integers(1, 5000, length).tolist(), random.integers(0, 9, length).tolist()
            self.rows.append({"input_ids": ids, "attention_mask": [1] * int(length), "labels": labels})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def metrics(found):
    logits, labels = found.predictions, found.label_ids
    known = labels != -100
    return {"accuracy": float((logits.argmax(-1)[known] == labels[known]).mean())}


words = WordLevel({"[PAD]": 0, "[UNK]": 1} | {f"w{i}": i for i in range(2, 5000)}, unk_token="[UNK]")
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="[PAD]", unk_token="[UNK]")
config = DistilBertConfig(vocab_size=5000, dim=384, hidden_dim=1536, n_layers=6, n_heads=6, num_labels=9)
model = DistilBertForTokenClassification(config)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=16, per_device_eval_batch_size=32, num_train_epochs=2, bf16=True,
        learning_rate=3e-5, weight_decay=0.01, warmup_steps=3, label_smoothing_factor=0.1, logging_steps=2,
        eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="accuracy",
        report_to=[], train_sampling_strategy="group_by_length", seed=11, dataloader_pin_memory=True,
    )  # fmt: skip
    trainer = Trainer(
        model, arguments, train_dataset=Texts(96, 1), eval_dataset=Texts(40, 2), compute_metrics=metrics,
        data_collator=DataCollatorForTokenClassification(tokenizer, pad_to_multiple_of=8),
    )  # fmt: skip
    trainer.train()
    print(trainer.evaluate())
