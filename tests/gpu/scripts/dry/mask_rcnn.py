"""Instance segmentation: Mask R-CNN, images of several sizes, evaluation after each epoch."""

import torch
from torch.utils.data import DataLoader, Dataset
from torchvision.models.detection import maskrcnn_resnet50_fpn


class Shapes(Dataset):
    def __init__(self, count, seed):
        self.count, self.seed = count, seed

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed + i)
        h, w = (240, 320) if i % 2 else (320, 240)
        n = int(torch.randint(1, 5, (1,), generator=g))
        x1, y1 = torch.rand(n, generator=g) * w * 0.5, torch.rand(n, generator=g) * h * 0.5
        boxes = torch.stack([x1, y1, x1 + 20 + torch.rand(n, generator=g) * w * 0.3, y1 + 20 + h * 0.2], 1)
        masks = torch.zeros(n, h, w, dtype=torch.uint8)
        for k, (a, b, c, d) in enumerate(boxes.int().tolist()):
            masks[k, b:d, a:c] = 1
        labels = torch.randint(1, 4, (n,), generator=g)
        return torch.rand(3, h, w, generator=g), {"boxes": boxes, "labels": labels, "masks": masks}


def collate(batch):
    return list(zip(*batch))


torch.manual_seed(0)
device = "cuda"
model = maskrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=4, min_size=240, max_size=320)
model.to(device)
params = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(params, lr=1e-4)
train = DataLoader(Shapes(8, 0), batch_size=2, shuffle=True, collate_fn=collate)
test = DataLoader(Shapes(2, 100), batch_size=1, collate_fn=collate)
for epoch in range(2):
    model.train()
    for images, targets in train:
        images = [image.to(device) for image in images]
        targets = [{name: value.to(device) for name, value in target.items()} for target in targets]
        loss = sum(model(images, targets).values())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
    model.eval()
    with torch.inference_mode():
        for images, _ in test:
            found = model([image.to(device) for image in images])[0]
            kept = found["scores"] > 0.5
            print(epoch, loss.item(), found["masks"][kept].shape[1:])
