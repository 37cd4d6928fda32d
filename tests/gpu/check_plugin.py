"""The pytest plugin on a real GPU: limits kept and exceeded, an out-of-memory error, what was live before.

    python3 tests/gpu/check_plugin.py

Runs a small test file under pytest in a process of its own and checks what was reported. Exit code 1 on a mismatch.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

CASES = """
import pytest, torch

MIB = 1 << 20
kept = []

def take(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")

@pytest.mark.limit_gpu_memory("64 MiB")
def test_below():
    take(48 * MIB)

@pytest.mark.limit_gpu_memory("64 MiB")
def test_at_the_limit_to_the_byte():
    take(64 * MIB)

@pytest.mark.limit_gpu_memory("64 MiB")
def test_over_by_a_block():
    a = take(64 * MIB)
    b = take(1)

@pytest.mark.limit_gpu_memory("64 MiB")
def test_short_lived_peak():
    take(80 * MIB)
    take(1 * MIB)

def test_keeps_something():
    kept.append(take(40 * MIB))

@pytest.mark.limit_gpu_memory("64 MiB")
def test_what_was_live_before_counts():
    take(32 * MIB)

@pytest.mark.limit_gpu_memory("1 GiB")
def test_oom():
    kept.clear()
    take(1 << 50)

@pytest.mark.limit_gpu_memory("200 MiB")
def test_a_training_step():
    model = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(64, 1024, device="cuda")).sum().backward()
    optimizer.step()
"""

# test: (outcome, peak in MiB as --memtrace lists it or None)
EXPECTED = {
    "test_below": ("PASSED", "48.0 MiB"),
    "test_at_the_limit_to_the_byte": ("PASSED", "64.0 MiB"),
    "test_over_by_a_block": ("FAILED", "64.0 MiB"),
    "test_short_lived_peak": ("FAILED", "80.0 MiB"),
    "test_keeps_something": ("PASSED", "40.0 MiB"),
    "test_what_was_live_before_counts": ("FAILED", "72.0 MiB"),
    "test_oom": ("FAILED", None),
    "test_a_training_step": ("PASSED", None),
}


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "test_cases.py"
        file.write_text(CASES)
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        plugin = ["-p", "memtrace.pytest_plugin", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", "-v", *plugin, "--memtrace", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    text = done.stdout
    print(text[-6000:], done.stderr[-2000:])
    wrong = []
    for name, (outcome, peak) in EXPECTED.items():
        if not re.search(rf"::{name} {outcome}", text):
            wrong.append(f"{name}: not {outcome}")
        if peak is not None and not re.search(rf"{re.escape(peak)}  \S*::{name}\b", text):
            wrong.append(f"{name}: its peak is not listed as {peak}")
    for sentence in ("40.0 MiB of it live before the test", "GPU memory", "the limit is 64.0 MiB"):
        if sentence not in text:
            wrong.append(f"missing: {sentence}")
    print("\n".join(wrong) or f"{len(EXPECTED)} of {len(EXPECTED)} tests of the plugin as expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
