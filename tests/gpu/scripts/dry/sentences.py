"""Sentence embeddings: pairs in a batch, lengths that vary, a log in CSV, statistics of the allocator."""

import argparse
import csv
import json
import logging
import random
import tempfile
import time

import torch
from transformers import BertConfig, BertModel

p = argparse.ArgumentParser()
p.add_argument("--bs", type=int, default=32)
p.add_argument("--epochs", type=int, default=2)
p.add_argument("--out", default=tempfile.mkdtemp())
a = p.parse_args()
logging.basicConfig(level=logging.INFO)
log = logging.getLogger("train")
random.seed(0)
device = f"cuda:{torch.cuda.current_device()}"
log.info(
    "gpu %s %s cap %s", torch.cuda.get_device_name(0), torch.cuda.device_count(), torch.cuda.get_device_capability()
)
m = BertModel(
    BertConfig(num_hidden_layers=4, hidden_size=384, num_attention_heads=6, intermediate_size=1536),
    add_pooling_layer=False,
).to(device)
opt = torch.optim.AdamW(
    [
        {"params": [p for n, p in m.named_parameters() if "bias" not in n], "weight_decay": 0.01},
        {"params": [p for n, p in m.named_parameters() if "bias" in n], "weight_decay": 0.0},
    ],
    2e-05,
)


def emb(ids, mask):
    h = m(input_ids=ids, attention_mask=mask).last_hidden_state
    k = mask.unsqueeze(-1).to(h.dtype)
    return torch.nn.functional.normalize((h * k).sum(1) / k.sum(1).clamp(min=1e-09), dim=-1)


with open(f"{a.out}/log.csv", "w", newline="") as f:
    w = csv.writer(f)
    w.writerow(["step", "loss", "acc", "mem"])
    for _ep in range(a.epochs):
        for st in range(4):
            n = random.randint(20, 80)
            ids = torch.randint(5, 30000, (a.bs * 2, n))
            lens = torch.randint(5, n + 1, (a.bs * 2,))
            mask = (torch.arange(n)[None] < lens[:, None]).long()
            t0 = time.time()
            e = emb(ids.to(device), mask.to(device))
            q, d = e.chunk(2)
            sc = q @ d.T * 20
            y = torch.arange(a.bs, device=device)
            loss = torch.nn.functional.cross_entropy(sc, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            w.writerow([st, loss.item(), (sc.argmax(1) == y).float().mean().item(), torch.cuda.max_memory_reserved()])
            log.info("step %d %.3f %.1f it/s", st, loss, 1 / (time.time() - t0))
json.dump(
    {
        "loss": loss.item(),
        "stats": {k: v for k, v in torch.cuda.memory_stats().items() if k.startswith("allocated_bytes.all")},
    },
    open(f"{a.out}/r.json", "w"),
)
