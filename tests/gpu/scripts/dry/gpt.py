"""A small GPT written by hand: flash attention, bf16 autocast, fused AdamW, accumulation, and a sample at the end."""

import math

import torch
import torch.nn.functional as F
from torch import nn

vocab, width, heads, depth, length = 8192, 512, 8, 6, 512


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, heads, c // heads).transpose(1, 2) for y in self.qkv(self.norm1(x)).split(c, 2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids, targets=None):
        x = self.tokens(ids) + self.places(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if targets is None:
            return self.head(x[:, [-1]])
        logits = self.head(x)
        return F.cross_entropy(logits.view(-1, vocab), targets.view(-1))


model = GPT().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)
data = torch.randint(0, vocab, (200_000,))
for step in range(4):
    for group in optimizer.param_groups:
        group["lr"] = 3e-4 * 0.5 * (1 + math.cos(math.pi * step / 4))
    for _ in range(2):
        at = torch.randint(len(data) - length - 1, (8,))
        x = torch.stack([data[i : i + length] for i in at]).pin_memory().cuda(non_blocking=True)
        y = torch.stack([data[i + 1 : i + 1 + length] for i in at]).pin_memory().cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x, y) / 2
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(step, loss.item())
model.eval()
ids = torch.zeros((1, 1), dtype=torch.long, device="cuda")
with torch.no_grad():
    for _ in range(16):
        chances = F.softmax(model(ids)[:, -1] / 0.8, dim=-1)
        ids = torch.cat([ids, torch.multinomial(chances, 1)], dim=1)
print(len(ids[0].tolist()))
