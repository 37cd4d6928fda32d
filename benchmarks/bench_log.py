"""How fast a training log is read, as ratios against plain reading and a grep-like scan of the same file in this run.

    python benchmarks/bench_log.py [--megabytes 200]

Two made-up logs: one with a single out-of-memory message in the middle of ordinary lines (metrics, progress bars,
warnings that speak of memory), one that is nothing but different messages. Peak memory is that of the whole process.
"""
# ruff: noqa: E501  (the message stands as it is printed)

from __future__ import annotations

import argparse
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from memtrace.oomlog import read_log

MESSAGE = (
    "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried:.2f} GiB. GPU 0 has a total capacity of "
    "79.21 GiB of which 259.19 MiB is free. Including non-PyTorch memory, this process has 78.44 GiB memory in use. Of the "
    "allocated memory {allocated:.2f} GiB is allocated by PyTorch, and 6.78 GiB is reserved by PyTorch but unallocated.\n"
)


def ordinary_lines(count: int, seed: int) -> str:
    """Lines as a training run prints them."""
    rng = random.Random(seed)
    lines = []
    for step in range(count):
        kind = rng.random()
        if kind < 0.4:
            lines.append(
                f"{{'loss': {rng.random():.4f}, 'grad_norm': {rng.random():.3f}, 'epoch': {step / 500:.2f}}}\n"
            )
        elif kind < 0.7:
            memory = f"max_memory_allocated: {rng.random() * 80:.2f} GiB | reserved 70.1 GiB"
            lines.append(f"2025-05-12 17:31:{step % 60:02d},123 - INFO - step {step} | {memory} | tokens/s 12345\n")
        elif kind < 0.9:
            lines.append(f" {step % 100}%|████████▌ | {step}/{count} [12:34<15:22,  1.68s/it]\r")
        else:
            lines.append(f"[rank{step % 8}]:[W512 17:31:38 ProcessGroupNCCL.cpp:1234] {step} out of {count} done\n")
    return "".join(lines)


def write_ordinary(path: Path, size: int) -> None:
    """One message between ordinary lines."""
    block = ordinary_lines(20_000, 1).encode()
    with path.open("wb") as out:
        while out.tell() < size // 2:
            out.write(block)
        out.write(MESSAGE.format(tried=1.68, allocated=70.48).encode())
        while out.tell() < size:
            out.write(block)


def write_dense(path: Path, size: int) -> None:
    """Messages only, all different."""
    rng = random.Random(2)
    with path.open("wb") as out:
        while out.tell() < size:
            for _ in range(1000):
                out.write(MESSAGE.format(tried=1 + rng.random() * 9, allocated=1 + rng.random() * 69).encode())


def seconds(work: Callable[[], object]) -> float:
    """Best of three, in processor time: other work on the machine does not count."""
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


def plain_read(path: Path) -> None:
    """Read the file in blocks of a megabyte."""
    with path.open("rb") as file:
        while file.read(1 << 20):
            pass


def grep(path: Path) -> None:
    """What ``grep -ci`` for two words would do: read, lower, count."""
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            low = block.lower()
            low.count(b"out of memory")
            low.count(b"tried to allocate")


def main() -> int:
    """Print one line a log."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    size = parser.parse_args().megabytes * 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        for name, write in (("ordinary", write_ordinary), ("dense", write_dense)):
            path = Path(folder) / f"{name}.log"
            write(path, size)
            reading, scanning = seconds(lambda p=path: plain_read(p)), seconds(lambda p=path: grep(p))
            taken = seconds(lambda p=path: read_log(p.open("rb")))
            result = read_log(path.open("rb"))
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(
                f"{name:9} {path.stat().st_size / 1e6:.0f} MB: {taken:.2f} CPU s = {taken / reading:.0f} x reading, "
                f"{taken / scanning:.1f} x grep; {len(result.messages)} messages"
                f"{' (stopped keeping)' if result.stopped_early else ''}; peak {peak:.0f} MB"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
