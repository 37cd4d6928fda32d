"""How long NCCL holds the gradient buckets that DistributedDataParallel has given up: one rank, one GPU.

    python tests/gpu/check_held_buckets.py

DDP makes its buckets anew before the second step. The process group keeps the tensors of a collective until its
watchdog, a thread that looks every 0.1 s, saw the collective end, and the program asked for another one. So in a
program of short steps the first set should stand beside the second one, and in one that pauses it should not. Prints a
line of JSON a pause (seconds): the peak of requested bytes in each step, and the bytes of one set.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

import torch
from torch import nn

LAYERS, WIDTH, STEPS = 16, 2048, 4
PAUSES_S = (0.0, 0.5)


def _one(pause_s: float) -> None:
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).cuda()
    batch = torch.randn(8, WIDTH, device="cuda")
    model(batch).sum().backward()  # kernels are loaded
    model.zero_grad()
    torch.distributed.all_reduce(batch)
    wrapped = nn.parallel.DistributedDataParallel(model)
    peaks = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        time.sleep(pause_s)
        torch.distributed.all_reduce(batch)
        torch.cuda.reset_peak_memory_stats()
        wrapped(batch).sum().backward()
        model.zero_grad()
        peaks.append(torch.cuda.memory_stats()["requested_bytes.all.peak"])
    print(json.dumps({"pause_s": pause_s, "peaks_bytes": peaks, "set_bytes": LAYERS * WIDTH * WIDTH * 4}))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _one(float(sys.argv[1]))
    else:
        for pause in PAUSES_S:
            subprocess.run([sys.executable, __file__, str(pause)], check=True)
