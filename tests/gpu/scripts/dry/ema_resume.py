"""A CNN in fp16 with a scaler, an average of its weights, the best checkpoint loaded again."""

import copy
import tempfile

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
X = torch.randn(512, 3, 32, 32)
Y = torch.randint(0, 10, (512,))
dl = DataLoader(TensorDataset(X, Y), batch_size=64, shuffle=True, num_workers=2, pin_memory=True, drop_last=True)
net = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(32, 64, 3, padding=1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(64, 10),
).to(dev)
ema = copy.deepcopy(net)
for p in ema.parameters():
    p.requires_grad_(False)
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.0005)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, epochs=2, steps_per_epoch=len(dl))
scaler = torch.amp.GradScaler("cuda")
best = 0.0
kept = tempfile.mkdtemp() + "/best.pt"
for epoch in range(2):
    net.train()
    tot = 0.0
    for x, y in dl:
        x, y = (x.to(dev, non_blocking=True), y.to(dev, non_blocking=True))
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(net(x), y, label_smoothing=0.1)
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        gn = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        assert torch.isfinite(gn), "gradient exploded"
        scaler.step(opt)
        scaler.update()
        sched.step()
        with torch.no_grad():
            for a, b in zip(ema.parameters(), net.parameters()):
                a.lerp_(b, 0.01)
        tot += loss.item()
    net.eval()
    ok = n = 0
    with torch.inference_mode():
        for x, y in dl:
            out = ema(x.to(dev))
            ok += (out.argmax(1).cpu() == y).sum().item()
            n += len(y)
    acc = ok / n
    print(
        f"epoch {epoch} loss {tot / len(dl):.3f} acc {acc:.2%} mem {torch.cuda.max_memory_allocated() / 2**20:.1f} MiB"
    )
    if acc > best:
        best = acc
        torch.save({"model": net.state_dict(), "opt": opt.state_dict()}, kept)
ck = torch.load(kept, map_location=dev)
net.load_state_dict(ck["model"])
opt.load_state_dict(ck["opt"])
print(torch.cuda.memory_summary(abbreviated=True)[:200])
