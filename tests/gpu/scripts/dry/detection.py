import torch
import torchvision
from torch.utils.data import DataLoader, Dataset


class Boxes(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        n = 1 + i % 4
        xy = torch.rand(n, 2) * 100
        boxes = torch.cat([xy, xy + 20 + torch.rand(n, 2) * 80], 1)
        return torch.rand(3, 256, 320), {"boxes": boxes, "labels": torch.randint(1, 5, (n,))}


def collate(batch):
    return tuple(zip(*batch))


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = torchvision.models.detection.fasterrcnn_resnet50_fpn(
    weights=None, weights_backbone=None, num_classes=5, min_size=256, max_size=320
).to(device)
loader = DataLoader(Boxes(), batch_size=2, shuffle=True, collate_fn=collate)
opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.005, momentum=0.9)
model.train()
for images, targets in loader:
    images = [i.to(device) for i in images]
    targets = [{k: v.to(device) for k, v in t.items()} for t in targets]
    losses = model(images, targets)
    loss = sum(losses.values())
    if not torch.isfinite(loss):
        raise SystemExit("nan")
    opt.zero_grad()
    loss.backward()
    opt.step()
    print({k: round(v.item(), 3) for k, v in losses.items()})
model.eval()
with torch.no_grad():
    out = model([torch.rand(3, 256, 320, device=device)])
print(out[0]["boxes"].shape, out[0]["scores"].cpu().numpy().tolist()[:3])
