import copy
import math

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset, random_split

ds = TensorDataset(torch.randn(2000, 256), torch.randint(0, 5, (2000,)))
tr, va = random_split(ds, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
loader = DataLoader(
    tr, batch_size=100, shuffle=True, num_workers=2, pin_memory=True, persistent_workers=True, drop_last=True
)
valid = DataLoader(va, 200, num_workers=1, pin_memory=True)
net = torch.nn.Sequential(
    torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Dropout(), torch.nn.Linear(1024, 5)
).cuda()
start = copy.deepcopy(net.state_dict())
opt = torch.optim.NAdam(net.parameters(), 1e-7)
mult = (10 / 1e-7) ** (1 / 30)
best, lrs, losses, avg = 0.0, [], [], 0.0
it = iter(loader)
num = 0
while opt.param_groups[0]["lr"] < 10:
    try:
        x, y = next(it)
    except StopIteration:
        it = iter(loader)
        x, y = next(it)
    num += 1
    x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
    loss = torch.nn.functional.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    avg = 0.98 * avg + 0.02 * loss.item()
    smooth = avg / (1 - 0.98**num)
    if num > 1 and smooth > 4 * best:
        break
    if smooth < best or num == 1:
        best = smooth
    lrs.append(opt.param_groups[0]["lr"])
    losses.append(math.log10(smooth))
    opt.param_groups[0]["lr"] *= mult
net.load_state_dict(start)
opt = torch.optim.LBFGS(net.parameters(), max_iter=4)
X, Y = ds.tensors[0].cuda(), ds.tensors[1].cuda()


def closure():
    opt.zero_grad()
    loss = torch.nn.functional.cross_entropy(net(X), Y)
    loss.backward()
    return loss


prev = None
for i in range(50):
    value = opt.step(closure).item()
    if prev is not None and abs(prev - value) < 1e-6:
        print("converged", i)
        break
    prev = value
net.eval()
ps, ys = [], []
with torch.no_grad():
    for x, y in valid:
        ps.append(net(x.cuda()).softmax(1).cpu().numpy())
        ys.append(y.numpy())
p, y = np.concatenate(ps), np.concatenate(ys)
conf = np.zeros((5, 5), int)
for a, b in zip(p.argmax(1), y):
    conf[a, b] += 1
prec = conf.diagonal() / conf.sum(1).clip(1)
print("acc", (p.argmax(1) == y).mean(), "f1", prec)
assert p.min() >= 0 and p.max() <= 1.0 + 1e-6
