"""One rank of DDP through NCCL with paged optimizer states: what of it lies outside PyTorch's allocator."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

torch.cuda.init()
torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
model = nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048)).cuda().bfloat16()
wrapped = nn.parallel.DistributedDataParallel(model)
optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
with contextlib.suppress(ImportError):
    import bitsandbytes

    optimizer = bitsandbytes.optim.PagedAdamW32bit(model.parameters())
for _ in range(3):
    wrapped(torch.randn(512, 2048, device="cuda", dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
