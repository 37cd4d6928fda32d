"""nn.DataParallel, exponential averages of the weights, GradScaler, activations kept on the host, a checkpoint resumed."""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

device = torch.device("cuda:0")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(1024, 2048)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(2048), nn.Linear(2048, 2048), nn.GELU()) for _ in range(6)
        )
        self.last = nn.Linear(2048, 1000)

    def forward(self, x):
        x = self.first(x)
        with save_on_cpu(pin_memory=True):
            for block in self.blocks[:3]:
                x = x + block(x)
        for block in self.blocks[3:]:
            x = x + block(x)
        return self.last(x)


def made():
    model = nn.DataParallel(Net()).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=False)


model, optimizer = made()
average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.999))
scaler = torch.amp.GradScaler()
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=6)
with tempfile.TemporaryDirectory() as folder:
    for step in range(6):
        if step == 3:
            path = Path(folder) / "last.pt"
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path)
            kept = torch.load(path, map_location=device)
            model, optimizer = made()
            model.load_state_dict(kept["model"])
            optimizer.load_state_dict(kept["optimizer"])
        x, y = torch.randn(2048, 1024), torch.randint(0, 1000, (2048,))
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not torch.isfinite(norm):
            print("skipped")
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        average.update_parameters(model.module)
        print(step, loss.item(), norm.item())
average.eval()
with torch.no_grad():
    print(average(torch.randn(256, 1024, device=device)).softmax(-1).max().item())
