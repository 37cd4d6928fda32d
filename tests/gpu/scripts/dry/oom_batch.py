"""Looks for the largest batch that fits by halving after an error, then trains with it."""

import gc

import torch
from torch import nn

model = nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 8192), nn.GELU(), nn.Linear(8192, 2048)).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
batch = 65536


def train(batch):
    for _ in range(2):
        x = torch.randn(batch, 2048, device="cuda")
        loss = (model(x) - x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


while True:
    try:
        print(batch, train(batch))
        break
    except torch.cuda.OutOfMemoryError:
        optimizer.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()
        batch //= 2
        print("now", batch)
