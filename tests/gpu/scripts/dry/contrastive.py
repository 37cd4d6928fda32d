"""Two towers with a contrastive loss, learned temperature, LAMB-like manual update through foreach, bf16 weights."""

import torch
import torch.nn.functional as F
from torch import nn


def tower(a):
    return nn.Sequential(nn.Linear(a, 2048), nn.GELU(), nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 512))


images, texts = tower(1024).cuda().bfloat16(), tower(768).cuda().bfloat16()
scale = nn.Parameter(torch.tensor(2.6, device="cuda"))
weights = [*images.parameters(), *texts.parameters(), scale]
moments = [torch.zeros_like(p, dtype=torch.float32) for p in weights]
for step in range(4):
    a = F.normalize(images(torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)), dim=-1)
    b = F.normalize(texts(torch.randn(1024, 768, device="cuda", dtype=torch.bfloat16)), dim=-1)
    logits = scale.exp() * a.float() @ b.float().t()
    target = torch.arange(1024, device="cuda")
    loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2
    grads = torch.autograd.grad(loss, weights)
    with torch.no_grad():
        torch._foreach_mul_(moments, 0.9)
        torch._foreach_add_(moments, [g.float() for g in grads])
        for p, m in zip(weights, moments):
            p.add_(m.to(p.dtype), alpha=-1e-4)
    print(step, loss.item())
