"""torch.compile around a residual MLP, side streams, events, a generator of its own, empty_cache between epochs."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.nn.functional.silu(layer(x))
        return x


model = torch.compile(Net().cuda())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
made = torch.Generator("cuda").manual_seed(1)
begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
for epoch in range(2):
    for step in range(2):
        begin.record()
        x = torch.randn(4096, 1024, device="cuda", generator=made)
        loss = model(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        end.record()
        torch.cuda.synchronize()
        print(epoch, step, loss.item(), begin.elapsed_time(end) > 0)
    torch.cuda.empty_cache()
