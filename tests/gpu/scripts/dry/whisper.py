"""Whisper fine-tuned on spectrograms: encoder frozen, teacher forcing, accumulation, one greedy decoding."""

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import WhisperConfig, WhisperForConditionalGeneration

config = WhisperConfig(
    d_model=384, encoder_layers=4, decoder_layers=4, encoder_attention_heads=6, decoder_attention_heads=6,
    encoder_ffn_dim=1536, decoder_ffn_dim=1536,
)  # fmt: skip


class Speech(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        length = 20 + 7 * (index % 5)
        return {"input_features": torch.randn(80, 3000), "labels": torch.randint(1000, 50000, (length,))}


def collate(rows):
    labels = torch.nn.utils.rnn.pad_sequence([row["labels"] for row in rows], batch_first=True, padding_value=-100)
    return {"input_features": torch.stack([row["input_features"] for row in rows]), "labels": labels}


model = WhisperForConditionalGeneration(config).cuda()
model.model.encoder.requires_grad_(False)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-5)
scaler = torch.amp.GradScaler("cuda")
loader = DataLoader(Speech(), batch_size=6, collate_fn=collate, pin_memory=True)
model.train()
for index, batch in enumerate(loader):
    batch = {key: value.cuda(non_blocking=True) for key, value in batch.items()}
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(**batch).loss / 2
    scaler.scale(loss).backward()
    if index % 2:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    print(index, float(loss))
model.eval()
with torch.no_grad():
    features = torch.randn(2, 80, 3000, device="cuda")
    encoded = model.model.encoder(features)
    tokens = torch.full((2, 1), 50257, device="cuda")
    for _ in range(8):
        logits = model(encoder_outputs=encoded, decoder_input_ids=tokens).logits
        tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
print(tokens.shape)
