"""A DDP QLoRA script that knows nothing of memtrace: the last rank runs out of memory in step 2.

Ranks without a GPU of their own share one (``sharing.py``).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from common import make_lora, tighten
from sharing import apart
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

gpus = torch.cuda.device_count()
os.environ |= apart(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), gpus)
dist.init_process_group("nccl")
rank = dist.get_rank()
place = rank % gpus
torch.cuda.set_device(place)
model = AutoModelForCausalLM.from_pretrained(
    sys.argv[1],
    quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16),
    device_map={"": place},
    dtype=torch.bfloat16,
)
model = DistributedDataParallel(make_lora(model), device_ids=[place])
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
for step in range(5):
    if step == 2 and rank == dist.get_world_size() - 1:
        tighten()
    ids = torch.randint(0, 32000, (1, 1024), device=f"cuda:{place}")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"rank {rank} step {step}", flush=True)
