"""Sequences grow with every step until the card is full."""

import torch
from torch import nn

layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, norm_first=True)
model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).cuda()
head = nn.Linear(512, 4000).cuda()
optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-4)
for step in range(40):
    x = torch.randn(8, 128 * (step + 1), 512, device="cuda")
    loss = head(model(x)).float().logsumexp(-1).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), flush=True)
