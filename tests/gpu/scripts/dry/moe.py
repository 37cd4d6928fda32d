"""A mixture of experts written by hand: top-2 routing, a loop over the experts, a balance loss."""

import torch
import torch.nn.functional as F
from torch import nn


class Experts(nn.Module):
    def __init__(self, width=512, count=8):
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 1024), nn.SiLU(), nn.Linear(1024, width)) for _ in range(count)
        )

    def forward(self, x):
        flat = x.reshape(-1, x.size(-1))
        chances = F.softmax(self.router(flat), -1)
        weights, chosen = chances.topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            if len(rows) == 0:
                continue
            out.index_add_(0, rows, expert(flat[rows]) * weights[rows, place, None])
        share = F.one_hot(chosen, len(self.experts)).float().mean((0, 1))
        return out.view_as(x), (share * chances.mean(0)).sum() * len(self.experts)


torch.manual_seed(0)
embed, first, second, head = nn.Embedding(4000, 512), Experts(), Experts(), nn.Linear(512, 4000)
model = nn.ModuleList([embed, first, second, head]).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(3):
    ids = torch.randint(0, 4000, (4, 256), device="cuda")
    x = embed(ids)
    y, one = first(x)
    x = x + y
    y, two = second(x)
    loss = F.cross_entropy(head(x + y).flatten(0, 1), ids.flatten()) + 0.01 * (one + two)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
