"""Point clouds: farthest points, neighbours by distance, grouped features, a Chamfer loss beside the classes."""

import torch
import torch.nn.functional as F
from torch import nn


def farthest(points, count):
    batch, total, _ = points.shape
    chosen = torch.zeros(batch, count, dtype=torch.long, device=points.device)
    distance = torch.full((batch, total), 1e10, device=points.device)
    last = torch.randint(0, total, (batch,), device=points.device)
    rows = torch.arange(batch, device=points.device)
    for i in range(count):
        chosen[:, i] = last
        centre = points[rows, last].unsqueeze(1)
        distance = torch.minimum(distance, ((points - centre) ** 2).sum(-1))
        last = distance.argmax(-1)
    return chosen


def taken(values, index):
    rows = torch.arange(values.shape[0], device=values.device).view(-1, *[1] * (index.dim() - 1))
    return values[rows, index]


class Abstraction(nn.Module):
    def __init__(self, count, neighbours, inputs, outputs):
        super().__init__()
        self.count, self.neighbours = count, neighbours
        self.mlp = nn.Sequential(
            nn.Conv2d(inputs + 3, outputs, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
        )  # fmt: skip

    def forward(self, points, features):
        centres = taken(points, farthest(points, self.count))
        near = torch.cdist(centres, points).topk(self.neighbours, largest=False).indices
        grouped = taken(points, near) - centres.unsqueeze(2)
        if features is not None:
            grouped = torch.cat([grouped, taken(features, near)], -1)
        return centres, self.mlp(grouped.permute(0, 3, 1, 2)).amax(-1).transpose(1, 2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Abstraction(256, 32, 0, 64), Abstraction(64, 32, 64, 128)
        self.head = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.4), nn.Linear(128, 40))
        self.rebuild = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 3 * 512))

    def forward(self, points):
        centres, features = self.first(points, None)
        _, features = self.second(centres, features)
        whole = features.amax(1)
        return self.head(whole), self.rebuild(whole).view(-1, 512, 3)


torch.manual_seed(5)
model = Net().cuda()
optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)
for step in range(4):
    points = torch.rand(16, 1024, 3).cuda()
    points = points[:, torch.rand(1024, device="cuda").argsort()[:896]]
    labels = torch.randint(0, 40, (16,)).cuda()
    scores, rebuilt = model(points)
    apart = torch.cdist(rebuilt, points)
    chamfer = apart.min(1).values.mean() + apart.min(2).values.mean()
    loss = F.cross_entropy(scores, labels) + 0.1 * chamfer
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), (scores.argmax(-1) == labels).float().mean().item())
