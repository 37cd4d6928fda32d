import torch
from torch import nn
from transformers import BertConfig, BertModel, get_linear_schedule_with_warmup

cfg = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
bert = BertModel(cfg, add_pooling_layer=False).cuda()


def encode(ids, mask):
    h = bert(ids, attention_mask=mask).last_hidden_state
    m = mask.unsqueeze(-1).float()
    return nn.functional.normalize((h * m).sum(1) / m.sum(1).clamp(min=1e-9), dim=-1)


opt = torch.optim.AdamW(bert.parameters(), 2e-5)
sched = get_linear_schedule_with_warmup(opt, 2, 6)
cache = []
for step in range(6):
    L = 32 + 16 * (step % 3)

    def batch(L=L):
        ids = torch.randint(0, 30000, (32, L))
        lens = torch.randint(8, L + 1, (32,))
        return ids.cuda(), (torch.arange(L)[None] < lens[:, None]).long().cuda()

    a, b = encode(*batch()), encode(*batch())
    scores = a @ b.T * 20
    loss = nn.functional.cross_entropy(scores, torch.arange(32, device="cuda"))
    loss.backward()
    opt.step()
    sched.step()
    opt.zero_grad()
    cache.append(a.detach().cpu())
    if step % 2 == 0:
        bert.eval()
        with torch.no_grad():
            e = torch.cat([encode(*batch()) for _ in range(4)])
        sim = e @ e.T
        sim.fill_diagonal_(-1)
        top = sim.topk(5).indices.cpu().numpy()
        bert.train()
        print(step, loss.item(), top.shape, top[0])
