"""A small BERT taught by a larger one."""

import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForSequenceClassification

t = (
    BertForSequenceClassification(
        BertConfig(hidden_size=512, num_hidden_layers=6, num_attention_heads=8, intermediate_size=2048, num_labels=4)
    )
    .cuda()
    .eval()
    .requires_grad_(False)
)
s = (
    BertForSequenceClassification(
        BertConfig(hidden_size=256, num_hidden_layers=3, num_attention_heads=4, intermediate_size=1024, num_labels=4)
    )
    .cuda()
    .train()
)
opt = torch.optim.AdamW(s.parameters(), 5e-05)
T = 2.0
for step in range(5):
    ids = torch.randint(0, 30000, (16, 128), device="cuda")
    am = torch.ones_like(ids)
    am[:, 100:] = 0
    y = torch.randint(0, 4, (16,), device="cuda")
    with torch.no_grad():
        tl = t(input_ids=ids, attention_mask=am).logits
    out = s(input_ids=ids, attention_mask=am, labels=y)
    kd = F.kl_div(F.log_softmax(out.logits / T, -1), F.softmax(tl / T, -1), reduction="batchmean") * T * T
    loss = 0.5 * out.loss + 0.5 * kd
    opt.zero_grad()
    loss.backward()
    opt.step()
    preds = out.logits.argmax(-1).detach().cpu().numpy()
    acc = (preds == y.cpu().numpy()).mean()
    print(step, f"{loss.item():.3f}", acc, preds.tolist()[:4])
