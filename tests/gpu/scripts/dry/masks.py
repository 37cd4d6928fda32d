"""A masked language model by hand: boolean masks, nonzero, unique, tolist, sorting by length, metrics on the host."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(3)
embed = nn.Embedding(3000, 384)
body = nn.GRUCell(384, 384)
mixer = nn.Sequential(nn.Linear(384, 1536), nn.ReLU(), nn.Linear(1536, 384), nn.LayerNorm(384))
head = nn.Linear(384, 3000)
model = nn.ModuleList([embed, body, mixer, head]).cuda()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
for step in range(4):
    lengths = torch.randint(40, 120, (48,)).sort(descending=True).values
    ids = torch.randint(1, 3000, (48, 120))
    ids[torch.arange(120)[None, :] >= lengths[:, None]] = 0
    ids = ids.cuda()
    real = ids != 0
    chosen = (torch.rand(ids.shape) < 0.15).cuda() & real
    masked = ids.masked_fill(chosen, 2999)
    x = mixer(embed(masked))
    places = chosen.nonzero()
    logits = head(x[chosen])
    loss = F.cross_entropy(logits, ids[chosen])
    state = body(x[:, 0], x[:, -1])
    loss = loss + 1e-3 * state.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    kinds = torch.unique(ids[real])
    print(step, tuple(places.shape), len(kinds.tolist()), logits.argmax(-1).cpu().numpy().shape, int(real.sum()))
