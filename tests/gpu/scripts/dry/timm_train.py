import csv

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import AverageMeter, ModelEmaV2, NativeScaler, accuracy

model = timm.create_model("convnext_atto", num_classes=100).cuda()
ema = ModelEmaV2(model, decay=0.99)
mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=100)
opt = create_optimizer_v2(model, opt="lamb", lr=1e-3, weight_decay=0.05)
sched = CosineLRScheduler(opt, t_initial=3)
scaler = NativeScaler()
lossf = SoftTargetCrossEntropy()
with open("/tmp/timm.csv", "w") as f:
    w = csv.writer(f)
    for epoch in range(2):
        model.train()
        meter = AverageMeter()
        for _ in range(3):
            x, y = torch.randn(16, 3, 160, 160).cuda(), torch.randint(0, 100, (16,)).cuda()
            x, y = mixup(x, y)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = lossf(model(x), y)
            opt.zero_grad()
            scaler(loss, opt, clip_grad=1.0, parameters=model.parameters())
            ema.update(model)
            meter.update(loss.item(), 16)
        sched.step(epoch)
        model.eval()
        with torch.no_grad():
            out = ema.module(torch.randn(32, 3, 160, 160).cuda())
            a1, a5 = accuracy(out, torch.randint(0, 100, (32,)).cuda(), topk=(1, 5))
        w.writerow([epoch, meter.avg, a1.item(), a5.item()])
        torch.save(
            {"model": model.state_dict(), "opt": opt.state_dict(), "ema": ema.module.state_dict()}, "/tmp/timm.pt"
        )
c = torch.load("/tmp/timm.pt", map_location="cuda")
model.load_state_dict(c["model"])
opt.load_state_dict(c["opt"])
print("done", torch.cuda.max_memory_allocated() // 2**20)
