import torch
from torch import nn
from torch.func import functional_call, grad, vmap

net = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 10)).cuda()
params = dict(net.named_parameters())
x, y = torch.randn(64, 128).cuda(), torch.randint(0, 10, (64,)).cuda()


def loss(p, a, b):
    return nn.functional.cross_entropy(functional_call(net, p, (a[None],)), b[None])


for _ in range(3):
    per = vmap(grad(loss), in_dims=(None, 0, 0))(params, x, y)
    n = torch.stack([g.flatten(1).norm(dim=1) for g in per.values()]).norm(dim=0)
    clip = (1.0 / n).clamp(max=1)
    params = {
        k: (v - 0.1 * (per[k] * clip.view(-1, *[1] * (per[k].dim() - 1))).mean(0)).detach() for k, v in params.items()
    }
h = torch.autograd.functional.hessian(lambda w: (w @ x[0, :8]).sin().sum(), torch.randn(8, 8).cuda())
print(h.shape)
mu, U = torch.linalg.eigh(torch.randn(32, 32).cuda() @ torch.eye(32).cuda())
q, r = torch.linalg.qr(torch.randn(64, 32).cuda())
sv = torch.linalg.svdvals(r)
d = torch.cdist(torch.randn(100, 3).cuda(), torch.randn(200, 3).cuda())
i = d.topk(5, largest=False).indices
f = torch.fft.rfft2(torch.randn(8, 64, 64).cuda())
print(f.abs().mean().item(), i.shape)
s = torch.histc(torch.rand(1000).cuda(), 10)
k = torch.kthvalue(d, 3).values
c = torch.multinomial(torch.rand(10).cuda(), 3)
b = torch.bucketize(d, torch.linspace(0, 1, 5).cuda())
e = torch.einsum("bi,bj->bij", x, x)
w = torch.where(d > 1)[0].numel()
z = torch.nn.functional.grid_sample(torch.randn(1, 3, 32, 32).cuda(), torch.rand(1, 16, 16, 2).cuda() * 2 - 1)
print(w, z.shape, s.tolist(), c.tolist())
