"""Two text encoders with many negatives: embeddings first without a graph, their gradients, then pieces with one."""

import torch
import torch.nn.functional as F
from transformers import BertConfig, BertModel

torch.manual_seed(7)
config = BertConfig(
    vocab_size=8000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024,
    max_position_embeddings=256,
)  # fmt: skip
questions, passages = BertModel(config).cuda(), BertModel(config).cuda()
optimizer = torch.optim.AdamW([*questions.parameters(), *passages.parameters()], lr=2e-5)


def pooled(model, ids, mask):
    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    return F.normalize((hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True).clamp(min=1), dim=-1)


def texts(count, low, high):
    lengths = torch.randint(low, high, (count,))
    ids = torch.randint(1, 8000, (count, int(lengths.max())))
    mask = (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()
    return (ids * mask).cuda(), mask.cuda()


for step in range(3):
    sides = [(questions, *texts(96, 8, 40)), (passages, *texts(96, 60, 200))]
    cached = []
    for model, ids, mask in sides:
        states = []
        with torch.no_grad():
            for a, b in zip(ids.split(16), mask.split(16)):
                states.append(pooled(model, a, b))
        cached.append(torch.cat(states).requires_grad_())
    scores = cached[0] @ cached[1].T / 0.05
    hardest = scores.detach().masked_fill(torch.eye(96, dtype=torch.bool, device="cuda"), -1e4).topk(8, dim=1).indices
    margin = (scores.gather(1, hardest) - scores.diagonal().unsqueeze(1) + 1).clamp(min=0).mean()
    loss = F.cross_entropy(scores, torch.arange(96, device="cuda")) + 0.1 * margin
    loss.backward()
    for (model, ids, mask), vectors in zip(sides, cached):
        for a, b, gradient in zip(ids.split(16), mask.split(16), vectors.grad.split(16)):
            (pooled(model, a, b) * gradient).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, round(loss.item(), 4))
with torch.inference_mode():
    index = torch.cat([pooled(passages, *texts(64, 60, 200)) for _ in range(4)])
    asked = pooled(questions, *texts(10, 8, 40))
    print((asked @ index.T).topk(3).indices.cpu().shape)
