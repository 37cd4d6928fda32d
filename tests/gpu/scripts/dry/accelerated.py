"""Accelerate: gradient accumulation, bf16, two loaders, gathered metrics, a RoBERTa-like classifier with LoRA."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import RobertaConfig, RobertaForSequenceClassification, get_linear_schedule_with_warmup

set_seed(1)
accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")
config = RobertaConfig(
    hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536, num_labels=3, pad_token_id=1
)
model = RobertaForSequenceClassification(config)
model = get_peft_model(model, LoraConfig(r=8, target_modules=["query", "value"], task_type="SEQ_CLS"))


def loader(rows, batch, shuffle):
    tokens = torch.randint(5, 50000, (rows, 192))
    mask = torch.ones_like(tokens)
    for i in range(rows):
        mask[i, 96 + i % 96 :] = 0
    return DataLoader(TensorDataset(tokens, mask, torch.randint(0, 3, (rows,))), batch_size=batch, shuffle=shuffle)


optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
train, test = loader(160, 32, True), loader(100, 64, False)
scheduler = get_linear_schedule_with_warmup(optimizer, 1, len(train))
model, optimizer, train, test, scheduler = accelerator.prepare(model, optimizer, train, test, scheduler)
for epoch in range(2):
    model.train()
    for tokens, mask, labels in train:
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    right = total = 0
    for tokens, mask, labels in test:
        with torch.inference_mode():
            logits = model(input_ids=tokens, attention_mask=mask).logits
        guesses, truth = accelerator.gather_for_metrics((logits.argmax(-1), labels))
        right, total = right + (guesses == truth).sum().item(), total + len(truth)
    accelerator.print(epoch, loss.item(), right, total)
