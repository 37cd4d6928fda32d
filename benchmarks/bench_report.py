"""``memtrace report`` against a bare ``pickle.load`` of the same unpacked file: time and memory as ratios.

    python benchmarks/bench_report.py [RECORDING.pickle.xz] [--runs N]

Both run as whole processes, in turn, so that a machine whose speed drifts does not favour either. Prints medians.
"""

from __future__ import annotations

import argparse
import lzma
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DEFAULT = Path(__file__).parents[1] / "sample_traces" / "llama2-7b_variable-length.pickle.xz"
BARE = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))"


def measure(command: list[str]) -> tuple[float, int]:
    """(wall seconds, peak memory in bytes) of one run."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    elapsed = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return elapsed, usage.ru_maxrss << 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recording", nargs="?", type=Path, default=DEFAULT)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        unpacked = Path(folder) / "snapshot.pickle"
        unpacked.write_bytes(lzma.decompress(args.recording.read_bytes()))
        bare = [sys.executable, "-c", BARE, str(unpacked)]
        report = [sys.executable, "-m", "memtrace", "report", str(unpacked)]
        measure(bare), measure(report)  # warm the page cache and the byte-code cache
        pairs = [(measure(bare), measure(report)) for _ in range(args.runs)]
    seconds = [statistics.median(run[side][0] for run in pairs) for side in (0, 1)]
    memory = [statistics.median(run[side][1] for run in pairs) for side in (0, 1)]
    ratios = [run[1][0] / run[0][0] for run in pairs]
    print(f"pickle.load      {seconds[0]:6.2f} s  {memory[0] / 2**20:6.0f} MiB")
    print(f"memtrace report  {seconds[1]:6.2f} s  {memory[1] / 2**20:6.0f} MiB")
    time_ratio, memory_ratio = statistics.median(ratios), memory[1] / memory[0]
    print(f"time ratio {time_ratio:.2f} (median of {args.runs} pairs), memory ratio {memory_ratio:.2f}")


if __name__ == "__main__":
    main()
