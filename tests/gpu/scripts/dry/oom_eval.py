"""Training fits; the evaluation keeps all logits and does not."""

import torch
from torch import nn

model = nn.Sequential(nn.Embedding(32000, 256), nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 32000)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    ids = torch.randint(0, 32000, (4, 256), device="cuda")
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
kept = []
model.eval()
with torch.no_grad():
    for _ in range(64):
        kept.append(model(torch.randint(0, 32000, (4, 256), device="cuda")))
print(torch.cat(kept).argmax(-1).float().mean().item())
