"""Embedding bags and a wide MLP, Adagrad, ragged histories of random lengths, AUC on the host."""

import random

import torch
from torch import nn

random.seed(2)
users, items = nn.EmbeddingBag(50000, 64, mode="mean"), nn.Embedding(20000, 64)
mlp = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1))
model = nn.ModuleList([users, items, mlp]).cuda()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
criterion = nn.BCEWithLogitsLoss()
for step in range(5):
    lengths = [random.randint(1, 50) for _ in range(4096)]
    offsets = torch.tensor([0, *lengths[:-1]]).cumsum(0).cuda()
    history = torch.randint(0, 50000, (sum(lengths),)).cuda()
    x = torch.cat([users(history, offsets), items(torch.randint(0, 20000, (4096,)).cuda())], 1)
    scores = mlp(x).squeeze(1)
    labels = torch.randint(0, 2, (4096,)).float().cuda()
    loss = criterion(scores, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    order = scores.detach().cpu().argsort()
    print(step, loss.item(), len(order))
