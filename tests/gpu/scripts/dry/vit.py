"""A vision transformer, checkpointed blocks, AdamW with two groups, mixup, bf16 autocast."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Layer(nn.Module):
    def __init__(self, width=384, heads=6):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, width=384):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.cls, self.places = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(1, 197, width))
        self.layers = nn.ModuleList(Layer(width) for _ in range(8))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.places
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(self.norm(x)[:, 0])


model = ViT().to("cuda")
decay = [p for p in model.parameters() if p.dim() > 1]
plain = [p for p in model.parameters() if p.dim() <= 1]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}], lr=1e-3
)
for step in range(3):
    images, labels = torch.randn(32, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (32,), device="cuda")
    mix = torch.distributions.Beta(0.8, 0.8).sample().item()
    order = torch.randperm(32, device="cuda")
    images = mix * images + (1 - mix) * images[order]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(images)
        loss = mix * F.cross_entropy(logits, labels) + (1 - mix) * F.cross_entropy(logits, labels[order])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    print(step, float(loss))
