"""A graph network by hand: message passing with index_add_ and scatter softmax, NAdam, dropout."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
nodes, edges, width = 20000, 120000, 128
features = torch.randn(nodes, 300).cuda()
source, target = torch.randint(0, nodes, (2, edges)).cuda()
labels = torch.randint(0, 16, (nodes,)).cuda()
train = torch.rand(nodes).cuda() < 0.6


class Layer(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.message, self.own, self.score = nn.Linear(a, b), nn.Linear(a, b), nn.Linear(2 * b, 1)

    def forward(self, x):
        m, s = self.message(x), self.own(x)
        weight = self.score(torch.cat([m[source], s[target]], 1)).squeeze(1)
        weight = (weight - weight.max()).exp()
        total = torch.zeros(nodes, device=x.device).index_add_(0, target, weight)
        weight = weight / total[target].clamp_min(1e-9)
        return s + torch.zeros_like(s).index_add_(0, target, weight[:, None] * m[source])


one, two = Layer(300, width).cuda(), Layer(width, 16).cuda()
optimizer = torch.optim.NAdam([*one.parameters(), *two.parameters()], lr=5e-3)
for epoch in range(4):
    scores = two(F.dropout(F.elu(one(features)), 0.5))
    loss = F.cross_entropy(scores[train], labels[train])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        right = (scores.argmax(1) == labels)[~train].float().mean().item()
    print(epoch, loss.item(), right)
