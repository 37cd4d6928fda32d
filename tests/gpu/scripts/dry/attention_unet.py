"""A diffusion U-Net with attention, channels last, an average, images sampled at the end."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class Res(nn.Module):
    def __init__(s, i, o, t):
        super().__init__()
        s.n1 = nn.GroupNorm(8, i)
        s.c1 = nn.Conv2d(i, o, 3, padding=1)
        s.t = nn.Linear(t, o)
        s.n2 = nn.GroupNorm(8, o)
        s.c2 = nn.Conv2d(o, o, 3, padding=1)
        s.s = nn.Conv2d(i, o, 1) if i != o else nn.Identity()

    def forward(s, x, t):
        h = s.c1(F.silu(s.n1(x))) + s.t(F.silu(t))[:, :, None, None]
        return s.s(x) + s.c2(F.silu(s.n2(h)))


class Attn(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.n = nn.GroupNorm(8, c)
        s.q = nn.Conv2d(c, 3 * c, 1)
        s.p = nn.Conv2d(c, c, 1)

    def forward(s, x):
        b, c, h, w = x.shape
        q, k, v = s.q(s.n(x)).reshape(b, 3, 4, c // 4, h * w).transpose(-1, -2).unbind(1)
        return x + s.p(F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).reshape(b, c, h, w))


class UNet(nn.Module):
    def __init__(s, c=64):
        super().__init__()
        s.i = nn.Conv2d(3, c, 3, padding=1)
        s.te = nn.Sequential(nn.Linear(c, 4 * c), nn.SiLU(), nn.Linear(4 * c, 4 * c))
        t = 4 * c
        s.d1 = Res(c, c, t)
        s.dn = nn.Conv2d(c, c, 3, stride=2, padding=1)
        s.d2 = Res(c, 2 * c, t)
        s.a = Attn(2 * c)
        s.m = Res(2 * c, 2 * c, t)
        s.u2 = Res(4 * c, c, t)
        s.u1 = Res(2 * c, c, t)
        s.o = nn.Conv2d(c, 3, 3, padding=1)
        s.c = c

    def forward(s, x, t):
        f = torch.exp(-math.log(10000) * torch.arange(s.c // 2, device=x.device) / (s.c // 2))
        e = s.te(torch.cat([(t[:, None] * f).sin(), (t[:, None] * f).cos()], -1))
        h0 = s.i(x)
        h1 = s.d1(h0, e)
        h2 = s.a(s.d2(s.dn(h1), e))
        h = s.m(h2, e)
        h = s.u2(torch.cat([h, h2], 1), e)
        h = F.interpolate(h, scale_factor=2, mode="nearest")
        return s.o(s.u1(torch.cat([h, h1], 1), e))


m = UNet().cuda().to(memory_format=torch.channels_last)
ema = torch.optim.swa_utils.AveragedModel(m, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))
opt = torch.optim.AdamW(m.parameters(), 0.0001)
ab = torch.cumprod(1 - torch.linspace(0.0001, 0.02, 1000), 0).cuda()
for s in range(4):
    x = torch.randn(8, 3, 64, 64, device="cuda").to(memory_format=torch.channels_last)
    t = torch.randint(0, 1000, (8,), device="cuda")
    n = torch.randn_like(x)
    w = ab[t][:, None, None, None]
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.mse_loss(m(w.sqrt() * x + (1 - w).sqrt() * n, t), n)
    loss.backward()
    nn.utils.clip_grad_norm_(m.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    ema.update_parameters(m)
    print(s, loss.item())
with torch.no_grad():
    x = torch.randn(4, 3, 64, 64, device="cuda")
    for i in reversed(range(0, 1000, 250)):
        eps = ema(x, torch.full((4,), i, device="cuda"))
        x = (x - (1 - ab[i]).sqrt() * eps) / ab[i].sqrt()
        x = x.clamp(-1, 1)
img = ((x + 1) * 127.5).byte().cpu().permute(0, 2, 3, 1).numpy()
print(img.shape, img.dtype, img.min() >= 0)
