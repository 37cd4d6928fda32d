import torch
from torch import nn

torch.manual_seed(1)
N, E = 5000, 40000
x = torch.randn(N, 128).cuda()
ei = torch.randint(0, N, (2, E)).cuda()
y = torch.randint(0, 7, (N,)).cuda()
train = torch.zeros(N, dtype=torch.bool)
train[torch.randperm(N)[:1000]] = True
train = train.cuda()
val = ~train


class GAT(nn.Module):
    def __init__(s, i, o, h=4):
        super().__init__()
        s.h, s.o = h, o
        s.l = nn.Linear(i, h * o)
        s.a = nn.Parameter(torch.randn(1, h, o))
        s.b = nn.Parameter(torch.randn(1, h, o))

    def forward(s, x, ei):
        z = s.l(x).view(-1, s.h, s.o)
        e = (z * s.a).sum(-1)[ei[0]] + (z * s.b).sum(-1)[ei[1]]
        e = torch.nn.functional.leaky_relu(e, 0.2)
        m = torch.full((x.shape[0], s.h), -1e9, device=x.device).scatter_reduce(
            0, ei[1][:, None].expand_as(e), e, "amax"
        )
        w = (e - m[ei[1]]).exp()
        d = torch.zeros_like(m).index_add(0, ei[1], w)
        w = w / d[ei[1]].clamp_min(1e-9)
        return torch.zeros_like(z).index_add(0, ei[1], z[ei[0]] * w[..., None]).flatten(1)


g1, g2 = GAT(128, 64).cuda(), GAT(256, 16).cuda()
head = nn.Linear(64, 7).cuda()
params = [*g1.parameters(), *g2.parameters(), *head.parameters()]
opt = torch.optim.Adam(params, 5e-3, weight_decay=5e-4)
best, wait, epoch = 0, 0, 0
while wait < 5 and epoch < 20:
    epoch += 1
    out = head(nn.functional.elu(g2(nn.functional.elu(g1(x, ei)), ei)))
    loss = nn.functional.cross_entropy(out[train], y[train])
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        pred = out.argmax(-1)
        acc = (pred[val] == y[val]).float().mean().item()
        conf = torch.bincount(y[val] * 7 + pred[val], minlength=49).view(7, 7)
    if acc > best:
        best, wait = acc, 0
    else:
        wait += 1
print(
    epoch,
    best,
    conf.sum().item(),
    torch.unique(pred).numel(),
    (torch.sort(out[:, 0]).values[-1] - out[:, 0].median()).item(),
)
