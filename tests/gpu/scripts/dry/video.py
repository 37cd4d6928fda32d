"""Action recognition: 3D convolutions on clips, bf16, label smoothing, warm-up, accuracy over the test clips."""

import torch
from torch import nn
from torchvision.models.video import r3d_18

torch.manual_seed(0)
model = r3d_18(num_classes=20).cuda()
decayed = [p for p in model.parameters() if p.ndim > 1]
others = [p for p in model.parameters() if p.ndim <= 1]
groups = [{"params": decayed, "weight_decay": 1e-4}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
for step in range(4):
    clips = torch.randn(4, 3, 8, 96, 96).pin_memory().cuda(non_blocking=True)
    labels = torch.randint(0, 20, (4,)).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        loss = criterion(model(clips), labels)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    schedule.step()
    print(step, f"{loss.item():.3f}")
model.eval()
right = seen = 0
with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
    for size in (6, 6, 3):
        scores = model(torch.randn(size, 3, 8, 96, 96, device="cuda")).softmax(-1)
        right += (scores.argmax(-1) == torch.randint(0, 20, (size,), device="cuda")).sum().item()
        seen += size
print(right / seen)
