import numpy as np
import torch
from transformers import Trainer, TrainingArguments, Wav2Vec2Config, Wav2Vec2ForCTC

cfg = Wav2Vec2Config(
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=1024,
    conv_dim=(128,) * 7,
    vocab_size=32,
    mask_time_prob=0.05,
)


class D(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        return {"input_values": torch.randn(16000 + 1600 * (i % 5)), "labels": torch.randint(1, 32, (20 + i % 5,))}


def collate(b):
    return {
        "input_values": torch.nn.utils.rnn.pad_sequence([x["input_values"] for x in b], True),
        "labels": torch.nn.utils.rnn.pad_sequence([x["labels"] for x in b], True, -100),
    }


def metrics(p):
    return {"err": float(np.mean(np.argmax(p.predictions, -1)[:, :20] != p.label_ids[:, :20]))}


m = Wav2Vec2ForCTC(cfg)
m.freeze_feature_encoder()
Trainer(
    m,
    TrainingArguments(
        "/tmp/w2v",
        per_device_train_batch_size=4,
        num_train_epochs=1,
        fp16=True,
        gradient_accumulation_steps=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        report_to=[],
        lr_scheduler_type="cosine",
        logging_steps=1,
        dataloader_num_workers=1,
        optim="adamw_torch_fused",
    ),
    data_collator=collate,
    train_dataset=D(),
    eval_dataset=D(),
    compute_metrics=metrics,
).train()
