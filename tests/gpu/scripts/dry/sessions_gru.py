"""A recommender: matrix factorisation with sampled negatives, and a packed GRU over sessions."""

import itertools
import sys
import time
from collections import deque

import torch
import torch.nn as nn

torch.manual_seed(4)
U, N, D = (20000, 5000, 64)
u, it = (nn.Embedding(U, D, device="cuda"), nn.Embedding(N, D, sparse=False, device="cuda"))
gru = nn.GRU(D, 128, batch_first=True, bidirectional=True).cuda()
head = nn.Linear(256, N).cuda()
opt = torch.optim.Adam(
    itertools.chain(u.parameters(), it.parameters(), gru.parameters(), head.parameters()), amsgrad=True
)
hist = deque(maxlen=3)
t0 = time.time()
step = 0
while step < 6 and time.time() - t0 < 60:
    uu = torch.randint(U, (512,)).cuda()
    pos = torch.randint(N, (512,)).cuda()
    neg = torch.randint(N, (512, 20)).cuda()
    s = (u(uu) * it(pos)).sum(-1, keepdim=True) - torch.einsum("bd,bnd->bn", u(uu), it(neg))
    bpr = -nn.functional.logsigmoid(s).mean()
    seqs = nn.utils.rnn.pad_sequence(
        [torch.randint(1, N, (n,)) for n in torch.randint(3, 30, (64,)).tolist()], batch_first=True
    )
    lens = (seqs > 0).sum(1)
    pk = nn.utils.rnn.pack_padded_sequence(it(seqs.cuda()), lens, batch_first=True, enforce_sorted=False)
    o, _ = gru(pk)
    o, _ = nn.utils.rnn.pad_packed_sequence(o, batch_first=True)
    nxt = nn.functional.cross_entropy(head(o[:, :-1]).flatten(0, 1), seqs[:, 1:].cuda().flatten(), ignore_index=0)
    loss = bpr + nxt
    loss.backward()
    opt.step()
    opt.zero_grad()
    hist.append(loss.item())
    step += 1
    if len(hist) == 3 and max(hist) - min(hist) < 1e-06 and (step > 100):
        break
    sys.stdout.write(f"\r{step} {hist[-1]:.3f} {torch.cuda.memory_allocated() / 1000000.0:.1f}MB")
top = torch.topk(u.weight[:10] @ it.weight.T, 10).indices.cpu().numpy()
print(top.shape, {tuple(r)[:2] for r in top.tolist()})
