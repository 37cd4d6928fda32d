"""Checkpoints of both kinds and in segments, a function with its own backward."""

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return g * (s * (1 + x * (1 - s)))


class Block(nn.Module):
    def __init__(s, d):
        super().__init__()
        s.a = nn.Linear(d, 4 * d)
        s.b = nn.Linear(4 * d, d)
        s.n = nn.LayerNorm(d)

    def forward(s, x):
        return x + s.b(Swish.apply(s.a(s.n(x))))


blocks = nn.ModuleList(Block(768) for _ in range(8)).cuda()
seq = nn.Sequential(*[Block(768) for _ in range(4)]).cuda()
opt = torch.optim.RMSprop([*blocks.parameters(), *seq.parameters()], 0.0001)
for i in range(4):
    x = torch.randn(32, 256, 768, device="cuda", requires_grad=True)
    h = x
    for n, b in enumerate(blocks):
        h = checkpoint(b, h, use_reentrant=n % 2 == 0)
    h = checkpoint_sequential(seq, 2, h, use_reentrant=False)
    loss = h.pow(2).mean()
    loss.backward()
    opt.step()
    opt.zero_grad(set_to_none=False)
    print(i, loss.item(), x.grad.norm().item(), torch.cuda.memory_allocated() // 2**20)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
