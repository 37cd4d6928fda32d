"""A language model of LSTMs, truncated backpropagation through time."""

import torch
import torch.nn as nn


class LM(nn.Module):
    def __init__(s, v=5000, d=256, h=512, layers=2):
        super().__init__()
        s.e = nn.Embedding(v, d)
        s.r = nn.LSTM(d, h, layers, batch_first=True, dropout=0.2)
        s.o = nn.Linear(h, v)

    def forward(s, x, hc=None):
        y, hc = s.r(s.e(x), hc)
        return (s.o(y), hc)


m = LM().cuda()
opt = torch.optim.Adam(m.parameters(), 0.001)
data = torch.randint(0, 5000, (32, 2001))
hc = None
for i in range(0, 1000, 100):
    x = data[:, i : i + 100].cuda()
    y = data[:, i + 1 : i + 101].cuda()
    if hc is not None:
        hc = tuple(h.detach() for h in hc)
    out, hc = m(x, hc)
    loss = nn.functional.cross_entropy(out.reshape(-1, 5000), y.reshape(-1))
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(m.parameters(), 0.25)
    opt.step()
    print(i, float(loss), torch.exp(loss).item())
