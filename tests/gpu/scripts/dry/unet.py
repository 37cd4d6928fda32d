"""A diffusion U-Net with attention and time embedding, an EMA copy, fused AdamW, fp16 autocast with a scaler."""

import copy

import torch
import torch.nn.functional as F
from torch import nn


class Res(nn.Module):
    def __init__(self, a, b, time=256):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, a), nn.Conv2d(a, b, 3, padding=1)
        self.time = nn.Linear(time, b)
        self.norm2, self.conv2 = nn.GroupNorm(8, b), nn.Conv2d(b, b, 3, padding=1)
        self.short = nn.Conv2d(a, b, 1) if a != b else nn.Identity()

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x))) + self.time(t)[:, :, None, None]
        return self.conv2(F.silu(self.norm2(h))) + self.short(x)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm, self.qkv, self.out = nn.GroupNorm(8, c), nn.Conv2d(c, 3 * c, 1), nn.Conv2d(c, c, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3, 4, c // 4, h * w).transpose(-1, -2).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(-1, -2).reshape(b, c, h, w))


class UNet(nn.Module):
    def __init__(self, c=64):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 256))
        self.first = nn.Conv2d(3, c, 3, padding=1)
        self.down = nn.ModuleList([Res(c, c), Res(c, 2 * c), Res(2 * c, 4 * c)])
        self.shrink = nn.ModuleList([nn.Conv2d(c, c, 3, 2, 1), nn.Conv2d(2 * c, 2 * c, 3, 2, 1)])
        self.middle = nn.ModuleList([Res(4 * c, 4 * c), Attention(4 * c), Res(4 * c, 4 * c)])
        self.up = nn.ModuleList([Res(8 * c, 2 * c), Res(4 * c, c), Res(2 * c, c)])
        self.last = nn.Conv2d(c, 3, 3, padding=1)

    def forward(self, x, t):
        angles = t[:, None].float() * torch.exp(torch.linspace(0, -8, 32, device=x.device))
        t = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        x, kept = self.first(x), []
        for i, block in enumerate(self.down):
            x = block(x, t)
            kept.append(x)
            if i < 2:
                x = self.shrink[i](x)
        x = self.middle[2](self.middle[1](self.middle[0](x, t)), t)
        for i, block in enumerate(self.up):
            x = block(torch.cat([x, kept.pop()], 1), t)
            if i < 2:
                x = F.interpolate(x, scale_factor=2, mode="nearest")
        return self.last(x)


model = UNet().cuda().to(memory_format=torch.channels_last)
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
scaler = torch.amp.GradScaler()
betas = torch.linspace(1e-4, 0.02, 1000, device="cuda")
keep = torch.cumprod(1 - betas, 0)
for step in range(4):
    images = torch.randn(16, 3, 64, 64).cuda().contiguous(memory_format=torch.channels_last)
    t = torch.randint(0, 1000, (16,), device="cuda")
    noise = torch.randn_like(images)
    a = keep[t][:, None, None, None]
    with torch.autocast("cuda", torch.float16):
        loss = F.mse_loss(model(a.sqrt() * images + (1 - a).sqrt() * noise, t), noise)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    with torch.no_grad():
        for mine, theirs in zip(average.parameters(), model.parameters()):
            mine.lerp_(theirs, 0.001)
    print(step, loss.item())
