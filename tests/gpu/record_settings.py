"""Record one workload under several allocator settings on a real GPU: material to check what-if replays against.

    python3 tests/gpu/record_settings.py --out DIR [--workers 4] [--only NAME …]

Every run is a fresh process with the same seeds: a small transformer block stack without checkpointing on batches of
varying length, which is what makes memory fragment. Each leaves ``NAME.pickle.xz`` and ``NAME.info.json`` (settings,
limit, statistics, the refused request if it ran out of memory).
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# name -> (allocator settings, limit in GiB of reserved memory or None)
SETTINGS: dict[str, tuple[str, float | None]] = {
    "default": ("", None),
    "expandable": ("expandable_segments:True", None),
    "split128": ("max_split_size_mb:128", None),
    "split64": ("max_split_size_mb:64", None),
    "roundup4": ("roundup_power2_divisions:4", None),
    "roundup8": ("roundup_power2_divisions:8", None),
    "gc60": ("garbage_collection_threshold:0.6", 9.0),
    "gc80": ("garbage_collection_threshold:0.8", 9.0),
    "capped9": ("", 9.0),
    "capped7": ("", 7.0),
    "capped5": ("", 5.0),
    "expandable5": ("expandable_segments:True", 5.0),
}
WIDTH, FEED, LAYERS, STEPS, VOCABULARY = 2048, 5504, 10, 14, 32000


def work(name: str, out: Path) -> None:
    """One recorded run in this process."""
    import torch
    from torch import nn

    conf, limit_gib = SETTINGS[name]
    total = torch.cuda.get_device_properties(0).total_memory
    limit_bytes = None
    if limit_gib is not None:
        fraction = limit_gib * 2**30 / total
        torch.cuda.set_per_process_memory_fraction(fraction)
        limit_bytes = int(fraction * total)
    torch.manual_seed(0)
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python")

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, FEED), nn.Linear(FEED, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (part.unflatten(-1, (16, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
            attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).flatten(2))
            return x + self.down(nn.functional.gelu(self.up(self.after(x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    model = Model().cuda()
    for weight in [model.embed.weight, model.head.weight]:
        weight.requires_grad_(False)
    trained = [weight for weight in model.parameters() if weight.requires_grad][::4]
    for weight in model.parameters():
        weight.requires_grad_(any(weight is t for t in trained))
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    lengths = random.Random(7)
    refused = None
    try:
        for _ in range(STEPS):
            tokens = lengths.randint(128, 1499)
            ids = torch.randint(0, VOCABULARY, (1, tokens + 1)).cuda()
            logits = model(ids[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            del logits, loss
            optimizer.step()
            optimizer.zero_grad()
    except torch.OutOfMemoryError as error:
        refused = str(error)
    snapshot = torch.cuda.memory._snapshot()
    statistics = {k: v for k, v in torch.cuda.memory_stats().items() if ".all." in k or k.startswith("num_")}
    import pickle

    (out / f"{name}.pickle.xz").write_bytes(lzma.compress(pickle.dumps(snapshot, 4), preset=6))
    info = {
        "name": name, "conf": conf, "limit_bytes": limit_bytes, "oom": refused, "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(0), "total_bytes": total, "stats": statistics,
        "events": len(snapshot["device_traces"][0]),
    }  # fmt: skip
    (out / f"{name}.info.json").write_text(json.dumps(info, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--only", nargs="*", default=list(SETTINGS))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.one:
        work(args.one, args.out)
        return

    def start(name: str) -> str:
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": SETTINGS[name][0]}
        command = [sys.executable, __file__, "--out", str(args.out), "--one", name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
        return f"{name}: exit {done.returncode} {done.stderr[-400:] if done.returncode else ''}"

    with ThreadPoolExecutor(args.workers) as pool:
        for line in pool.map(start, args.only):
            print(line, flush=True)


if __name__ == "__main__":
    main()
