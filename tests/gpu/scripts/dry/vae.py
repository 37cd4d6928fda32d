"""A convolutional VAE with group norm and bilinear upsampling, RMSprop, samples written at the end."""

import torch
import torch.nn.functional as F
from torch import nn


def down(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 4, 2, 1), nn.GroupNorm(8, b), nn.SiLU())


class Up(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(8, b)

    def forward(self, x):
        return F.silu(self.norm(self.conv(F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False))))


class Vae(nn.Module):
    def __init__(self, latent=128):
        super().__init__()
        self.encoder = nn.Sequential(down(3, 32), down(32, 64), down(64, 128), down(128, 256), nn.Flatten())
        self.stats = nn.Linear(256 * 16, 2 * latent)
        self.spread = nn.Linear(latent, 256 * 16)
        self.decoder = nn.Sequential(Up(256, 128), Up(128, 64), Up(64, 32), Up(32, 32), nn.Conv2d(32, 3, 3, padding=1))

    def decode(self, z):
        return torch.sigmoid(self.decoder(self.spread(z).view(-1, 256, 4, 4)))

    def forward(self, x):
        mean, log_variance = self.stats(self.encoder(x)).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decode(z), mean, log_variance


model = Vae().cuda()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4, momentum=0.9)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
for epoch in range(2):
    total = 0.0
    for _ in range(3):
        x = torch.rand(128, 3, 64, 64, device="cuda")
        again, mean, log_variance = model(x)
        rebuilt = F.binary_cross_entropy(again, x, reduction="sum")
        loss = rebuilt - 0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    plateau.step(total)
    print(epoch, total, optimizer.param_groups[0]["lr"])
with torch.no_grad():
    images = model.decode(torch.randn(64, 128, device="cuda")).cpu().numpy()
print(images.shape, float(images.mean()))
