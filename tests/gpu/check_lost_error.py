"""On a GPU: does PyTorch lose the error by which checkpointing ends a recomputation, and does memtrace keep it?

    python tests/gpu/check_lost_error.py

PyTorch 2.11 under Python before 3.13 loses it wherever a free's stack is recorded (pytorch/pytorch issue 179536). Each
way of recording runs a small program in a process of its own; under memtrace it must end well with any PyTorch.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = """
import sys, torch
from torch.utils.checkpoint import checkpoint
HISTORY
layer = torch.nn.Linear(512, 512).cuda()
def block(x):
    return torch.nn.functional.dropout(torch.nn.functional.gelu(layer(x)), 0.1, True)
for _ in range(3):
    x = torch.randn(64, 512, device="cuda", requires_grad=True)
    checkpoint(block, x, use_reentrant=False).sum().backward()
"""
HISTORIES = {
    "nothing recorded": "",
    "context all": 'torch.cuda.memory._record_memory_history(stacks="python", context="all")',
    "context alloc": 'torch.cuda.memory._record_memory_history(stacks="python", context="alloc")',
    "context none": "torch.cuda.memory._record_memory_history(context=None)",
}
MEMTRACE = {"memtrace run": [], "memtrace run --stacks none --live": ["--stacks", "none", "--live"]}


def main() -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "program.py"
        for name in (*HISTORIES, *MEMTRACE):
            file.write_text(PROGRAM.replace("HISTORY", HISTORIES.get(name, "")))
            memtrace = ["-m", "memtrace", "run", "--out", scratch, *MEMTRACE.get(name, [])] if name in MEMTRACE else []
            command = [sys.executable, *memtrace, str(file)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            end = (done.stderr.strip().splitlines() or [""])[-1] if done.returncode else "ends well"
            print(f"{name}: {end}", flush=True)
            failed += name in MEMTRACE and done.returncode != 0
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
