"""A ResNet written by hand on 64x64 images, SGD with nesterov, channels last, bf16 autocast, top-1 accuracy."""

import torch
from torch import nn


def conv(a, b, stride=1):
    return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b))


class Block(nn.Module):
    def __init__(self, a, b, stride):
        super().__init__()
        self.one, self.two = conv(a, b, stride), conv(b, b)
        self.short = (
            nn.Identity()
            if a == b and stride == 1
            else nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b))
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.two(self.relu(self.one(x))) + self.short(x))


layers, width = [], 64
for b, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
    layers.append(Block(width, b, stride))
    width = b
model = nn.Sequential(
    nn.Conv2d(3, 64, 7, 2, 3, bias=False),
    nn.BatchNorm2d(64),
    nn.ReLU(inplace=True),
    nn.MaxPool2d(3, 2, 1),
    *layers,
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(512, 100),
)
model = model.cuda().to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
for step in range(4):
    images = torch.randn(64, 3, 128, 128).cuda(non_blocking=True).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 100, (64,)).cuda(non_blocking=True)
    with torch.autocast("cuda", torch.bfloat16):
        logits = model(images)
        loss = criterion(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), (logits.argmax(1) == labels).float().mean().item())
