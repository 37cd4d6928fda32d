"""A small training program that knows nothing of memtrace, for the ways in which things go wrong."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOO_MUCH = 1 << 44 if DEVICE == "cuda" else 1 << 26


def train(steps: int, pause: float = 0.0) -> None:
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        model(torch.randn(16, 256, device=DEVICE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(pause)
        if step == 0:
            print("pid", os.getpid(), flush=True)


if __name__ == "__main__":
    mode = sys.argv[1] if len(sys.argv) > 1 else "plain"
    if mode == "spawn":
        child = multiprocessing.get_context("spawn").Process(target=train, args=(20,))
        child.start()
        child.join()
        sys.exit(child.exitcode)
    if mode == "retry":
        train(3)
        for count in (TOO_MUCH, 64):
            try:
                torch.zeros(count, device=DEVICE)
                break
            except torch.OutOfMemoryError:
                print("caught", flush=True)
    if mode == "stops":
        train(3)
        torch.cuda.memory._record_memory_history(enabled=None)
    if mode == "slow":
        train(2000, 0.02)
    train(50)
    print("trained", flush=True)
