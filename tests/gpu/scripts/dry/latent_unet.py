import copy

import torch
import torch.nn.functional as F
from torch import nn


class Attn(nn.Module):
    def __init__(self, c, ctx=256):
        super().__init__()
        self.n = nn.GroupNorm(32, c)
        self.q = nn.Linear(c, c)
        self.k = nn.Linear(ctx, c)
        self.v = nn.Linear(ctx, c)
        self.o = nn.Linear(c, c)

    def forward(self, x, ctx):
        b, c, h, w = x.shape
        t = self.n(x).flatten(2).transpose(1, 2)

        def f(z):
            return z.view(b, -1, 8, c // 8).transpose(1, 2)

        o = (
            F.scaled_dot_product_attention(f(self.q(t)), f(self.k(ctx)), f(self.v(ctx)))
            .transpose(1, 2)
            .reshape(b, h * w, c)
        )
        return x + self.o(o).transpose(1, 2).view(b, c, h, w)


class Res(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.a = nn.Sequential(nn.GroupNorm(32, i), nn.SiLU(), nn.Conv2d(i, o, 3, padding=1))
        self.t = nn.Linear(256, o)
        self.b = nn.Sequential(nn.GroupNorm(32, o), nn.SiLU(), nn.Conv2d(o, o, 3, padding=1))
        self.s = nn.Conv2d(i, o, 1) if i != o else nn.Identity()

    def forward(self, x, t):
        return self.s(x) + self.b(self.a(x) + self.t(t)[:, :, None, None])


class U(nn.Module):
    def __init__(self):
        super().__init__()
        self.i = nn.Conv2d(4, 64, 3, padding=1)
        self.d1, self.d2 = Res(64, 128), Res(128, 256)
        self.a1, self.a2 = Attn(128), Attn(256)
        self.m = Res(256, 256)
        self.u2, self.u1 = Res(512, 128), Res(256, 64)
        self.o = nn.Conv2d(64, 4, 3, padding=1)
        self.tm = nn.Sequential(nn.Linear(256, 256), nn.SiLU())

    def forward(self, x, t, ctx):
        e = torch.cat(
            [
                torch.sin(t[:, None] * torch.arange(128, device=t.device)),
                torch.cos(t[:, None] * torch.arange(128, device=t.device)),
            ],
            1,
        )
        e = self.tm(e.to(x.dtype))
        x = self.i(x)
        h1 = self.a1(self.d1(x, e), ctx)
        h2 = self.a2(self.d2(F.avg_pool2d(h1, 2), e), ctx)
        m = self.m(F.avg_pool2d(h2, 2), e)
        x = self.u2(torch.cat([F.interpolate(m, scale_factor=2), h2], 1), e)
        return self.o(self.u1(torch.cat([F.interpolate(x, scale_factor=2), h1], 1), e))


net = U().to("cuda", memory_format=torch.channels_last)
ema = copy.deepcopy(net).requires_grad_(False)
opt = torch.optim.AdamW(net.parameters(), 1e-4)
acp = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0).cuda()
null = torch.zeros(77, 256, device="cuda")
for step in range(4):
    x = torch.randn(4, 4, 64, 64, device="cuda")
    ctx = torch.randn(4, 77, 256, device="cuda")
    drop = torch.rand(4) < 0.1
    ctx[drop.cuda()] = null
    t = torch.randint(0, 1000, (4,), device="cuda")
    n = torch.randn_like(x)
    a = acp[t].view(-1, 1, 1, 1)
    with torch.autocast("cuda", torch.bfloat16):
        loss = ((net(a.sqrt() * x + (1 - a).sqrt() * n, t, ctx).float() - n) ** 2).mean([1, 2, 3])
    snr = a.flatten() / (1 - a.flatten())
    loss = (loss * torch.minimum(snr, torch.full_like(snr, 5.0)) / snr).mean()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    with torch.no_grad():
        for p, q in zip(ema.parameters(), net.parameters()):
            p.lerp_(q, 0.01)
    print(step, loss.item())
with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
    x = torch.randn(8, 4, 64, 64, device="cuda")
    for i in range(999, -1, -250):
        t = torch.full((8,), i, device="cuda")
        e = ema(x, t, torch.cat([null.expand(4, -1, -1), torch.randn(4, 77, 256, device="cuda")]))
        x = x - 0.1 * e.float()
img = (x.clamp(-1, 1).cpu().numpy() * 127.5 + 128).astype("uint8")
print(img.shape, img.max())
