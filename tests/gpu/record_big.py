"""Record a real run of millions of allocator events on a GPU, for ``benchmarks/bench_big.py`` to measure.

    python3 tests/gpu/record_big.py OUT.pickle [--events 8000000] [--seconds 120]

A small eager transformer on batches of varying length: its kernels take no time, so the allocator is asked as often as
Python can. Stops when the allocator's own counters say that the ring holds enough, or when the time is up. The file is
what PyTorch's own dump writes.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path

import torch
from torch import nn

WIDTH, HEADS, LAYERS, VOCABULARY, BATCH = 64, 4, 8, 512, 2
LENGTHS = (32, 160)


class Block(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        weights = (q @ k.transpose(-1, -2) / (WIDTH / HEADS) ** 0.5).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.after(x))))


class Model(nn.Module):
    """The layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def events(device: torch.device) -> int:
    """Events that the allocator has recorded: an allocation makes one, a free two."""
    counted = torch.cuda.memory_stats(device)
    allocated, freed = (counted[f"allocation.all.{kind}"] for kind in ("allocated", "freed"))
    return int(allocated + 2 * freed + counted["segment.all.allocated"])


def train(device: torch.device, wanted: int, seconds: float) -> int:
    """Steps until the ring holds enough, or the time is up; returns how many steps that were."""
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    began, step = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        length = int(torch.randint(*LENGTHS, ()))
        ids = torch.randint(VOCABULARY, (BATCH, length + 1), device=device)
        logits = model(ids[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 50 == 0 and device.type == "cuda" and events(device) >= wanted:
            break
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--events", type=int, default=8_000_000)
    parser.add_argument("--seconds", type=float, default=120.0, help="of training, at the most")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.manual_seed(0)
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=2 * args.events, stacks="python")
    began = time.monotonic()
    steps = train(device, args.events, args.seconds)
    print(f"{steps:,} steps in {time.monotonic() - began:.0f} s", flush=True)
    if device.type != "cuda":
        return
    torch.cuda.synchronize()
    counted = events(device)  # recording goes on: to end it would empty the ring
    gc.disable()  # the dump builds an object an event, and each collection would walk them all
    began = time.monotonic()
    torch.cuda.memory._dump_snapshot(str(args.out))
    size_mib = args.out.stat().st_size / 2**20
    print(f"{counted:,} events by the counters, {size_mib:,.0f} MiB, dumped in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
