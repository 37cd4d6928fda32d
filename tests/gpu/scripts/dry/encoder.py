"""nn.TransformerEncoder on padded sentences of random lengths, SGD with momentum, fp32."""

import random

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

random.seed(1)
model = nn.ModuleDict(
    {
        "embed": nn.Embedding(5000, 256, padding_idx=0),
        "encoder": nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.1, batch_first=True), 4),
        "head": nn.Linear(256, 2),
    }
).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
for step in range(6):
    texts = [torch.randint(1, 5000, (random.randint(64, 300),)) for _ in range(32)]
    ids = pad_sequence(texts, batch_first=True).cuda()
    labels = torch.randint(0, 2, (32,)).cuda()
    padding = ids.eq(0)
    states = model["encoder"](model["embed"](ids), src_key_padding_mask=padding)
    kept = (~padding).unsqueeze(-1).float()
    loss = nn.functional.cross_entropy(model["head"]((states * kept).sum(1) / kept.sum(1)), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    print(step, tuple(ids.shape), round(loss.item(), 3))
