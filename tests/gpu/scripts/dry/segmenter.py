"""Segmentation: an encoder with dilation and skip connections, transposed convolutions, dice loss, mean IoU."""

import torch
from torch import nn


def block(a, b, dilation=1):
    return nn.Sequential(
        nn.Conv2d(a, b, 3, padding=dilation, dilation=dilation, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.1, True),
        nn.Conv2d(b, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.1, True), nn.Dropout2d(0.1),
    )  # fmt: skip


class Segmenter(nn.Module):
    def __init__(self, classes, width=32):
        super().__init__()
        sizes = [width, 2 * width, 4 * width, 8 * width]
        self.downs = nn.ModuleList(block(a, b) for a, b in zip([3, *sizes[:-1]], sizes))
        self.deep = block(sizes[-1], sizes[-1], dilation=2)
        self.ups = nn.ModuleList(nn.ConvTranspose2d(2 * b, b, 2, 2) for b in sizes[-2::-1])
        self.merges = nn.ModuleList(block(2 * b, b) for b in sizes[-2::-1])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        kept = []
        for i, layer in enumerate(self.downs):
            x = layer(x if i == 0 else nn.functional.max_pool2d(x, 2))
            kept.append(x)
        x = self.deep(x)
        for up, merge, skip in zip(self.ups, self.merges, kept[-2::-1]):
            x = merge(torch.cat([up(x), skip], dim=1))
        return self.head(x)


model = Segmenter(21).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=4)
for step in range(4):
    images, truth = torch.randn(8, 3, 192, 192).cuda(), torch.randint(0, 22, (8, 192, 192)).cuda()
    truth[truth == 21] = 255
    logits = model(images)
    seen = truth != 255
    hot = nn.functional.one_hot(truth.clamp(max=20), 21).permute(0, 3, 1, 2).float() * seen[:, None]
    share = logits.softmax(1) * seen[:, None]
    dice = 1 - (2 * (share * hot).sum((0, 2, 3)) + 1) / (share.sum((0, 2, 3)) + hot.sum((0, 2, 3)) + 1)
    loss = nn.functional.cross_entropy(logits, truth, ignore_index=255) + dice.mean()
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    optimizer.step()
    schedule.step()
    with torch.no_grad():
        guess = logits.argmax(1)[seen]
        table = torch.bincount(21 * truth[seen] + guess, minlength=441).view(21, 21)
        union = table.sum(0) + table.sum(1) - table.diag()
        print(step, loss.item(), (table.diag() / union.clamp(min=1)).mean().item())
