"""A small DCGAN: two networks, two optimizers, transposed convolutions, fp32."""

import torch
from torch import nn

maker = nn.Sequential(
    nn.ConvTranspose2d(100, 256, 4, 1, 0, bias=False),
    nn.BatchNorm2d(256),
    nn.ReLU(True),
    nn.ConvTranspose2d(256, 128, 4, 2, 1, bias=False),
    nn.BatchNorm2d(128),
    nn.ReLU(True),
    nn.ConvTranspose2d(128, 64, 4, 2, 1, bias=False),
    nn.BatchNorm2d(64),
    nn.ReLU(True),
    nn.ConvTranspose2d(64, 3, 4, 2, 1, bias=False),
    nn.Tanh(),
).cuda()
judge = nn.Sequential(
    nn.Conv2d(3, 64, 4, 2, 1, bias=False),
    nn.LeakyReLU(0.2, True),
    nn.Conv2d(64, 128, 4, 2, 1, bias=False),
    nn.BatchNorm2d(128),
    nn.LeakyReLU(0.2, True),
    nn.Conv2d(128, 1, 8, 1, 0, bias=False),
    nn.Flatten(0),
).cuda()
criterion = nn.BCEWithLogitsLoss()
by_judge = torch.optim.Adam(judge.parameters(), lr=2e-4, betas=(0.5, 0.999))
by_maker = torch.optim.Adam(maker.parameters(), lr=2e-4, betas=(0.5, 0.999))
for step in range(4):
    real = torch.randn(128, 3, 32, 32).to("cuda")
    judge.zero_grad()
    on_real = judge(real)
    loss_real = criterion(on_real, torch.ones_like(on_real))
    loss_real.backward()
    fake = maker(torch.randn(128, 100, 1, 1, device="cuda"))
    on_fake = judge(fake.detach())
    loss_fake = criterion(on_fake, torch.zeros_like(on_fake))
    loss_fake.backward()
    by_judge.step()
    maker.zero_grad()
    loss = criterion(judge(fake), torch.ones_like(on_fake))
    loss.backward()
    by_maker.step()
    print(step, (loss_real + loss_fake).item(), loss.item())
